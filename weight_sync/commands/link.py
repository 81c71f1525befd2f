"""Measuring a machine: what two of its processes reach between them over a transport, and what hashing and copying cost.

Each number is taken as the simulator uses it: a rank is a process, every rank hashes and copies with one thread, and cores are
shared. Needs no GPU; over Mooncake tcp on one machine this is the loopback, so that a network's card is not seen.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import resource
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from weight_sync.errors import ConfigError, WeightSyncError
from weight_sync.ids import Deadline
from weight_sync.session.digests import feed
from weight_sync.simulate.cluster import Cluster, parse_cluster
from weight_sync.transport import registry
from weight_sync.transport.base import Batch, Endpoint, Region

TRANSPORTS: dict[str, dict[str, Any]] = {
    "tcp": {"name": "mooncake", "protocol": "tcp", "host": "127.0.0.1"},
    "cma": {"name": "cma"},
}
SECONDS = 120.0
"""Longest time one measurement may take."""


@dataclass(frozen=True, slots=True)
class Link:
    """Medians, bytes/s and seconds. pair: one process to another. pairs: two such pairs at once, together. wire: core
    seconds a byte, both ends, with two pairs. write: seconds of one 4 KB write beyond its bytes. copy: strided, read and
    written. digest: one process; digests: one on every core at once, together. call: a message to a process and back."""

    pair: float
    pairs: float
    wire: float
    write: float
    copy: float
    digest: float
    digests: float
    call: float


class Peer:
    """What one process does; the parent calls its methods by name."""

    def __init__(self, options: Mapping[str, Any], nbytes: int) -> None:
        rest = dict(options)
        self.buffer = np.ones(nbytes, np.uint8)
        self.transport = registry.create(rest.pop("name"), **rest)
        self.transport.register([Region(int(self.buffer.ctypes.data), nbytes)])

    def describe(self) -> tuple[int, dict[str, Any]]:
        return int(self.buffer.ctypes.data), self.transport.describe().to_json()

    def probe(self, endpoint: Mapping[str, Any]) -> None:
        self.transport.probe(Endpoint.from_json(endpoint), Deadline.after(SECONDS))

    def write(self, address: int, endpoint: Mapping[str, Any], size: int, count: int) -> float:
        """Seconds of `count` writes of `size` bytes, handed over in batches of at most 32 MB, as a sync does."""
        each = max(1, (32 << 20) // size)
        at = np.arange(count, dtype=np.int64) * size % (len(self.buffer) - size + 1)
        began = time.perf_counter()
        tickets = []
        for low in range(0, count, each):
            part = at[low : low + each]
            sizes = np.full(len(part), size, np.int64)
            batch = Batch(
                Endpoint.from_json(endpoint), part + self.buffer.ctypes.data, part + address, sizes, ["measured"] * len(part)
            )
            tickets.append(self.transport.write(batch))
        for ticket in tickets:
            self.transport.wait(ticket, Deadline.after(SECONDS))
        return time.perf_counter() - began

    def digest(self, piece: int) -> float:
        """Seconds of hashing the whole buffer, in pieces as large as a transfer."""
        import xxhash

        began = time.perf_counter()
        for low in range(0, len(self.buffer), piece):
            feed(xxhash.xxh3_64(), self.buffer[low : low + piece])
        return time.perf_counter() - began

    def copy(self) -> float:
        """Seconds of a strided copy: rows of 2 KB out of rows of 4 KB."""
        rows = self.buffer[: len(self.buffer) // 8192 * 8192].reshape(-1, 4096)
        target = np.empty((len(rows), 2048), np.uint8)
        target[...] = 0  # touch the pages
        began = time.perf_counter()
        target[...] = rows[:, :2048]
        return (time.perf_counter() - began) / target.nbytes

    def cpu(self) -> float:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return usage.ru_utime + usage.ru_stime

    def nothing(self) -> None:
        return None

    def close(self) -> None:
        self.transport.close()


def _serve(connection: Any, options: Mapping[str, Any], nbytes: int) -> None:
    peer: Peer | None = None
    while (message := connection.recv()) is not None:
        try:
            if peer is None:
                peer = Peer(options, nbytes)
            connection.send((True, getattr(peer, message[0])(*message[1:])))
        except Exception as error:  # noqa: BLE001 - goes to the parent, which raises it
            connection.send((False, error))


class _Remote:
    def __init__(self, options: Mapping[str, Any], nbytes: int) -> None:
        context = mp.get_context("spawn")
        self._connection, child = context.Pipe()
        self.process = context.Process(target=_serve, args=(child, options, nbytes), daemon=True)
        self.process.start()

    def ask(self, *message: Any) -> None:
        self._connection.send(message)

    def answer(self) -> Any:
        if not self._connection.poll(SECONDS):
            raise WeightSyncError(f"bench link: a process gave no answer for {SECONDS:g} s")
        good, value = self._connection.recv()
        if not good:
            raise value
        return value

    def call(self, *message: Any) -> Any:
        self.ask(*message)
        return self.answer()

    def end(self) -> None:
        self._connection.send(None)
        self.process.join(10)
        if self.process.is_alive():
            self.process.kill()


def measure(transport: str, nbytes: int = 256 << 20, rounds: int = 5) -> Link:
    """Measure this machine. nbytes: of each of four processes' buffer. Raises ConfigError for an unknown transport."""
    if transport not in TRANSPORTS:
        raise ConfigError(f"transport={transport}: bench link knows {', '.join(TRANSPORTS)}")
    if nbytes < 1 << 20:
        raise ConfigError(f"bytes={nbytes}: at least {1 << 20}")
    peers = [_Remote(TRANSPORTS[transport], nbytes) for _ in range(4)]
    try:
        for peer in peers:
            peer.ask("describe")
        places = [peer.answer() for peer in peers]
        sources, targets = peers[:2], places[2:]
        for source, (_, endpoint) in zip(sources, targets, strict=True):
            source.call("probe", endpoint)
        return _measure(peers, sources, targets, nbytes, rounds)
    finally:
        for peer in peers:
            peer.end()


def _measure(
    peers: Sequence[_Remote], sources: Sequence[_Remote], targets: Sequence[tuple[int, Any]], nbytes: int, rounds: int
) -> Link:
    size = 4 << 20
    count = nbytes // size or 1
    size = min(size, nbytes)

    def both() -> tuple[float, float]:
        """(bytes/s together, core seconds a byte) of two pairs at once."""
        before = sum(peer.call("cpu") for peer in peers)
        began = time.perf_counter()
        for source, (address, endpoint) in zip(sources, targets, strict=True):
            source.ask("write", address, endpoint, size, count)
        for source in sources:
            source.answer()
        seconds = time.perf_counter() - began
        used = sum(peer.call("cpu") for peer in peers) - before
        return 2 * size * count / seconds, used / (2 * size * count)

    def one() -> float:
        return size * count / sources[0].call("write", *targets[0], size, count)

    def small() -> float:
        return sources[0].call("write", *targets[0], 4096, 4000) / 4000

    def hashed(who: Sequence[_Remote]) -> float:
        for peer in who:
            peer.ask("digest", size)
        return sum(nbytes / peer.answer() for peer in who)

    def called() -> float:
        began = time.perf_counter()
        for _ in range(20):
            peers[0].call("nothing")
        return (time.perf_counter() - began) / 20

    def median(action: Callable[[], float]) -> float:
        action()  # connections, pages
        return statistics.median(action() for _ in range(rounds))

    pair = median(one)
    pairs = [both() for _ in range(rounds)]
    return Link(
        pair=pair,
        pairs=statistics.median(p for p, _ in pairs),
        wire=statistics.median(w for _, w in pairs),
        write=max(median(small) - 4096 / pair, 0.0),
        copy=1 / median(lambda: peers[0].call("copy")),
        digest=median(lambda: hashed(peers[:1])),
        digests=median(lambda: hashed(peers[: min(os.cpu_count() or 1, len(peers))])),
        call=median(called),
    )


def cluster_of(link: Link, name: str, transport: str) -> Cluster:
    """A one-machine cluster with the measured numbers.

    Cores count as many as hashing on all of them is faster than on one. What two pairs reach together tells how many core
    seconds a byte on the wire really takes: more than the processes' own when the kernel works beside them.
    """
    cores = max(1.0, link.digests / link.digest)
    return parse_cluster(
        {
            "name": name,
            "description": f"this machine: {os.cpu_count()} cores, {transport} between its processes",
            "gpus_per_node": 64,
            "gpu_memory": float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
            "local": {"rate": max(link.pair, link.pairs / 2), "domain": 64},
            "writes": {"seconds": link.write},
            "copy_rate": link.copy,
            "digest_source": link.digest,
            "digest_target": link.digest,
            "cores": {"count": cores, "wire": cores / link.pairs},
            # A pause, a round and a finish are two calls to every rank or engine, one after the other.
            "control": {"pause": 2 * link.call, "round": link.call, "finish": 2 * link.call, "compare": 2.0e-6},
            "detect": {"dead_peer": 60.0 if transport == "tcp" else 0.1},
        },
        "measured",
    )


SOURCES = {
    "gpus_per_node": "places for ranks: no limit of this machine",
    "gpu_memory": "memory of the machine, all ranks together",
    "rate": "measured here: one process to another, in 4 MB writes",
    "seconds": "measured here: a 4 KB write beyond its bytes",
    "copy_rate": "measured here: rows of 2 KB out of rows of 4 KB, one thread",
    "digest_source": "measured here: xxh3, one thread",
    "digest_target": "measured here: as digest_source",
    "count": "measured here: hashing on all cores against hashing on one",
    "wire": "measured here: core seconds a byte, from two pairs writing at once",
    "pause": "measured here: two calls to a process over a pipe",
    "round": "measured here: one such call",
    "finish": "measured here: two such calls",
    "compare": "measured before: one 64-bit digest compared on the controller, numpy",
    "dead_peer": "measured before, with this transport",
}


def as_yaml(cluster: Cluster) -> str:
    """The cluster file's text, every number with where it comes from."""
    import yaml

    data = cluster.model_dump(exclude_none=True, exclude={"fabric"})
    lines = ["# Written by `python -m weight_sync bench link` on the machine it describes."]
    for line in yaml.safe_dump(_plain(data), sort_keys=False).splitlines():
        key = line.split(":")[0].strip()
        lines.append(f"{line:34}  # {SOURCES[key]}" if key in SOURCES and not line.endswith(":") else line)
    return "\n".join(lines) + "\n"


def _plain(value: Any) -> Any:
    """Floats with four digits, as YAML 1.1 reads them back (with a dot before the exponent)."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value
