"""A CuPy program for programs.py, which uses CuPy's own memory pool."""

import cupy

WIDTH = 2048
# Number of 8-byte words in a GiB.
GIB = (1 << 30) // 8

shuffle = cupy.ElementwiseKernel(
    "uint64 x, uint64 key",
    "uint64 y",
    "y = x * 6364136223846793005ull + key; y ^= y >> 29; y *= 0xbf58476d1ce4e5b9ull; y ^= y >> 32",
    "shuffle",
)


def noise(seed, *shape):
    """Returns pseudo-random values between -1 and 1, without a library for random numbers."""
    words = shuffle(cupy.arange(WIDTH * WIDTH, dtype=cupy.uint64), cupy.uint64(seed))
    return ((words >> 40).astype(cupy.float32) / 2.0**23 - 1).reshape(shape)


class Cupy:
    """Multiplies a matrix in a stream of its own, with temporary arrays from the pool."""

    def __init__(self, seed):
        self.seed = seed
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self.weights = noise(seed, WIDTH, WIDTH) * (3 / WIDTH) ** 0.5
        self.state = noise(seed + 1, WIDTH, WIDTH)
        self.held = []
        self.sync()

    def measured(self):
        return self.step

    def step(self):
        with self.stream:
            self.state = cupy.tanh(self.state @ self.weights + self.state / 2)

    def results(self):
        self.sync()
        return [cupy.asnumpy(self.state).tobytes()]

    def hold(self, gib):
        for _ in range(gib):
            key = cupy.uint64(1000 * self.seed + len(self.held))
            self.held.append(shuffle(cupy.arange(GIB, dtype=cupy.uint64), key))
        self.tidy()
        self.sync()

    def check(self):
        # The sum wraps around in the same way each time. It is weighted, so that exchanged words change it.
        weights = cupy.arange(1, GIB + 1, dtype=cupy.uint64)
        sums = [int((words * weights).sum()) for words in self.held]
        del weights
        self.tidy()
        return sums

    def tidy(self):
        cupy.get_default_memory_pool().free_all_blocks()

    def held_bytes(self):
        return cupy.get_default_memory_pool().total_bytes()

    def sync(self):
        cupy.cuda.Device().synchronize()
