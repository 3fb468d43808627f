"""Programs for programs.py in which two processes of one container share memory, by legacy IPC or by NCCL."""

import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

PATIENCE_S = 120
NUMBERS = 8 << 20
# Number of floats that each process allocates and shares with no other process or GPU.
OWN_NUMBERS = 512 << 20


def own_memory(seed, device="cuda"):
    return torch.full((OWN_NUMBERS,), float(seed), device=device)


def has_changed(memory):
    return float(memory.min()), float(memory.max())


class Together:
    """This process, and a second process that executes the requests in a queue."""

    def begin(self, serve, *arguments):
        spawn = mp.get_context("spawn")
        self.commands, self.answers = spawn.Queue(), spawn.Queue()
        everything = (*arguments, self.commands, self.answers)
        self.other = spawn.Process(target=serve, args=everything, daemon=True)
        self.other.start()

    def hear(self):
        return self.answers.get(timeout=PATIENCE_S)

    def sync(self):
        torch.cuda.synchronize()


def adds(commands, answers):
    """Runs in the second process. Allocates a tensor that the first process reads. Adds one tensor of the first process
    to another tensor of the first process."""
    first, second = commands.get(timeout=PATIENCE_S)
    unshared = own_memory(2)
    own = torch.zeros(NUMBERS, device="cuda")
    answers.put(own)
    while commands.get() == "step":
        second.add_(first, alpha=2)
        own.copy_(second).sub_(first)
        torch.cuda.synchronize()
        answers.put(("done", *has_changed(unshared)))


class Sharing(Together):
    """torch.multiprocessing: each process reads and writes tensors of the other process."""

    def __init__(self, seed):
        self.begin(adds)
        self.unshared = own_memory(seed)
        self.first = torch.arange(NUMBERS, device="cuda", dtype=torch.float32) + seed
        self.second = torch.zeros(NUMBERS, device="cuda")
        self.commands.put((self.first, self.second))
        self.theirs = self.hear()

    def step(self):
        self.first.mul_(0.5).add_(1)
        torch.cuda.synchronize()
        self.commands.put("step")
        self.unshared_of_both = (self.hear(), has_changed(self.unshared))

    def results(self):
        tensors = [tensor.cpu().numpy().tobytes() for tensor in (self.first, self.second, self.theirs)]
        return [*tensors, repr(self.unshared_of_both).encode()]


def join(rank, place):
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{place}", rank=rank, world_size=2)
    return torch.arange(NUMBERS, device="cuda", dtype=torch.float32) * (rank + 1)


def reduce(tensor):
    tensor.mul_(0.25).add_(1)
    dist.all_reduce(tensor)
    torch.cuda.synchronize()


def serves(place, commands, answers):
    tensor = join(1, place)
    unshared = own_memory(2)
    while commands.get() == "step":
        reduce(tensor)
        answers.put((float(tensor.sum()), *has_changed(unshared)))


class Ranks(Together):
    """NCCL: two processes, each on a GPU of its own. Both get the sum of their tensors."""

    def __init__(self, seed):
        place = f"/tmp/affinode-ranks-{os.getpid()}-{seed}"
        self.begin(serves, place)
        self.tensor = join(0, place)
        self.unshared = own_memory(seed)
        self.theirs = ()

    def step(self):
        self.commands.put("step")
        reduce(self.tensor)
        self.theirs = self.hear()

    def results(self):
        others = (self.theirs, has_changed(self.unshared))
        return [self.tensor.cpu().numpy().tobytes(), repr(others).encode()]


class Peers:
    """One process with tensors on both GPUs, which copies from one GPU to the other."""

    def __init__(self, seed):
        self.unshared = [own_memory(seed, "cuda:0"), own_memory(2, "cuda:1")]
        self.near = torch.arange(NUMBERS, device="cuda:0", dtype=torch.float32) + seed
        self.far = torch.zeros(NUMBERS, device="cuda:1")

    def step(self):
        self.far.add_(self.near.to("cuda:1"))
        self.near.copy_(self.far * 0.5)

    def sync(self):
        torch.cuda.synchronize(0)
        torch.cuda.synchronize(1)

    def results(self):
        tensors = [tensor.cpu().numpy().tobytes() for tensor in (self.near, self.far)]
        return [*tensors, repr([has_changed(memory) for memory in self.unshared]).encode()]
