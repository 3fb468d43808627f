"""Two processes of one container for programs.py. Each trains with memory of its own."""

import json
import os
import subprocess
import sys

from torch_programs import Training


class Pair(Training):
    """Trains, while a second process trains with another seed."""

    def __init__(self, seed):
        program = os.path.join(os.path.dirname(os.path.abspath(__file__)), "programs.py")
        command = [sys.executable, "-u", program, "training", str(seed + 1)]
        self.other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        super().__init__(seed)
        self.theirs = ""
        self.their_bytes = 0
        self.receive()

    def send(self, command):
        self.other.stdin.write(f"{command}\n")
        self.other.stdin.flush()

    def receive(self):
        said = json.loads(self.other.stdout.readline() or '{"why": "the second process has ended"}')
        if said.get("result") != 0:
            raise RuntimeError(f"the second process: {said.get('why')}")
        return said

    def step(self):
        self.send("step 1")
        super().step()
        self.theirs = self.receive()["digest"]

    def results(self):
        return [*super().results(), self.theirs.encode()]

    def hold(self, gib):
        self.send(f"hold {gib // 2}")
        super().hold(gib - gib // 2)
        self.receive()

    def check(self):
        self.send("check")
        own = super().check()
        said = self.receive()
        self.their_bytes = said["held_bytes"]
        return [*own, said["digest"]]

    def held_bytes(self):
        return super().held_bytes() + self.their_bytes

    def sync(self):
        super().sync()
        self.send("sync")
        self.receive()
