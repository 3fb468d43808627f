"""Runs the program of this kind on command, deterministically: programs.py KIND [SEED].

Commands on stdin, one JSON object per line on stdout:

    step N     runs N steps: "digest" over all results afterwards
    bench      runs 30 steps after 5 for warm-up: median "step_ms", fastest "best_ms"
    hold N     allocates N GiB more, filled with random values
    check      "digest" over the memory that `hold` has allocated, and "held_bytes": device memory that all allocators
               of the program hold
    sync       "sync_ms": duration of a wait for the device

The first line is "ready", or "absent" if required software is not installed ("why" names it). If "result" is not 0,
the program has failed and ends, and "why" contains the reason.
"""

import hashlib
import importlib
import json
import os
import statistics
import sys
import time
import traceback

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

KINDS = {
    "training": ("torch_programs", "Training"),
    "graph": ("torch_programs", "Graph"),
    "cudnn": ("torch_programs", "Convolutions"),
    "streams": ("torch_programs", "Streams"),
    "llm": ("llm_program", "Llm"),
    "cupy": ("cupy_program", "Cupy"),
    "triton": ("triton_program", "Triton"),
    "pair": ("pair_program", "Pair"),
    "sharing": ("shared_programs", "Sharing"),
    "ranks": ("shared_programs", "Ranks"),
    "peers": ("shared_programs", "Peers"),
}
WARM_UP = 5
MEASURED = 30

# The original stdout is only for replies. Text that libraries print goes to stderr.
ANSWERS = sys.stdout
sys.stdout = sys.stderr


def say(**values):
    print(json.dumps(values), file=ANSWERS, flush=True)


def fail(command, error):
    traceback.print_exc()
    say(command=command, result=1, why=f"{type(error).__name__}: {error}"[:400])


def digest(program):
    whole = hashlib.sha256()
    for result in program.results():
        whole.update(result)
    return whole.hexdigest()


def milliseconds(work):
    start = time.perf_counter()
    work()
    return (time.perf_counter() - start) * 1000


def bench(program):
    one = program.measured()

    def step():
        one()
        program.sync()

    times = [milliseconds(step) for _ in range(WARM_UP + MEASURED)][WARM_UP:]
    # Frees the program's memory, so that it does not affect the other programs.
    del one
    program.tidy()
    return {"step_ms": statistics.median(times), "best_ms": min(times)}


def answer(program, words):
    count = int(words[1]) if len(words) > 1 else 0
    if words[0] == "step":
        for _ in range(count):
            program.step()
        return {"digest": digest(program)}
    if words[0] == "bench":
        return bench(program)
    if words[0] == "hold":
        program.hold(count)
        return {}
    if words[0] == "check":
        return {"digest": str(program.check()), "held_bytes": program.held_bytes()}
    if words[0] == "sync":
        return {"sync_ms": milliseconds(program.sync)}
    raise ValueError(f"no command: {words}")


def main():
    module, name = KINDS[sys.argv[1]]
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else 1
    try:
        program = getattr(importlib.import_module(module), name)(seed)
        program.step()
        program.sync()
    except Exception as error:
        fail("absent", error)
        return 1
    say(command="ready", result=0, pid=os.getpid())
    for line in sys.stdin:
        words = line.split()
        try:
            say(command=words[0], result=0, **answer(program, words))
        except Exception as error:
            fail(words[0], error)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
