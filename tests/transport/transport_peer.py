"""The writing side's opposite number: an arena of memory behind a transport, in another process or in this one.

As a program it answers one JSON list per line of stdin with one JSON value per line of stdout.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from weight_sync.ids import Deadline
from weight_sync.transport import registry
from weight_sync.transport.base import Endpoint, Region, Transport

CANARY = 0xC5


class Arena:
    """Page-aligned memory, filled with CANARY. `spans` are (offset, bytes) inside it; the rest must never change."""

    def __init__(self, nbytes: int) -> None:
        self._memory = mmap.mmap(-1, nbytes)
        self.data = np.frombuffer(self._memory, np.uint8)
        self.data[:] = CANARY
        self.base: int = self.data.ctypes.data

    def regions(self, spans: list[tuple[int, int]]) -> list[Region]:
        return [Region(self.base + offset, nbytes) for offset, nbytes in spans]

    def digest(self) -> str:
        return hashlib.sha256(self.data).hexdigest()


class LocalPeer:
    """An arena in this process."""

    def __init__(self, transport: Transport, nbytes: int, spans: list[tuple[int, int]]) -> None:
        self.transport, self.arena, self.spans = transport, Arena(nbytes), spans
        transport.register(self.arena.regions(spans))
        self.endpoint, self.base, self.nbytes = transport.describe(), self.arena.base, nbytes

    def digest(self) -> str:
        return self.arena.digest()

    def count(self, value: int) -> int:
        return int((self.arena.data == value).sum())

    def fill(self, value: int) -> None:
        self.arena.data[:] = value

    def close(self) -> None:
        self.transport.close()

    def kill(self) -> None:
        self.transport.close()

    def end(self) -> None:
        pass


class ProcessPeer:
    """An arena in a process of its own."""

    def __init__(self, name: str, options: dict[str, Any], nbytes: int, spans: list[tuple[int, int]]) -> None:
        words = [sys.executable, __file__, name, json.dumps(options), str(nbytes), json.dumps(spans)]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        said = self._answer()
        self.spans, self.nbytes, self.pid = spans, nbytes, self._process.pid
        self.endpoint, self.base = Endpoint.from_json(said["endpoint"]), int(said["base"])

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        watchdog = threading.Timer(60.0, self._process.kill)  # a peer that hangs must not hang the test run
        watchdog.start()
        try:
            line = self._process.stdout.readline()
        finally:
            watchdog.cancel()
        if not line:
            raise AssertionError(f"the peer process ended with {self._process.wait()}")
        return json.loads(line)

    def _ask(self, *words: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(words) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def digest(self) -> str:
        return self._ask("digest")

    def count(self, value: int) -> int:
        return self._ask("count", value)

    def fill(self, value: int) -> None:
        self._ask("fill", value)

    def write_protect(self, offset: int, nbytes: int) -> None:
        assert self._ask("protect", offset, nbytes) == 0

    def close(self) -> None:
        self._ask("close")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """Returns when every thread stands still: until then one may go on serving."""
        os.kill(self.pid, signal.SIGSTOP)
        deadline = time.monotonic() + 30
        while any(_state(task) != "T" for task in Path(f"/proc/{self.pid}/task").iterdir()):
            assert time.monotonic() < deadline, f"process {self.pid} does not stop"
            time.sleep(0.001)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


def _state(task: Path) -> str:
    """Of a thread: the letter behind its name in brackets (proc(5))."""
    return (task / "stat").read_text().rpartition(")")[2].split()[0]


def serve(
    name: str,
    options: dict[str, Any],
    nbytes: int,
    spans: list[tuple[int, int]],
    requests: Iterable[list[Any]],
    answer: Callable[[Any], None],
    more: Callable[[LocalPeer, list[Any]], Any] | None = None,
) -> None:
    """Open, say where we are, then one answer for each request; more: answers those that are not known here."""
    transport = registry.create(name, **options)
    peer = LocalPeer(transport, nbytes, spans)
    answer({"endpoint": peer.endpoint.to_json(), "base": peer.base})
    for request in requests:
        match request:
            case ["digest"]:
                reply: Any = peer.digest()
            case ["count", value]:
                reply = peer.count(value)
            case ["fill", value]:
                reply = peer.fill(value)
            case ["close"]:
                reply = peer.close()
            case ["protect", offset, size]:
                reply = ctypes.CDLL(None).mprotect(ctypes.c_void_p(peer.base + offset), ctypes.c_size_t(size), 1)
            case ["probe", endpoint]:
                reply = transport.probe(Endpoint.from_json(endpoint), Deadline.after(20.0))
            case other if more is not None:
                reply = more(peer, other)
            case other:
                raise SystemExit(f"unknown command {other}")
        answer(reply)


def main(name: str, options: dict[str, Any], nbytes: int, spans: list[tuple[int, int]]) -> None:
    serve(name, options, nbytes, spans, map(json.loads, sys.stdin), lambda reply: print(json.dumps(reply), flush=True))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4]))


def ends_by_itself(transport: str, options: dict[str, Any], writes: int) -> None:
    """A program that closes nothing, with so many writes that nobody waits for, ends by itself and cleanly."""
    program = f"""
import numpy as np
from weight_sync.ids import Deadline
from weight_sync.transport import registry
from weight_sync.transport.base import Batch, Region
a, b = (registry.create({transport!r}, **{options!r}) for _ in range(2))
data = np.zeros(1 << 26, np.uint8)
at, half = data.ctypes.data, 1 << 25
a.register([Region(at, half)]); b.register([Region(at + half, half)])
a.probe(b.describe(), Deadline.after(20))
one = lambda *v: np.array(v, np.int64)
for _ in range({writes}):
    a.write(Batch(b.describe(), one(at), one(at + half), one(half), ["w"]))
print("end")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "end\n"), done.stderr
