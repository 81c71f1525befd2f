"""One agent in a process of its own, over real memory and a real transport; `RemoteAgent` is its handle.

As a program it answers one JSON request per line of stdin with one JSON reply per line of stdout.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import xxhash

from weight_sync import errors
from weight_sync.ids import ITEMSIZE
from weight_sync.layout.table import Layout
from weight_sync.session.inprocess import ArraySource, typed
from weight_sync.session.source import SourceAgent
from weight_sync.session.target import TargetAgent
from weight_sync.transport import registry
from weight_sync.transport.mooncake_pump import Tuning


def start(arguments: list[Any]) -> Any:
    """A process that runs main(*arguments), with pipes to it."""
    words = [sys.executable, __file__, json.dumps(arguments)]
    return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)


class RemoteAgent:
    """Calls cross a pipe. A reply that does not come within `patience` seconds is DeadlineExceeded, as over any network.

    options: the transport's; its tests' own when None. start: how its process is started.
    """

    def __init__(
        self,
        side: str,
        layout: Layout,
        rank: int,
        *,
        seed: int = 0,
        transport: str = "mooncake",
        slow: bool = False,
        options: dict[str, Any] | None = None,
        start: Callable[[list[Any]], Any] = start,
    ) -> None:
        self.rank, self.patience = rank, 30.0
        params = [[p.name, list(p.shape), p.dtype] for p in layout.rank_params(rank)]
        self._process = start([side, rank, params, seed, transport, slow, options])
        self._late = 0  # replies that nobody waits for any more
        self._lock = threading.Lock()

    @property
    def pid(self) -> int:
        return self._process.pid

    def _receive(self) -> dict[str, Any]:
        """The reply to the last request, within `patience` seconds, which may be changed meanwhile."""
        assert self._process.stdout is not None
        begun = time.monotonic()
        while True:
            if not select.select([self._process.stdout], [], [], 0.02)[0]:
                if time.monotonic() - begun < self.patience:
                    continue
                self._late += 1
                raise errors.DeadlineExceeded(f"agent {self.rank}, process {self.pid}: no reply within {self.patience:g} s")
            line = self._process.stdout.readline()
            if not line:
                raise errors.RolloutError(f"agent {self.rank}, process {self.pid} is gone")
            if self._late:
                self._late -= 1
                continue
            reply = json.loads(line)
            if "error" in reply:
                kind = getattr(errors, reply["error"], errors.RolloutError)
                raise (errors.RolloutError if kind is errors.TransportError else kind)(reply["text"])
            return reply["value"]

    def call(self, method: str, payload: Mapping[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        with self._lock:
            try:
                self._process.stdin.write(json.dumps([method, dict(payload)]).encode() + b"\n")
            except BrokenPipeError:
                raise errors.RolloutError(f"agent {self.rank}, process {self.pid} is gone") from None
            return self._receive()

    def stop(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


def pages(nbytes: int) -> np.ndarray[Any, Any]:
    """Memory in pages of its own."""
    return np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)


def exchange_pages(array: np.ndarray[Any, Any]) -> None:
    """Give an array of pages() other pages, of zeros, at the same addresses: what an allocator does that returns memory to the
    system and later gets the same addresses again. Whoever had pinned the old pages still has those."""
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x10  # MAP_FIXED
    address = array.ctypes.data
    assert libc.mmap(address, array.nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0) == address


def main(
    side: str, rank: int, params: list[Any], seed: int, name: str, slow: bool, options: dict[str, Any] | None = None
) -> None:
    noise = np.random.default_rng(seed)
    raw = {name: pages(int(np.prod(shape)) * ITEMSIZE[dtype]) for name, shape, dtype in params}
    for array in raw.values():
        array[:] = noise.integers(0, 256, len(array), np.uint8)
    arrays = {name: typed(raw[name].view(f"u{ITEMSIZE[dtype]}").reshape(shape), dtype) for name, shape, dtype in params}
    options = options or ({"any_tracer": True} if name == "cma" else {"protocol": "tcp", "host": "127.0.0.1"})
    if slow:
        options["tuning"] = Tuning(piece=1 << 16, window=1, window_bytes=1 << 16, batched=False)

    def transport() -> Any:
        return registry.create(name, **options)

    agent: Any
    if side == "source":
        agent = SourceAgent(ArraySource(rank, arrays, {}), transport)
    else:
        agent = TargetAgent(rank=rank, host="localhost", coords={}, tensors=lambda: arrays, transport=transport)
    for line in sys.stdin:
        method, payload = json.loads(line)
        try:
            if method == "fill":
                for array in raw.values():
                    array[:] = payload["value"]
                value: Any = {}
            elif method == "peek":
                value = {"digest": [xxhash.xxh3_64_hexdigest(array.data) for array in raw.values()]}
            elif method == "load":
                for param, text in payload["raw"].items():
                    raw[param][:] = np.frombuffer(bytes.fromhex(text), np.uint8)
                value = {}
            elif method == "dump":
                value = {"raw": {param: array.tobytes().hex() for param, array in raw.items()}}
            elif method == "other pages":
                for array in raw.values():
                    exchange_pages(array)
                value = {}
            elif method == "count":
                value = {"bytes": sum(int((array == payload["value"]).sum()) for array in raw.values())}
            else:
                value = agent.call(method, payload)
            print(json.dumps({"value": value}), flush=True)
        except errors.WeightSyncError as error:
            print(json.dumps({"error": type(error).__name__, "text": str(error)}), flush=True)


if __name__ == "__main__":
    main(*json.loads(sys.argv[1]))
