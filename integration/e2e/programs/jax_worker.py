"""Trains a small model with JAX on command, deterministically. The commands are those of torch_worker.py
except `bench`.

    step N     runs N training steps: "digest" over all parameters afterwards
    hold N     allocates N GiB more, filled with random values
    check      "digest" over the memory that `hold` has allocated
    sync       "sync_ms": duration of a small piece of work
"""

import hashlib
import json
import os
import sys
import time

os.environ.setdefault("XLA_FLAGS", "--xla_gpu_deterministic_ops=true")
import jax  # noqa: E402  (after the variable that JAX reads)
import jax.numpy as jnp  # noqa: E402

WIDTH = 2048
LAYERS = 6


def say(**values):
    print(json.dumps(values), flush=True)


def loss(parameters, batch):
    x = batch
    for weights, bias in parameters:
        x = jax.nn.gelu(x @ weights + bias)
    return jnp.square(x - batch).mean()


@jax.jit
def train(parameters, batch):
    gradients = jax.grad(loss)(parameters, batch)
    return jax.tree.map(lambda p, g: p - 0.1 * g, parameters, gradients)


@jax.jit
def weigh(words):
    # The sum wraps around in the same way each time. It is weighted, so that exchanged words change it.
    return (words * jnp.arange(1, words.size + 1, dtype=jnp.uint32)).sum(dtype=jnp.uint32)


def main():
    keys = jax.random.split(jax.random.key(1), LAYERS + 1)
    parameters = [(jax.random.normal(k, (WIDTH, WIDTH)) / WIDTH**0.5, jnp.zeros(WIDTH)) for k in keys[1:]]
    batch = jax.random.normal(keys[0], (256, WIDTH))
    parameters = jax.block_until_ready(train(parameters, batch))
    one = jnp.ones(8)
    held = []
    say(command="ready", result=0, pid=os.getpid())
    for line in sys.stdin:
        words = line.split()
        if words[0] == "step":
            for _ in range(int(words[1])):
                parameters = train(parameters, batch)
            digest = hashlib.sha256()
            for leaf in jax.tree.leaves(parameters):
                digest.update(jax.device_get(leaf).tobytes())
            say(command="step", result=0, digest=digest.hexdigest())
        elif words[0] == "hold":
            for _ in range(int(words[1])):
                key = jax.random.key(100 + len(held))
                held.append(jax.block_until_ready(jax.random.bits(key, (1 << 28,), jnp.uint32)))
            say(command="hold", result=0)
        elif words[0] == "check":
            say(command="check", result=0, digest=str([int(weigh(words)) for words in held]))
        elif words[0] == "sync":
            start = time.perf_counter()
            (one + 1).block_until_ready()
            say(command="sync", result=0, sync_ms=(time.perf_counter() - start) * 1000)


if __name__ == "__main__":
    main()
