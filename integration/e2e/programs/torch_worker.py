"""Trains a small model on command, deterministically. "torch_worker.py inference" runs inference instead.

Commands on stdin, one JSON object per line on stdout:

    step N     runs N training steps: "digest" over all parameters afterwards; for inference, over the last pass
    bench      runs 300 steps after 100 for warm-up: median "step_ms", fastest "best_ms"
    hold N     allocates N GiB more, filled with random values
    check      "digest" over the memory that `hold` has allocated
    sync       "sync_ms": duration of torch.cuda.synchronize
"""

import hashlib
import json
import os
import statistics
import sys
import time

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
import torch  # noqa: E402  (after the variable that cuBLAS reads)

torch.manual_seed(1)
torch.use_deterministic_algorithms(True)

WIDTH = 2048


def say(**values):
    print(json.dumps(values), flush=True)


def main():
    device = torch.device("cuda")
    layers = []
    for _ in range(6):
        layers += [torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU(), torch.nn.LayerNorm(WIDTH)]
    model = torch.nn.Sequential(*layers).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batch = torch.randn(256, WIDTH, device=device)

    def step():
        optimizer.zero_grad(set_to_none=True)
        loss = (model(batch) - batch).square().mean()
        loss.backward()
        optimizer.step()

    @torch.inference_mode()
    def infer():
        nonlocal batch
        batch = model(batch)

    infers = sys.argv[1:] == ["inference"]
    (infer if infers else step)()
    held = []
    torch.cuda.synchronize()
    say(command="ready", result=0, pid=os.getpid())
    for line in sys.stdin:
        words = line.split()
        if words[0] == "step":
            for _ in range(int(words[1])):
                (infer if infers else step)()
            digest = hashlib.sha256()
            for result in [batch] if infers else model.parameters():
                digest.update(result.detach().cpu().numpy().tobytes())
            say(command="step", result=0, digest=digest.hexdigest())
        elif words[0] == "bench":
            times = []
            for number in range(400):
                start = time.perf_counter()
                step()
                torch.cuda.synchronize()
                if number >= 100:
                    times.append((time.perf_counter() - start) * 1000)
            say(command="bench", result=0, step_ms=statistics.median(times), best_ms=min(times))
        elif words[0] == "hold":
            for _ in range(int(words[1])):
                held.append(torch.randint(2**62, ((1 << 30) // 8,), device=device))
            torch.cuda.synchronize()
            say(command="hold", result=0)
        elif words[0] == "check":
            # The sum wraps around in the same way each time. It is weighted, so that exchanged words change it.
            weights = torch.arange(1, (1 << 30) // 8 + 1, device=device)
            sums = [int((tensor * weights).sum()) for tensor in held]
            del weights
            torch.cuda.empty_cache()
            say(command="check", result=0, digest=str(sums))
        elif words[0] == "sync":
            start = time.perf_counter()
            torch.cuda.synchronize()
            say(command="sync", result=0, sync_ms=(time.perf_counter() - start) * 1000)


if __name__ == "__main__":
    main()
