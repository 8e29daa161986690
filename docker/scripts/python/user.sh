#!/bin/sh
# Make the user that the image runs as: 1000, as most people are on their machines, in place of one that the base has.
set -eu
if old=$(getent passwd 1000); then
  userdel --remove "${old%%:*}" 2>/dev/null
fi
export SOURCE_DATE_EPOCH=1767225600 # the day of the password's last change, in /etc/shadow
groupadd --gid 1000 multimesh
useradd --uid 1000 --gid 1000 --create-home --shell /bin/bash multimesh
install -d -o multimesh -g multimesh /workspace
