#!/bin/sh
# Give the image a Python >= 3.12 and an empty environment /opt/.venv: the base's own, that of its package archive,
# or the pinned standalone one, in this order.
set -eu
export DEBIAN_FRONTEND=noninteractive

new_enough() { # PROGRAM
  command -v "$1" >/dev/null && "$1" -c 'import sys; sys.exit(sys.version_info < (3, 12))'
}

apt_install() {
  apt-get install -y -qq --no-install-recommends "$@" >/dev/null
}

apt_offers() { # the archive's python3 is new enough
  version=$(apt-cache policy python3 | sed -n 's/^  Candidate: 3\.\([0-9]*\).*/\1/p')
  [ "${version:-0}" -ge 12 ]
}

standalone() { # FILE
  echo "$PYTHON_SHA256  $1" | sha256sum --check --quiet --strict || {
    echo "error: the standalone Python is not the pinned one (sha256 $PYTHON_SHA256); do not use it" >&2
    exit 8
  }
  mkdir -p /opt/python
  tar -xzf "$1" -C /opt/python --strip-components=1 --no-same-owner
}

fetch() {
  apt_install curl
  if [ -s /run/secrets/ca.pem ]; then
    export CURL_CA_BUNDLE=/run/secrets/ca.pem
  fi
  curl --fail --silent --show-error --location --retry 3 --proto '=https' --output /tmp/python.tar.gz "$PYTHON_URL"
  standalone /tmp/python.tar.gz
  rm /tmp/python.tar.gz
  apt-get purge -y -qq --auto-remove curl >/dev/null
}

apt-get update -qq -o Acquire::Languages=none
apt_install ca-certificates numactl
python=python3
if new_enough python3; then
  :
elif apt_offers; then
  apt_install python3
elif [ -s /context/python.tar.gz ]; then
  standalone /context/python.tar.gz
  python=/opt/python/bin/python3
elif [ -n "$PYTHON_URL" ] && [ -n "$PYTHON_SHA256" ]; then
  fetch
  python=/opt/python/bin/python3
else
  echo "error: this base has no Python >= 3.12 and none is pinned; give one with --python-archive" >&2
  exit 4
fi
new_enough "$python" || {
  echo "error: $python is older than 3.12 or does not run on this base" >&2
  exit 4
}
"$python" -m venv --without-pip /opt/.venv
rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/cache/ldconfig /var/log/alternatives.log /var/log/apt /var/log/dpkg.log
