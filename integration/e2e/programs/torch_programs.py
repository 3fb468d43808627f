"""Programs of torch for programs.py: training loops, one of them also as a CUDA graph, and work in many streams."""

import torch

DEVICE = torch.device("cuda")
WIDTH = 2048
# Large enough that a step takes at least 10 ms on a large GPU. The time of the launches is then negligible.
BATCH = 4096
LAYERS = 6
# Number of 8-byte words in a GiB.
GIB = (1 << 30) // 8


def data(tensor):
    """Returns the bytes of a tensor of any type."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes()


class TorchProgram:
    """Base class of all programs that use torch's allocator."""

    def __init__(self, seed):
        # Some calls have no deterministic algorithm and do not need one. torch prints warnings about them to stderr.
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.manual_seed(seed)
        self.held = []

    def measured(self):
        """Runs one step of `bench`."""
        return self.step

    def hold(self, gib):
        for _ in range(gib):
            self.held.append(torch.randint(2**62, (GIB,), device=DEVICE))
        torch.cuda.synchronize()

    def check(self):
        # The sum wraps around in the same way each time. It is weighted, so that exchanged words change it.
        weights = torch.arange(1, GIB + 1, device=DEVICE)
        sums = [int((tensor * weights).sum()) for tensor in self.held]
        del weights
        self.tidy()
        return sums

    def tidy(self):
        """Releases unused memory of the allocator."""
        torch.cuda.empty_cache()

    def held_bytes(self):
        return torch.cuda.memory_reserved()

    def sync(self):
        torch.cuda.synchronize()


class Training(TorchProgram):
    """Trains a small model with AdamW."""

    def __init__(self, seed):
        super().__init__(seed)
        layers = []
        for _ in range(LAYERS):
            layers += [torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU(), torch.nn.LayerNorm(WIDTH)]
        self.model = torch.nn.Sequential(*layers).to(DEVICE)
        # capturable: the step counter is on the device, as a CUDA graph requires.
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, capturable=True)
        self.batch = torch.randn(BATCH, WIDTH, device=DEVICE)

    def train(self):
        loss = (self.model(self.batch) - self.batch).square().mean()
        loss.backward()
        self.optimizer.step()

    def step(self):
        self.optimizer.zero_grad(set_to_none=True)
        self.train()

    def results(self):
        return (data(parameter) for parameter in self.model.parameters())


class Graph(Training):
    """Runs the same step as a CUDA graph. The graph is captured once and replayed for each batch."""

    def __init__(self, seed):
        super().__init__(seed)
        self.batches = [torch.randn_like(self.batch) for _ in range(4)]
        self.turn = 0
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(3):
                super().step()
        torch.cuda.current_stream().wait_stream(aside)
        self.graph = torch.cuda.CUDAGraph()
        self.optimizer.zero_grad(set_to_none=True)
        with torch.cuda.graph(self.graph):
            self.train()

    def step(self):
        self.batch.copy_(self.batches[self.turn % len(self.batches)])
        self.turn += 1
        self.graph.replay()


class Convolutions(TorchProgram):
    """Trains a convolutional network with running statistics and AdamW. cuDNN computes the convolutions."""

    IMAGES = 128
    SIDE = 64

    def __init__(self, seed):
        super().__init__(seed)
        if not torch.backends.cudnn.is_available():
            raise RuntimeError("torch has no cuDNN")
        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.benchmark = False
        layers, channels = [], 3
        for wider in (64, 128, 256):
            convolution = torch.nn.Conv2d(channels, wider, 3, stride=2, padding=1)
            layers += [convolution, torch.nn.BatchNorm2d(wider), torch.nn.ReLU()]
            channels = wider
        self.model = torch.nn.Sequential(*layers, torch.nn.Flatten(), torch.nn.LazyLinear(10)).to(DEVICE)
        self.images = torch.randn(self.IMAGES, 3, self.SIDE, self.SIDE, device=DEVICE)
        self.labels = torch.randint(10, (self.IMAGES,), device=DEVICE)
        self.model(self.images)  # The last layer learns its width.
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)

    def step(self):
        self.optimizer.zero_grad(set_to_none=True)
        torch.nn.functional.cross_entropy(self.model(self.images), self.labels).backward()
        self.optimizer.step()

    def results(self):
        return (data(tensor) for tensor in self.model.state_dict().values())


class Streams(TorchProgram):
    """Works in four concurrent streams. Each stream reads its neighbour's result once per step, and copies from and to
    pinned memory."""

    COUNT = 4

    def __init__(self, seed):
        super().__init__(seed)
        numbers = range(self.COUNT)
        self.streams = [torch.cuda.Stream() for _ in numbers]
        self.made = [torch.cuda.Event() for _ in numbers]
        self.seen = [torch.cuda.Event() for _ in numbers]
        self.inputs = [torch.randn(WIDTH, WIDTH).pin_memory() for _ in numbers]
        self.outputs = [torch.empty(WIDTH, WIDTH).pin_memory() for _ in numbers]
        self.weights = [torch.randn(WIDTH, WIDTH, device=DEVICE) / WIDTH**0.5 for _ in numbers]
        self.arrived = [torch.zeros(WIDTH, WIDTH, device=DEVICE) for _ in numbers]
        self.own = [torch.zeros_like(tensor) for tensor in self.arrived]
        self.mixed = [torch.zeros_like(tensor) for tensor in self.arrived]
        self.sync()

    def step(self):
        for n, stream in enumerate(self.streams):
            with torch.cuda.stream(stream):
                # Waits until the next stream has read the earlier contents.
                stream.wait_event(self.seen[(n + 1) % self.COUNT])
                self.arrived[n].copy_(self.inputs[n], non_blocking=True)
                torch.addmm(self.arrived[n], self.mixed[n], self.weights[n], out=self.own[n])
                self.own[n].tanh_()
                self.made[n].record(stream)
        for n, stream in enumerate(self.streams):
            with torch.cuda.stream(stream):
                stream.wait_event(self.made[n - 1])
                torch.add(self.own[n], self.own[n - 1], alpha=0.5, out=self.mixed[n])
                self.seen[n].record(stream)
                self.outputs[n].copy_(self.mixed[n], non_blocking=True)

    def results(self):
        self.sync()
        return (data(tensor) for tensor in self.outputs + self.own)
