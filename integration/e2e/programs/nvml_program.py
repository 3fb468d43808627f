"""Uses CUDA by ctypes, and makes NVML queries by pynvml.

Commands on stdin, one JSON object per line on stdout:

    init       calls nvmlInit, and gets the handle of the first device
    shutdown   calls nvmlShutdown
    facts      "digest" over constant data: count, name, UUID, versions, bus, capability, memory
    figures    queries memory, utilisation, temperature, power and processes: "free_bytes"
    verify     "ok": whether the program's memory is unchanged

The first line is "ready", or "absent" with "why".
"""

import ctypes
import hashlib
import json
import sys
import time

MIB = 64


def say(**values):
    print(json.dumps(values), flush=True)


try:
    import pynvml
except ImportError as error:
    say(command="absent", result=1, why=str(error))
    sys.exit(1)


class Program:
    def __init__(self):
        self.cuda = ctypes.CDLL("libcuda.so.1")
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self.memory, self.size = ctypes.c_uint64(), ctypes.c_size_t(MIB << 20)
        self.content = hashlib.shake_256(b"nvml").digest(MIB << 20)
        self.check("cuInit", 0)
        self.check("cuDeviceGet", ctypes.byref(device), 0)
        self.check("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.check("cuCtxSetCurrent", context)
        self.check("cuMemAlloc_v2", ctypes.byref(self.memory), self.size)
        self.check("cuMemcpyHtoD_v2", self.memory, self.content, self.size)
        self.device = None

    def check(self, name, *arguments):
        result = getattr(self.cuda, name)(*arguments)
        if result != 0:
            raise RuntimeError(f"{name} returned {result}")

    def init(self):
        pynvml.nvmlInit()
        self.device = pynvml.nvmlDeviceGetHandleByIndex(0)
        return {}

    def shutdown(self):
        pynvml.nvmlShutdown()
        return {}

    def facts(self):
        device = self.device
        facts = [
            pynvml.nvmlDeviceGetCount(),
            pynvml.nvmlDeviceGetName(device),
            pynvml.nvmlDeviceGetUUID(device),
            pynvml.nvmlDeviceGetIndex(device),
            pynvml.nvmlDeviceGetPciInfo(device).busId,
            pynvml.nvmlSystemGetDriverVersion(),
            pynvml.nvmlSystemGetNVMLVersion(),
            pynvml.nvmlSystemGetCudaDriverVersion(),
            pynvml.nvmlDeviceGetCudaComputeCapability(device),
            pynvml.nvmlDeviceGetMemoryInfo(device).total,
        ]
        return {"digest": hashlib.sha256(repr(facts).encode()).hexdigest()}

    def figures(self):
        device = self.device
        memory = pynvml.nvmlDeviceGetMemoryInfo(device)
        rates = pynvml.nvmlDeviceGetUtilizationRates(device)
        degrees = pynvml.nvmlDeviceGetTemperature(device, pynvml.NVML_TEMPERATURE_GPU)
        milliwatts = pynvml.nvmlDeviceGetPowerUsage(device)
        pynvml.nvmlDeviceGetComputeRunningProcesses(device)
        if memory.free + memory.used > memory.total or rates.gpu > 100:
            raise RuntimeError(f"{memory} {rates}")
        if not (0 < degrees < 120 and 0 < milliwatts < 2_000_000):
            raise RuntimeError(f"{degrees} degrees, {milliwatts} mW")
        return {"free_bytes": memory.free}

    def verify(self):
        back = ctypes.create_string_buffer(MIB << 20)
        self.check("cuMemcpyDtoH_v2", back, self.memory, self.size)
        if back.raw != self.content:
            raise RuntimeError("its memory is not as it was")
        return {"ok": True}


def main():
    program = Program()
    say(command="ready", result=0)
    for line in sys.stdin:
        command = line.strip()
        start = time.monotonic_ns()
        try:
            more, result = getattr(program, command)(), 0
        except (RuntimeError, pynvml.NVMLError) as error:
            more, result = {"why": f"{type(error).__name__}: {error}"}, 1
        elapsed_us = (time.monotonic_ns() - start) // 1000
        say(command=command, result=result, elapsed_us=elapsed_us, **more)


main()
