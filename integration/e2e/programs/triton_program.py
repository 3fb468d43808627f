"""A Triton kernel for programs.py, which works on memory of torch."""

import torch
import triton
import triton.language as tl

from torch_programs import DEVICE, TorchProgram, data

WORDS = 1 << 24
BLOCK = 1024


@triton.jit(do_not_specialize=["turn"])
def shuffle(to, words, others, count, turn, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = places < count
    x = tl.load(words + places, mask=inside, other=0)
    # Reads the neighbour's words in reverse order, so every block depends on another block.
    y = tl.load(others + (count - 1 - places), mask=inside, other=0)
    x = x * 6364136223846793005 + y + turn
    x = x ^ (x >> 29)
    tl.store(to + places, x, mask=inside)


class Triton(TorchProgram):
    """Works on three buffers in turn."""

    def __init__(self, seed):
        super().__init__(seed)
        self.words = [torch.randint(2**62, (WORDS,), device=DEVICE) for _ in range(3)]
        self.turn = 0

    def step(self):
        to, one, other = (self.words[(self.turn + n) % 3] for n in range(3))
        self.turn += 1
        shuffle[(triton.cdiv(WORDS, BLOCK),)](to, one, other, WORDS, self.turn, BLOCK=BLOCK)

    def results(self):
        return (data(words) for words in self.words)
