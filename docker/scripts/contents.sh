#!/bin/sh
# contents.sh TARGET ACCELERATOR PYTHON: what an image must and must not hold; runs in a container of it, as root. PYTHON: as its label
# says it, "standalone sha256:..." or "of the base, or standalone sha256:..."; empty: has no label.
set -eu
target=$1
packages=jaxlib
[ "$2" = cpu ] || packages="jaxlib jax-$2-pjrt jax-$2-plugin"
faults=0

fault() {
  echo "fault: $*"
  faults=$((faults + 1))
}

empty() { # FOLDER WHAT
  if [ -d "$1" ] && [ -n "$(find "$1" -type f -size +0 | head -n 1)" ]; then
    fault "$2 in $1"
  fi
}

for folder in /root/.cache /home/multimesh/.cache /var/lib/apt/lists /var/cache/apt/archives; do
  empty "$folder" "a cache"
done
empty /run/secrets "a secret"
for file in /etc/pip.conf /root/.pip/pip.conf /root/.config/pip/pip.conf /root/.netrc /root/.docker/config.json /opt/.venv/pip.conf; do
  if [ -e "$file" ]; then
    fault "settings of whoever built it, in $file"
  fi
done

case $3 in standalone*) [ -x /opt/python/bin/python3 ] || fault "the Python of its base, and the label names the standalone one" ;; esac
if [ "$target" = runtime ]; then
  for program in cc gcc g++ c++ clang clang++ nvcc ld as make bazel pip; do
    if path=$(command -v "$program"); then
      fault "a tool to build with, $path"
    fi
  done
  for file in /opt/maxtext/run.py /opt/maxtext/validate-cpu.sh /opt/entrypoint.sh /opt/hardware.py \
    /opt/inventory/sbom.cdx.json /opt/inventory/licences.txt /opt/inventory/THIRD-PARTY-NOTICES /opt/LICENSE \
    /opt/sources.lock /opt/images.lock; do
    [ -s "$file" ] || fault "no $file"
  done
  if [ -n "$(find /opt -user multimesh 2>/dev/null | head -n 1)" ]; then
    fault "files under /opt that its user can change"
  fi
else
  for program in cc clang git gdb ccache; do
    command -v "$program" >/dev/null || fault "no $program"
  done
fi
# The loader takes these before the libraries of JAX's wheels.
IFS=:
for folder in ${LD_LIBRARY_PATH:-}; do
  if [ -n "$(find "$folder/" -maxdepth 1 -name 'libcublasLt.so*' 2>/dev/null | head -n 1)" ]; then
    fault "CUDA of another than JAX's own, in $folder of LD_LIBRARY_PATH"
  fi
done
unset IFS
# JAX ignores a plugin of another version, and one whose own table of versions refuses the CUDA libraries, and runs on the CPU.
if [ "$target" != devcontainer ] && [ -x /opt/.venv/bin/python ]; then
  answer=$(/opt/.venv/bin/python -I -c '
from importlib.metadata import PackageNotFoundError, entry_points, version
versions = {}
for name in "'"$packages"'".split():
    try:
        versions[name] = version(name)
    except PackageNotFoundError:
        versions[name] = "is missing"
if len(set(versions.values())) > 1 or "is missing" in versions.values():
    print("packages of JAX that do not fit: " + ", ".join(" ".join(pair) for pair in versions.items()))
for plugin in entry_points(group="jax_plugins"):
    try:
        plugin.load().initialize()
    except Exception as error:
        if "cuInit" in str(error):
            continue  # no driver here; it is asked for after the versions of the libraries
        print("a plugin of JAX that cannot be used, %s: %s" % (plugin.name, " ".join(str(error).split())))
') || answer="no Python that starts, or a plugin of JAX that ends it"
  [ -z "$answer" ] || fault "$answer"
fi
[ "$faults" -eq 0 ]
