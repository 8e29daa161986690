# shellcheck shell=sh
# Sourced by the scripts that run pip: the caller's configuration and certificates, which no layer keeps.
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PIP_ROOT_USER_ACTION=ignore PIP_PROGRESS_BAR=off
if [ -s /run/secrets/pip.conf ]; then
  export PIP_CONFIG_FILE=/run/secrets/pip.conf
fi
if [ -s /run/secrets/ca.pem ]; then
  export PIP_CERT=/run/secrets/ca.pem
fi
