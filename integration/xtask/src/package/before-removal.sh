#!/bin/sh
# Running containers may use the files that `affinode install` has copied, so these files are kept.
set -e
case "$1" in
remove | 0)
    if [ -e "${DPKG_ROOT:-}/var/lib/affinode/install.json" ]; then
        echo "affinode: this node still runs Affinode; run /usr/local/bin/affinode uninstall to remove it"
    fi
    ;;
esac
