"""One agent in a process of its own, over real memory and a real transport; `RemoteAgent` is its handle.

As a program it answers one JSON request per line of stdin with one JSON reply per line of stdout.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
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


class RemoteAgent:
    """Calls cross a pipe. A reply that does not come within `patience` seconds is DeadlineExceeded, as over any network."""

    def __init__(
        self, side: str, layout: Layout, rank: int, *, seed: int = 0, transport: str = "mooncake", slow: bool = False
    ) -> None:
        self.rank, self.patience = rank, 30.0
        params = [[p.name, list(p.shape), p.dtype] for p in layout.rank_params(rank)]
        words = [sys.executable, __file__, json.dumps([side, rank, params, seed, transport, slow])]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
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
            self._process.stdin.write(json.dumps([method, dict(payload)]).encode() + b"\n")
            return self._receive()

    def stop(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


def main(side: str, rank: int, params: list[Any], seed: int, name: str, slow: bool) -> None:
    noise = np.random.default_rng(seed)
    raw = {name: noise.integers(0, 256, int(np.prod(shape)) * ITEMSIZE[dtype], np.uint8) for name, shape, dtype in params}
    arrays = {name: typed(raw[name].view(f"u{ITEMSIZE[dtype]}").reshape(shape), dtype) for name, shape, dtype in params}
    options: dict[str, Any] = {"any_tracer": True} if name == "cma" else {"protocol": "tcp", "host": "127.0.0.1"}
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
            elif method == "count":
                value = {"bytes": sum(int((array == payload["value"]).sum()) for array in raw.values())}
            else:
                value = agent.call(method, payload)
            print(json.dumps({"value": value}), flush=True)
        except errors.WeightSyncError as error:
            print(json.dumps({"error": type(error).__name__, "text": str(error)}), flush=True)


if __name__ == "__main__":
    main(*json.loads(sys.argv[1]))
