#!/bin/sh
# Does the setup that systemd-nspawn leaves out: it makes cgroups writable, and adds a second
# address, without which the names of this machine are not resolved.
for hierarchy in /sys/fs/cgroup/*/; do
    mount -o remount,bind,rw "$hierarchy" 2>/dev/null
done
ip link set lo up
ip address add 127.0.0.2/8 dev lo
exec /lib/systemd/systemd
