#!/bin/sh
# What one needs to work on this repository and to build jaxlib.
set -eu
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq -o Acquire::Languages=none
apt-get install -y -qq --no-install-recommends \
  build-essential ccache clang clang-format clang-tidy clangd cmake curl file gdb git hwloc ibverbs-providers ibverbs-utils \
  jq less libopenmpi-dev librdmacm1 lld llvm make ninja-build openmpi-bin openssh-client patchelf pkg-config procps \
  python3-dev python3-venv rsync unzip valgrind vim-tiny xz-utils zip >/dev/null
rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/cache/ldconfig /var/log/alternatives.log /var/log/apt /var/log/dpkg.log
