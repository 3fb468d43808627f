#!/bin/sh
# Containers of this node may use what affinode install put in place: it is left there.
set -e
case "$1" in
remove | 0)
    if [ -e "${DPKG_ROOT:-}/var/lib/affinode/install.json" ]; then
        echo "affinode: this node still runs it; /usr/local/bin/affinode uninstall takes it off"
    fi
    ;;
esac
