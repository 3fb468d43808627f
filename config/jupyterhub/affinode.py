"""Shows in IPython and Jupyter where the GPU memory of this container is.

`%affinode` prints it. Before a cell is run while the memory is not on the GPU, a line says that the
first CUDA call waits. Place this file in /etc/ipython/startup, or load it with `%run affinode.py`.
"""

import json as _json
import time as _time

_STATE = "/.affinode/run/state"
_PLACES = {
    "Unregistered": "no CUDA call yet",
    "Active": "on the GPU, in use",
    "Idle": "on the GPU, idle",
    "Closing": "about to leave the GPU",
    "Offloading": "leaving the GPU",
    "Offloaded": "in host memory; the next CUDA call restores it",
    "Queued": "waiting for free GPU memory",
    "Restoring": "returning to the GPU",
}


def _affinode_state(path=_STATE):
    """The state of this container, or None where Affinode does not manage it."""
    try:
        with open(path, encoding="utf-8") as file:
            return _json.loads(file.readline())
    except (OSError, ValueError):
        return None


def _affinode_text(state, now=None):
    """One line about a state."""
    if state is None:
        return "GPU memory: not managed by Affinode"
    name = state.get("state")
    text = f"GPU memory: {_PLACES.get(name, name)}"
    since = state.get("since_unix_ms")
    if since:
        seconds = max(0, int((now or _time.time()) - since / 1000))
        text += f", for {seconds // 60} min {seconds % 60} s"
    waiters = state.get("waiters_before")
    if waiters is not None:
        text += f"; containers that are served first: {waiters}"
    return text


def _affinode_magic(line=""):
    print(_affinode_text(_affinode_state()))


def _affinode_before_cell(info):
    state = _affinode_state()
    if state is None or info.raw_cell.strip() == "%affinode":
        return
    if state.get("state") in ("Offloading", "Offloaded", "Queued", "Restoring"):
        print(_affinode_text(state))


def load_ipython_extension(shell):
    shell.register_magic_function(_affinode_magic, "line", "affinode")
    shell.events.register("pre_run_cell", _affinode_before_cell)


if "get_ipython" in globals():
    load_ipython_extension(get_ipython())  # noqa: F821
elif __name__ == "__main__":
    _affinode_magic()
