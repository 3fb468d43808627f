#!/usr/bin/env python3
"""The worker in Python, which calls the driver by ctypes.

    ctypes_worker.py [--mib N] [--seed S] [--script "touch;sleep 2000;verify"]

Commands and replies are those of worker.c: verify, touch, sync, meminfo, spin MS, sleep MS, exec-info, quit.
Commands for NVML: nvml-init, nvml (queries the memory of the first device).
"""

import argparse
import ctypes
import json
import os
import random
import sys
import time

PTX = b"""
.version 6.4
.target sm_70
.address_size 64
.visible .entry add_u32(.param .u64 p0, .param .u64 p1, .param .u32 p2)
{
  .reg .pred %p<2>;
  .reg .b32 %r<7>;
  .reg .b64 %rd<7>;
  ld.param.u64 %rd1, [p0];
  cvta.to.global.u64 %rd1, %rd1;
  ld.param.u64 %rd2, [p1];
  ld.param.u32 %r1, [p2];
  mov.u32 %r2, %ctaid.x;
  mov.u32 %r3, %ntid.x;
  mov.u32 %r4, %tid.x;
  mov.u32 %r5, %nctaid.x;
  mul.wide.u32 %rd3, %r2, %r3;
  cvt.u64.u32 %rd4, %r4;
  add.u64 %rd3, %rd3, %rd4;
  mul.wide.u32 %rd5, %r5, %r3;
LOOP:
  setp.ge.u64 %p1, %rd3, %rd2;
  @%p1 bra DONE;
  shl.b64 %rd6, %rd3, 2;
  add.u64 %rd6, %rd1, %rd6;
  ld.global.u32 %r6, [%rd6];
  add.u32 %r6, %r6, %r1;
  st.global.u32 [%rd6], %r6;
  add.u64 %rd3, %rd3, %rd5;
  bra LOOP;
DONE:
  ret;
}
.visible .entry spin_ms(.param .u32 p0)
{
  .reg .pred %p<2>;
  .reg .b32 %r<2>;
  .reg .b64 %rd<3>;
  ld.param.u32 %r1, [p0];
  mul.wide.u32 %rd1, %r1, 1000000;
  mov.u64 %rd2, %globaltimer;
  add.u64 %rd1, %rd1, %rd2;
LOOP:
  mov.u64 %rd2, %globaltimer;
  setp.lt.u64 %p1, %rd2, %rd1;
  @%p1 bra LOOP;
  ret;
}
"""


class Worker:
    def __init__(self, mib, seed):
        self.cuda = ctypes.CDLL("libcuda.so.1")
        self.touches = 0
        self.words = mib << 18
        self.pattern = random.Random(seed).randbytes(self.words * 4)
        device, context, module = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
        self.memory = ctypes.c_uint64()
        self.add, self.spinner = ctypes.c_void_p(), ctypes.c_void_p()
        self.check("cuInit", 0)
        self.check("cuDeviceGet", ctypes.byref(device), 0)
        self.check("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.check("cuCtxSetCurrent", context)
        self.check("cuModuleLoadData", ctypes.byref(module), PTX)
        self.check("cuModuleGetFunction", ctypes.byref(self.add), module, b"add_u32")
        self.check("cuModuleGetFunction", ctypes.byref(self.spinner), module, b"spin_ms")
        self.check("cuMemAlloc_v2", ctypes.byref(self.memory), ctypes.c_size_t(self.words * 4))
        self.check("cuMemcpyHtoD_v2", self.memory, self.pattern, ctypes.c_size_t(self.words * 4))

    def check(self, name, *arguments):
        result = getattr(self.cuda, name)(*arguments)
        if result != 0:
            raise RuntimeError(f"{name} returned {result}")

    def launch(self, function, blocks, threads, *values):
        pointers = (ctypes.c_void_p * len(values))(*[ctypes.cast(ctypes.pointer(v), ctypes.c_void_p) for v in values])
        return self.cuda.cuLaunchKernel(function, blocks, 1, 1, threads, 1, 1, 0, None, pointers, None)

    def obey(self, command, number):
        """Returns the CUresult, and further fields of the reply."""
        if command == "touch":
            result = self.launch(self.add, 128, 256, self.memory, ctypes.c_uint64(self.words), ctypes.c_uint32(1))
            self.touches += result == 0
            return result, {}
        if command == "spin":
            return self.launch(self.spinner, 1, 1, ctypes.c_uint32(number)), {}
        if command == "sync":
            return self.cuda.cuCtxSynchronize(), {}
        if command == "sleep":
            time.sleep(number / 1000)
            return 0, {}
        if command == "meminfo":
            free, total = ctypes.c_size_t(), ctypes.c_size_t()
            result = self.cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))
            return result, {"free_bytes": free.value, "total_bytes": total.value}
        if command == "nvml-init":
            self.nvml, self.device = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.c_void_p()
            result = self.nvml.nvmlInit_v2()
            return result or self.nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(self.device)), {}
        if command == "nvml":
            memory = (ctypes.c_uint64 * 3)()
            result = self.nvml.nvmlDeviceGetMemoryInfo(self.device, memory)
            return result, {"total_bytes": memory[0], "free_bytes": memory[1]}
        if command == "exec-info":
            return 0, {"pid": os.getpid(), "uid": os.getuid(), "program": "ctypes_worker.py"}
        if command == "verify":
            back = ctypes.create_string_buffer(self.words * 4)
            result = self.cuda.cuMemcpyDtoH_v2(back, self.memory, ctypes.c_size_t(self.words * 4))
            got, expected = memoryview(back).cast("B").cast("I"), memoryview(self.pattern).cast("I")
            wrong = sum((b + self.touches) & 0xFFFFFFFF != g for b, g in zip(expected, got))
            return result, {"ok": result == 0 and wrong == 0, "wrong": wrong, "touches": self.touches}
        return (0 if command == "quit" else -1), {}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--mib", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--script")
    options = parser.parse_args()
    worker = Worker(options.mib, options.seed)
    print(json.dumps({"command": "open", "result": 0, "pid": os.getpid()}), flush=True)
    for line in options.script.split(";") if options.script else sys.stdin:
        words = line.split()
        if not words:
            continue
        start = time.monotonic_ns()
        result, more = worker.obey(words[0], int(words[1]) if len(words) > 1 else 0)
        now = time.monotonic_ns()
        said = {"command": words[0], "result": result, "elapsed_us": (now - start) // 1000, "at_us": now // 1000}
        print(json.dumps(said | more), flush=True)
        if words[0] == "quit":
            break


if __name__ == "__main__":
    main()
