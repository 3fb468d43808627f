#!/bin/sh
# Runs Affinode's suite for GPU machines. Needs an NVIDIA driver (570 or newer) and root. If python3
# with torch is installed, it is tested as well. Installs nothing and needs no network.
#
#   run.sh [REPORT.json [suite|suite:WORD|engines|programs|programs:WORD|gpus|steps|steps:WORD|host-memory|calibration|dashboard|hazards|hazards:WORD|chaos|chaos:ROUND]...]
#
# Without a part, all parts run:
#
#   suite         checks that need a real driver. suite:WORD runs only its parts with WORD in their names.
#                 suite:tools repeats orders that are likely to hang AFFINODE_TOOL_ROUNDS times (default 20).
#   engines       compares the engines (a part of the suite)
#   programs      programs of transformers, cuDNN, CUDA graphs, CuPy, Triton, streams and two processes, as far as
#                 python3 has them, offloaded by each engine. programs:WORD and steps:WORD run only those with WORD in
#                 their names.
#   gpus          on a machine with two GPUs of one model: restores on the other GPU, and programs that share memory
#                 (torch.multiprocessing, NCCL, peer access)
#   host-memory   more offloads at the same time than host memory can hold. Needs 140 GiB of VRAM and 128 GiB of RAM,
#                 and takes a quarter of an hour.
#   steps         the time of steps with an engine and without Affinode
#   calibration   the costs of moves, written next to the report as files for `affinode simulate --calibration`
#   dashboard     records the dashboard's stream, for a replay by `cargo xtask browser --recorded`
#   hazards       each hazard with and without Affinode. hazards:WORD runs only those with WORD in their names.
#   chaos         thirty rounds of random kills, on both GPUs if there are two. chaos:ROUND begins at that round.
#
# Prints tables, and writes the same data as JSON. Exit status 0 if every goal was met, every hazard was survived and no
# process was lost.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
report=${1:-$here/report.json}
[ $# -eq 0 ] || shift
work=$(mktemp -d /var/tmp/affinode-kit.XXXXXX)
trap 'rm -rf "$work"' EXIT
chmod 755 "$work"
tar -xzf "$here/payload.tar.gz" -C "$work"

if ! ldconfig -p | grep -q libseccomp.so.2; then
    # runc starts itself again without an environment, so only libraries in the loader's own folders are found.
    echo "libseccomp.so.2 is missing: putting the kit's into /usr/local/lib" >&2
    cp "$work/containerd/libseccomp.so.2" /usr/local/lib/
    ldconfig
fi

export AFFINODE_ARTIFACTS="$work/affinode"
export PATH="$work/containerd:$PATH"
"$work/affinode/bin/affinode-gpu-suite" "$work/containerd" "$report" "$@"
