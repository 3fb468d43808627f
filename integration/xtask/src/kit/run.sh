#!/bin/sh
# Runs Affinode's suite for GPU machines. Needs an NVIDIA driver (570 or newer) and root;
# python3 with torch is tested too if it is installed. Installs nothing, needs no network.
#
#   run.sh [REPORT.json [suite|suite:WORD|engines|programs|gpus|steps|host-memory|calibration|dashboard|hazards|chaos]...]
#
# suite: checks that need a real driver; suite:WORD: its parts with WORD in their names.
# suite:tools repeats the orders that are likely to hang AFFINODE_TOOL_ROUNDS times (20).
# programs: transformers, cuDNN, CUDA graphs, CuPy, Triton, streams, two processes, if python3 has them, offloaded by each engine.
# gpus: on a machine with two of a kind, restores on the other one, and programs that share memory (torch.multiprocessing, NCCL, peers).
# host-memory: more offloads at once than host memory holds (needs 140 GiB of VRAM and 128 GiB of RAM; a quarter of an hour). steps: the time of steps with an engine and without Affinode. calibration: the costs of moves, as files beside the report that
# `affinode simulate --calibration` reads. dashboard: records the stream of its page, for a replay by
# `cargo xtask browser --recorded`. hazards: each with and without Affinode. chaos: thirty rounds of
# kills at random. Without a part, all of them. Prints tables, writes the same as JSON; exit status 0 when every
# goal was met, every hazard survived and no process lost.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
report=${1:-$here/report.json}
[ $# -eq 0 ] || shift
work=$(mktemp -d /var/tmp/affinode-kit.XXXXXX)
trap 'rm -rf "$work"' EXIT
chmod 755 "$work"
tar -xzf "$here/payload.tar.gz" -C "$work"

if ! ldconfig -p | grep -q libseccomp.so.2; then
    # runc starts itself again without an environment: only the loader's own folders count.
    echo "libseccomp.so.2 is missing: putting the kit's into /usr/local/lib" >&2
    cp "$work/containerd/libseccomp.so.2" /usr/local/lib/
    ldconfig
fi

export AFFINODE_ARTIFACTS="$work/affinode"
export PATH="$work/containerd:$PATH"
"$work/affinode/bin/affinode-gpu-suite" "$work/containerd" "$report" "$@"
