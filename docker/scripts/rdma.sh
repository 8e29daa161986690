#!/bin/sh
# How NCCL reaches InfiniBand and RoCE between machines: rdma-core's libraries, without its services.
set -eu
apt-get update -qq -o Acquire::Languages=none
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends ibverbs-providers libibverbs1 librdmacm1 >/dev/null
rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/log/apt /var/log/dpkg.log
