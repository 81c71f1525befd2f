"""Trainer ranks for the tests: a process that has miles's actor module and Megatron imported, and forks ranks.

Run as a script in miles's environment with the fork of SGLang that miles-rl 0.0.2 imports first on the path. One JSON line on
standard input asks for one world: {"world", "port", "work": function of rank_work.py, "given": {...}}; one line with a file
name (pickle: list of (True, result) or (False, trace) by rank) comes back. Importing takes longer than any case.

What a CPU machine lacks is replaced in this process: see _no_gpu. Nothing of what weight_sync replaces is touched here.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
import types
import warnings
from pathlib import Path
from typing import Any

warnings.filterwarnings("ignore")
SECONDS = 150.0


def _no_gpu() -> None:
    """Calls of miles that ask CUDA for something, answered for a machine without; and two that its pins are too narrow for."""
    import miles.backends.megatron_utils.actor as actor
    import miles.backends.megatron_utils.initialize as initialize
    import miles.ray.train_actor as train_actor
    import numpy
    import torch
    import torch_memory_saver

    torch.cuda.set_device = lambda *_: None
    torch.cuda.mem_get_info = lambda *_: (1 << 30, 1 << 30)
    torch.cuda.memory_allocated = torch.cuda.memory_reserved = lambda *_: 0
    torch_memory_saver.torch_memory_saver = types.SimpleNamespace(get_cpu_backup=lambda tensor: None)
    train_actor.get_local_gpu_id = lambda: 0
    initialize.np = types.SimpleNamespace(__version__="1.26", random=numpy.random)  # it asserts numpy 1
    # Its groups that can be torn down for offloading lack a collective of torch 2.13 (reduce_scatter_single).
    actor.monkey_patch_torch_dist = lambda: None
    actor.load_tokenizer = lambda *_, **__: types.SimpleNamespace(vocab_size=256)  # a random checkpoint has none


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what frameworks print goes to the log
    from weight_sync_integrations.megatron import cpu

    assert cpu.install()
    import torch

    torch.set_num_threads(1)
    _no_gpu()
    import weight_sync_integrations.megatron.model
    import weight_sync_integrations.megatron.source  # noqa: F401

    print("ready", file=out, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        print(_run(asked), file=out, flush=True)


def _run(asked: dict[str, Any]) -> str:
    folder = Path(tempfile.mkdtemp(prefix="ranks-"))
    children = [_fork(rank, asked, folder / str(rank)) for rank in range(asked["world"])]
    end = time.monotonic() + SECONDS
    pending = set(children)
    while pending and time.monotonic() < end:
        pending -= {child for child in pending if os.waitpid(child, os.WNOHANG)[0]}
        time.sleep(0.05)
    for child in pending:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    results = []
    for rank in range(asked["world"]):
        file = folder / str(rank)
        results.append(pickle.loads(file.read_bytes()) if file.exists() else (False, f"rank {rank} gave no result"))
    (folder / "all").write_bytes(pickle.dumps(results))
    return str(folder / "all")


def _fork(rank: int, asked: dict[str, Any], file: Path) -> int:
    child = os.fork()
    if child:
        return child
    try:
        sys.path.insert(0, str(Path(__file__).parent))
        import rank_work

        work = getattr(rank_work, asked["work"])
        answer = (True, work(rank, asked["world"], asked["port"], **asked["given"]))
    except BaseException:  # noqa: BLE001 - told to the test
        answer = (False, traceback.format_exc())
    part = file.with_suffix(".part")
    part.write_bytes(pickle.dumps(answer))
    part.rename(file)
    os._exit(0)


if __name__ == "__main__":
    main()
