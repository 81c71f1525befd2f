"""What verl_nccl.py measures beside its syncs: a GPU's memory, the copy engine, and the parts of verl's path each alone.

All of it runs in verl's processes, with its worker as first argument."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from verl.utils.device import get_device_name

from benchmarks.verl_nccl_weights import synchronize


class Watch:
    """Memory of this process's GPU while something runs, in bytes over what it was, by whoever took it (NCCL, cupy, torch)."""

    def __init__(self) -> None:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        self._before = self._most = _used()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._ended.wait(0.001):
            self._most = max(self._most, _used())

    def end(self) -> dict[str, int]:
        self._ended.set()
        self._thread.join()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return {"peak": self._most - self._before, "kept": _used() - self._before}


def _used() -> int:
    free, total = torch.cuda.mem_get_info()
    return total - free


def watch(worker: Any) -> None:
    worker.watch = Watch()


def watched(worker: Any) -> dict[str, int]:
    return worker.watch.end()


def export(worker: Any) -> list[tuple[int, str, int]]:
    """(offset in its allocation, CUDA IPC handle, bytes) of every live parameter."""
    from weight_sync.device import ipc

    torch.cuda.synchronize()  # gives this thread the device's context
    found = []
    for tensor in worker.server_adapter.params.values():
        base, _, handle = ipc.export(tensor.data_ptr())
        found.append((tensor.data_ptr() - base, handle, tensor.nbytes))
    return found


def map_peer(worker: Any, exported: list[tuple[int, str, int]]) -> None:
    from weight_sync.device import ipc

    torch.cuda.synchronize()
    opened = {handle: ipc.open_handle(handle) for handle in {handle for _, handle, _ in exported}}
    worker.peer = [(opened[handle] + offset, nbytes) for offset, handle, nbytes in exported]


def limit(worker: Any) -> float:
    """Seconds in which the copy engine moves as many bytes as there are weights into the peer's live parameters."""
    from cuda.bindings import driver

    own = [p.detach().to_local() for p in worker.actor.engine.module.parameters()]
    here = [(t.data_ptr(), t.nbytes) for t in own]
    stream = torch.cuda.current_stream().cuda_stream
    torch.cuda.synchronize()
    began, i, j, a, b = time.perf_counter(), 0, 0, 0, 0
    while i < len(here) and j < len(worker.peer):
        size = min(here[i][1] - a, worker.peer[j][1] - b)
        (code,) = driver.cuMemcpyDtoDAsync(worker.peer[j][0] + b, here[i][0] + a, size, stream)
        if int(code):
            raise RuntimeError(f"cuMemcpyDtoDAsync into the peer's memory: {code.name}")
        a, b = a + size, b + size
        i, a = (i + 1, 0) if a == here[i][1] else (i, a)
        j, b = (j + 1, 0) if b == worker.peer[j][1] else (j, b)
    torch.cuda.synchronize()
    return time.perf_counter() - began


def fill(worker: Any) -> float:
    """Seconds of the sender's part alone: verl's generator into verl's bucket, nothing sent."""
    with ThreadPoolExecutor(1) as thread:  # this one has an event loop that runs
        return thread.submit(asyncio.run, _fill(worker)).result()


async def _fill(worker: Any) -> float:
    from verl.checkpoint_engine import nccl_checkpoint_engine as module

    engine, offset = worker.engines["verl"], 0
    bucket = module.cp.zeros(engine.bucket_size, dtype=module.cp.uint8)
    weights, _ = worker.actor.engine.get_per_tensor_param()
    synchronize()
    began = time.perf_counter()
    async for meta, chunk in module.split_weight_chunks(weights, engine.bucket_size):
        if offset + meta.chunk_size > engine.bucket_size:
            synchronize()
            offset = 0
        bucket[offset : offset + meta.chunk_size] = module.cp.asarray(chunk)
        offset += meta.chunk_size
    synchronize()
    return time.perf_counter() - began


def load(worker: Any) -> float:
    """Seconds of the receiver's copies alone."""
    began = time.perf_counter()
    worker.server_adapter.load_all()
    return time.perf_counter() - began


def broadcast(worker: Any, nbytes: int) -> float:
    """Seconds of verl's broadcasts alone, bucket by bucket, in the engine's own group."""
    from verl.checkpoint_engine import nccl_checkpoint_engine as module

    engine = worker.engines["verl"]
    make = module.cp if engine.is_master else torch
    options = {} if engine.is_master else {"device": get_device_name()}
    bucket = make.zeros(min(engine.bucket_size, nbytes), dtype=make.uint8, **options)
    module.collective.barrier(engine.group_name)
    synchronize()
    began = time.perf_counter()
    for offset in range(0, nbytes, engine.bucket_size):
        module.collective.broadcast(bucket[: nbytes - offset], src_rank=0, group_name=engine.group_name)
    synchronize()
    return time.perf_counter() - began
