"""Allocates VRAM until an allocation fails, with the allocator of one library: limit_program.py LIBRARY.

Commands on stdin, one JSON object per line on stdout:

    sizes    "sizes_bytes": the size of the GPU's VRAM, as the library, NVML and nvidia-smi return it. For JAX, the
             library's size is the VRAM that JAX allocates at its start.
    fill     allocates blocks of 1 GiB until an allocation fails: "why" is the error, and "held_bytes" is the size of
             all blocks
    drop N   frees N blocks: "held_bytes"
    check    "digest" over all blocks

The first line is "ready", or "absent" with "why" if the library is not installed.
"""

import ctypes
import json
import subprocess
import sys

GIB = 1 << 30
# Number of words that are summed at once. The limit leaves little VRAM for intermediate results.
PART = 1 << 22
ANSWERS = sys.stdout
sys.stdout = sys.stderr


def say(**values):
    print(json.dumps(values), file=ANSWERS, flush=True)


class Torch:
    def __init__(self):
        import torch

        self.torch = torch
        torch.zeros(1, device="cuda")

    def size(self):
        return self.torch.cuda.mem_get_info()[1]

    def block(self, seed):
        return self.torch.full((GIB // 4,), seed, dtype=self.torch.int32, device="cuda")

    def total(self, block):
        return sum(int(part.sum()) for part in block.split(PART))

    def drop(self):
        self.torch.cuda.empty_cache()


class Cupy:
    def __init__(self):
        import cupy

        self.cupy = cupy
        cupy.zeros(1)

    def size(self):
        return self.cupy.cuda.runtime.memGetInfo()[1]

    def block(self, seed):
        return self.cupy.full((GIB // 4,), seed, dtype=self.cupy.int32)

    def total(self, block):
        return int(block.sum(dtype=self.cupy.int64))

    def drop(self):
        self.cupy.get_default_memory_pool().free_all_blocks()


class Jax:
    def __init__(self):
        import jax

        self.jax = jax
        add = lambda block, start: jax.lax.dynamic_slice(block, (start,), (PART,)).sum()  # noqa: E731
        self.add = jax.jit(add)
        jax.block_until_ready(jax.numpy.zeros(1))

    def size(self):
        return self.jax.devices()[0].memory_stats()["bytes_limit"]

    def block(self, seed):
        numpy = self.jax.numpy
        return self.jax.block_until_ready(numpy.full((GIB // 4,), seed, dtype=numpy.int32))

    def total(self, block):
        return sum(int(self.add(block, start)) for start in range(0, GIB // 4, PART))

    def drop(self):
        pass


LIBRARIES = {"torch": Torch, "CuPy": Cupy, "JAX": Jax}


class Memory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


def of_nvml():
    nvml, device, memory = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.c_void_p(), Memory()
    for result in (
        nvml.nvmlInit_v2(),
        nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(device)),
        nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)),
        nvml.nvmlShutdown(),
    ):
        if result != 0:
            raise RuntimeError(f"NVML returned {result}")
    return memory.total


def of_tool():
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    return int(subprocess.run(query, capture_output=True, check=True, text=True).stdout.split()[0]) << 20


class Program:
    def __init__(self, name):
        self.name, self.library, self.blocks = name, LIBRARIES[name](), []

    def sizes(self):
        return {"sizes_bytes": {self.name: self.library.size(), "NVML": of_nvml(), "nvidia-smi": of_tool()}}

    def held(self):
        return {"held_bytes": len(self.blocks) * GIB}

    def fill(self):
        # The bound ends the loop if nothing limits the allocations.
        while len(self.blocks) < 200:
            try:
                self.blocks.append(self.library.block(len(self.blocks) + 1))
            except Exception as error:  # each library has a type of its own
                return {**self.held(), "why": f"{type(error).__name__}: {error}"[:400]}
        return self.held()

    def drop(self, count):
        del self.blocks[len(self.blocks) - int(count) :]
        self.library.drop()
        return self.held()

    def check(self):
        return {"digest": str([self.library.total(block) for block in self.blocks])}


def main():
    try:
        program = Program(sys.argv[1])
    except ImportError as error:
        say(command="absent", result=1, why=str(error))
        sys.exit(1)
    say(command="ready", result=0)
    for line in sys.stdin:
        words = line.split()
        try:
            more, result = getattr(program, words[0])(*words[1:]), 0
        except Exception as error:
            more, result = {"why": f"{type(error).__name__}: {error}"[:400]}, 1
        say(command=words[0], result=result, **more)


main()
