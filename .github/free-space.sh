#!/bin/sh
# Makes room on GitHub's own runners, whose disk has 14 GB free: removes what they bring for other languages. As root.
set -eu
if [ "${RUNNER_ENVIRONMENT-}" != github-hosted ]; then
  echo "error: $0: this is none of GitHub's own runners (RUNNER_ENVIRONMENT is not github-hosted); nothing was removed" >&2
  exit 2
fi
before=$(df --output=avail --block-size=1M / | tail -n 1)
rm -rf /usr/local/lib/android /usr/share/dotnet /usr/share/swift /opt/ghc /usr/local/.ghcup /opt/hostedtoolcache/CodeQL
after=$(df --output=avail --block-size=1M / | tail -n 1)
echo "free space: $before MB, now $after MB"
