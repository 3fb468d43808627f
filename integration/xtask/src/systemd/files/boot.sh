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
        # cgroup v1 accepts no process before these are set.
        cat "$hierarchy/cpuset.cpus" > "$own/cpuset.cpus"
        cat "$hierarchy/cpuset.mems" > "$own/cpuset.mems"
    fi
    echo $$ > "$own/cgroup.procs"
done
# What systemd-nspawn notes about its nodes stays in these mounts.
mkdir -p /run/systemd
mount -t tmpfs tmpfs /run/systemd
# As on a machine of its own: every capability, every system call, keys.
export SYSTEMD_SECCOMP=0
exec systemd-nspawn --directory="$1" --machine=node --hostname=node --keep-unit --register=no \
    --private-network --capability=all --console=pipe --resolv-conf=off --timezone=off \
    --kill-signal=SIGRTMIN+3 --bind-ro="$3":/opt/affinode /sbin/affinode-node-init
