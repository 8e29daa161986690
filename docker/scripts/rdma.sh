#!/bin/sh
# How NCCL and NVSHMEM reach InfiniBand and RoCE between machines: rdma-core's libraries, without its services, and UCX.
set -eu
apt-get update -qq -o Acquire::Languages=none
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
  ibverbs-providers libibverbs1 librdmacm1 libucx0 ucx-utils >/dev/null
rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/cache/ldconfig /var/log/alternatives.log /var/log/apt /var/log/dpkg.log
