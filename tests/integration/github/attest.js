// attest.js PACKAGE IMAGE DIGEST: what actions/attest does with a registry once it has signed: its own code, from npm, reads the login
// and attaches the bundle to the image. Nothing is signed here.
const { attachArtifactToImage, getRegistryCredentials } = require(process.argv[2])
const [imageName, imageDigest] = process.argv.slice(3)
const mediaType = 'application/vnd.dev.sigstore.bundle.v0.3+json'

try {
  const credentials = getRegistryCredentials(imageName)
  const artifact = Buffer.from('{"signed": "by nobody"}')
  attachArtifactToImage({ credentials, imageName, imageDigest, artifact, mediaType, fetchOpts: { timeout: 30000, retry: 3 } }).then(
    attached => console.log(attached.digest),
    error => fail(error.cause || error)
  )
} catch (error) {
  fail(error)
}

function fail(error) {
  console.error(`${error}`)
  process.exitCode = 1
}
