"""What the benchmarks share: workers in processes of their own, our agents inside them, and the seconds of each phase."""

from __future__ import annotations

import multiprocessing as mp
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from weight_sync.layout.table import Layout
from weight_sync.session.session import SilentObserver, WeightSync

STALLED = ("pause", "write", "verify", "commit", "resume")
"""Phases in which engines stand still."""


def serve(make: Callable[..., Any], connection: Any, *arguments: Any) -> None:
    worker = make(*arguments)
    connection.send(None)
    while (message := connection.recv()) is not None:
        name, args = message
        try:
            connection.send((True, getattr(worker, name)(*args)))
        except Exception as error:  # noqa: BLE001 - goes to the parent, which raises it
            connection.send((False, error))


class Remote:
    """The parent's handle of a worker: `make(*arguments)` in a process of its own, its methods called one at a time."""

    def __init__(self, make: Callable[..., Any], *arguments: Any) -> None:
        context = mp.get_context("spawn")
        self._connection, child = context.Pipe()
        self._lock = threading.Lock()
        self.process = context.Process(target=serve, args=(make, child, *arguments), daemon=True)
        self.process.start()

    def __call__(self, name: str, *args: Any) -> Any:
        with self._lock:
            self._connection.send((name, args))
            good, value = self._connection.recv()
        if not good:
            raise value
        return value

    def ready(self) -> None:
        self._connection.recv()


class Phases(SilentObserver):
    """An observer that keeps each phase's seconds, for every sync."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds.setdefault(name, []).append(time.perf_counter() - began)

    def add_spans(self, rank: str, spans: Any) -> None:
        for span in spans:
            self.seconds.setdefault(f"{span['phase']} on ranks", []).append(span["end"] - span["start"])


def timed(sync: WeightSync, watch: Phases, version: int) -> tuple[Any, dict[str, float]]:
    """One sync's outcome, and seconds: of each phase, of it all as "sync", and of those in which engines stand still."""
    watch.seconds.clear()
    began = time.perf_counter()
    outcome = sync.sync(version)
    phases = {name: sum(values) for name, values in watch.seconds.items()}
    stalled = sum(phases.get(name, 0.0) for name in STALLED)
    return outcome, phases | {"sync": time.perf_counter() - began, "stalled": stalled}


def median(rows: list[dict[str, Any]], *path: str) -> float:
    """Over rounds, of what lies at this path in each; 0 where a round has no such phase."""
    return statistics.median(row[path[0]] if len(path) == 1 else row[path[0]].get(path[1], 0.0) for row in rows)


class RemoteAgent:
    """A SourceAgent or TargetAgent in a worker process. key: which of the worker's agents."""

    def __init__(self, remote: Remote, key: Any, rank: int) -> None:
        self.remote, self.key, self.rank = remote, key, rank

    def call(self, method: str, payload: Any) -> Any:
        return self.remote("agent", self.key, method, payload)


def all_of(ranks: Sequence[Remote], name: str, *args: Any) -> list[Any]:
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(lambda r: r(name, *args), ranks))


def buckets(layout: Layout, limit: int) -> list[range]:
    """HF tensors of a catalog, in its order, in buckets of at most `limit` bytes (bf16), or of one tensor."""
    sizes = layout.catalog.shapes.prod(axis=1) * 2
    result: list[range] = []
    first, used = 0, 0
    for tensor, size in enumerate(sizes.tolist()):
        if used and used + size > limit:
            result.append(range(first, tensor))
            first, used = tensor, 0
        used += size
    return [*result, range(first, len(sizes))]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
