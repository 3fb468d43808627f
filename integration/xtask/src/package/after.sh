#!/bin/sh
# The registration of the runtime may restart containerd, so it is left to the administrator.
set -e
if [ -e "${DPKG_ROOT:-}/var/lib/affinode/install.json" ]; then
    echo "affinode: run /usr/bin/affinode install to put this version in use"
else
    echo "affinode: run affinode install to register the runtime with containerd"
fi
