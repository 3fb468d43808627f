"""CUDA processes that use tools: tool_program.py PROCESSES [nvtx].

The program imports torch once and forks PROCESSES processes, each with its own context, memory and profiler. All
processes execute each command at the same time. Commands on stdin, one JSON object per line on stdout:

    step       runs a few steps, with nvtx inside NVTX ranges: "digest" over the results of all processes
    begin      starts torch.profiler
    end        ends the profiler: "events" is the lowest number of GPU events that any process has recorded
    video      opens a session of NVDEC: "why" if the machine has no libnvcuvid

"count" is the number of processes that replied with success within a minute. The first line is "ready".
"""

import contextlib
import ctypes
import hashlib
import json
import multiprocessing
import os
import sys
import time
import traceback

PATIENCE_S = 60
MIB = 64
STEPS = 8

# The original stdout is only for replies. Text that libraries print goes to stderr.
ANSWERS = sys.stdout
sys.stdout = sys.stderr


def say(**values):
    print(json.dumps(values), file=ANSWERS, flush=True)


class Rectangle(ctypes.Structure):
    _fields_ = [(side, ctypes.c_short) for side in ("left", "top", "right", "bottom")]


class DecoderRequest(ctypes.Structure):
    """The structure CUVIDDECODECREATEINFO of NVDEC's interface."""

    _fields_ = [
        ("width", ctypes.c_ulong),
        ("height", ctypes.c_ulong),
        ("surfaces", ctypes.c_ulong),
        ("codec", ctypes.c_int),
        ("chroma", ctypes.c_int),
        ("flags", ctypes.c_ulong),
        ("depth_minus_8", ctypes.c_ulong),
        ("intra_only", ctypes.c_ulong),
        ("widest", ctypes.c_ulong),
        ("highest", ctypes.c_ulong),
        ("reserved", ctypes.c_ulong),
        ("shown", Rectangle),
        ("output", ctypes.c_int),
        ("deinterlace", ctypes.c_int),
        ("target_width", ctypes.c_ulong),
        ("target_height", ctypes.c_ulong),
        ("output_surfaces", ctypes.c_ulong),
        ("lock", ctypes.c_void_p),
        ("target", Rectangle),
        ("histogram", ctypes.c_ulong),
        ("reserved_2", ctypes.c_ulong * 4),
    ]


class Process:
    """Executes the commands in a forked process."""

    H264, CHROMA_420, PREFER_CUVID = 4, 1, 4

    def __init__(self, torch, seed, ranges):
        self.torch, self.ranges = torch, ranges
        self.profile = None
        self.decoders = []
        torch.manual_seed(seed)
        side = 1024
        self.weights = torch.randn(side, side, device="cuda") / side**0.5
        self.state = torch.randn(MIB * (1 << 18) // side, side, device="cuda")
        torch.cuda.synchronize()

    def step(self):
        for _ in range(STEPS):
            if self.ranges:
                self.torch.cuda.nvtx.range_push("step")
            self.state = (self.state @ self.weights).tanh()
            if self.ranges:
                self.torch.cuda.nvtx.range_pop()
        words = self.state.view(self.torch.int32).to(self.torch.int64)
        return {"digest": int(words.sum())}

    def begin(self):
        kinds = self.torch.profiler.ProfilerActivity
        self.profile = self.torch.profiler.profile(activities=[kinds.CPU, kinds.CUDA])
        self.profile.__enter__()
        return {}

    def end(self):
        self.torch.cuda.synchronize()
        self.profile.__exit__(None, None, None)
        on_gpu = self.torch.autograd.DeviceType.CUDA
        events = sum(event.device_type == on_gpu for event in self.profile.events())
        self.profile = None
        return {"events": events}

    def video(self):
        library = ctypes.CDLL("libnvcuvid.so.1")
        driver = ctypes.CDLL("libcuda.so.1")
        context, lock, decoder = (ctypes.c_void_p() for _ in range(3))
        codes = [driver.cuCtxGetCurrent(ctypes.byref(context)), library.cuvidCtxLockCreate(ctypes.byref(lock), context)]
        wanted = DecoderRequest(
            width=640,
            height=480,
            surfaces=8,
            codec=self.H264,
            chroma=self.CHROMA_420,
            flags=self.PREFER_CUVID,
            widest=640,
            highest=480,
            target_width=640,
            target_height=480,
            output_surfaces=2,
            lock=lock,
        )
        codes.append(library.cuvidCreateDecoder(ctypes.byref(decoder), ctypes.byref(wanted)))
        if any(codes):
            raise RuntimeError(f"cuvid returned {codes}")
        # The decoder is kept, so a session is in progress from here on.
        self.decoders.append((library, lock, decoder))
        return {}


def attempt(work):
    try:
        return work()
    except Exception as error:
        traceback.print_exc()
        return {"why": f"{type(error).__name__}: {error}"[:300]}


def live(torch, seed, ranges, pipe):
    process = None

    def begin():
        nonlocal process
        process = Process(torch, seed, ranges)
        return {}

    pipe.send(attempt(begin))
    while True:
        try:
            command = pipe.recv()
        except EOFError:
            return
        pipe.send(attempt(lambda: getattr(process, command)()))


def answers(pipes, within_s=PATIENCE_S):
    """Returns a reply for each process, or None for a process that hangs or has ended."""
    end = time.monotonic() + within_s
    found = []
    for pipe in pipes:
        try:
            found.append(pipe.recv() if pipe.poll(max(0, end - time.monotonic())) else None)
        except (EOFError, OSError):
            found.append(None)
    return found


def tell(command, found):
    good = [answer for answer in found if answer is not None and "why" not in answer]
    why = [answer["why"] for answer in found if answer is not None and "why" in answer]
    values = {"count": len(good), "why": why[0] if why else ""}
    if len(good) == len(found):
        if "digest" in found[0]:
            values["digest"] = hashlib.sha256(repr([a["digest"] for a in found]).encode()).hexdigest()
        values["events"] = min(answer.get("events", 0) for answer in found)
    say(command=command, result=0, **values)


def main():
    count, ranges = int(sys.argv[1]), "nvtx" in sys.argv[2:]
    try:
        import torch
        import torch.profiler
    except Exception as error:
        say(command="absent", result=1, why=f"{type(error).__name__}: {error}"[:300])
        return 1
    # The parent has no context. Each child creates its own.
    context = multiprocessing.get_context("fork")
    pipes = []
    for seed in range(count):
        pipe, other = context.Pipe()
        context.Process(target=live, args=(torch, seed, ranges, other), daemon=True).start()
        other.close()
        pipes.append(pipe)
    # All children create a context at the same time.
    tell("ready", answers(pipes, 2 * PATIENCE_S))
    for line in sys.stdin:
        command = line.strip()
        for pipe in pipes:
            # A process that has ended is reported when its reply is read.
            with contextlib.suppress(OSError):
                pipe.send(command)
        tell(command, answers(pipes))
    return 0


if __name__ == "__main__":
    status = main()
    # The program does not wait for processes that hang.
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(status)
