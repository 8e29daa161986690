#!/bin/sh
# parts.sh ENVIRONMENT FOLDER: move an environment into FOLDER/1 to FOLDER/5, each a layer of an image that copies it: cuDNN; cuBLAS and
# NCCL; cuFFT, cuSOLVER and cuSPARSE; the rest of CUDA with JAX's plugins; all else. An environment without CUDA has the last alone.
set -eu
cd "$1"
parts=$2
packages=$(echo lib/python3*/site-packages)

part() { # NUMBER PATH...
  mkdir -p "$parts/$1"
  to=$parts/$1/$packages
  shift
  for name in "$@"; do
    if [ -e "$packages/$name" ]; then
      mkdir -p "$(dirname "$to/$name")"
      mv "$packages/$name" "$to/$name"
    fi
  done
}

part 1 nvidia/cudnn
part 2 nvidia/cublas nvidia/nccl
part 3 nvidia/cufft nvidia/cusolver nvidia/cusparse
mkdir -p "$packages/nvidia"
for file in "$packages"/nvidia/*; do
  if [ -e "$file" ]; then part 4 "nvidia/${file##*/}"; fi
done
part 4 jax_plugins jax_cuda12_plugin jax_cuda12_pjrt
rmdir "$packages/nvidia"
mkdir -p "$parts/5"
for file in * .[!.]*; do
  if [ -e "$file" ] || [ -L "$file" ]; then mv "$file" "$parts/5/$file"; fi
done
