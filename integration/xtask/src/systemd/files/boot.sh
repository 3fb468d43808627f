#!/bin/sh
# Boots the node whose root is $1, below cgroups named $2, with the built files $3 at /opt/affinode.
set -e
if [ -e /sys/fs/cgroup/cgroup.controllers ]; then
    hierarchies=/sys/fs/cgroup
else
    hierarchies=$(echo /sys/fs/cgroup/*)
fi
for hierarchy in $hierarchies; do
    [ -w "$hierarchy/cgroup.procs" ] || continue
    own=$hierarchy/$2
    mkdir -p "$own"
    if [ -e "$own/cpuset.effective_cpus" ]; then
        # A cgroup of version 1 accepts no process until these values are set.
        cat "$hierarchy/cpuset.cpus" > "$own/cpuset.cpus"
        cat "$hierarchy/cpuset.mems" > "$own/cpuset.mems"
    fi
    echo $$ > "$own/cgroup.procs"
done
# The files that systemd-nspawn writes about its containers stay in these mounts.
mkdir -p /run/systemd
mount -t tmpfs tmpfs /run/systemd
# All capabilities, all system calls and kernel keyrings, as on a real machine.
export SYSTEMD_SECCOMP=0
exec systemd-nspawn --directory="$1" --machine=node --hostname=node --keep-unit --register=no \
    --private-network --capability=all --console=pipe --resolv-conf=off --timezone=off \
    --kill-signal=SIGRTMIN+3 --bind-ro="$3":/opt/affinode /sbin/affinode-node-init
