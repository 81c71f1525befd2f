"""Measuring a machine: what two of its processes reach between them over a transport, and what hashing, copying, quantising and
Python cost.

Each number is taken as the simulator uses it: a rank is a process (on GPUs one on each), every rank hashes and copies with one
thread, and cores are shared. Over Mooncake tcp on one machine this is the loopback, so a network's card is not seen; over rdma
the card sends to itself.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from weight_sync.commands.items import measure_items
from weight_sync.commands.linkpeer import Remote, together
from weight_sync.errors import ConfigError
from weight_sync.simulate.cluster import Cluster, parse_cluster

TRANSPORTS: dict[str, dict[str, Any]] = {
    "tcp": {"name": "mooncake", "protocol": "tcp", "host": "127.0.0.1"},
    "cma": {"name": "cma"},
    "rdma": {"name": "mooncake", "protocol": "rdma"},
    "ipc": {"name": "cuda_ipc"},
    "nvlink": {"name": "mooncake", "protocol": "nvlink_intra", "host": "127.0.0.1"},
}
ON_GPUS = ("ipc", "nvlink")
DEAD_PEER = {"tcp": 60.0, "cma": 0.1, "rdma": 30.0, "ipc": 0.1, "nvlink": 0.1}
"""Seconds until a dead peer is noticed: measuring it takes as long. Of ipc and nvlink it was never measured, and is assumed."""


@dataclass(frozen=True, slots=True)
class Link:
    """Medians, bytes/s and seconds. pair: one process to another. pairs: two such pairs at once, together (on GPUs: one). wire:
    core seconds a byte, both ends, with two pairs. write: seconds of one 4 KB write beyond its bytes. copy: strided, read and
    written. digest: one process; digests: one on every core at once, together. call: a message to a process and back. look,
    make: quantising (Cluster.quantise). check, send, receive, compare: Python (Cluster.python). memory: bytes of a rank's.
    host: between a GPU and host memory; 0 without GPUs. short: as pair in ranges of 64 KB, where those cost nothing beyond
    their bytes (ipc); 0 elsewhere.
    """

    pair: float
    pairs: float
    wire: float
    write: float
    copy: float
    digest: float
    digests: float
    call: float
    look: float
    make: float
    check: float
    send: float
    receive: float
    compare: float
    memory: float
    host: float
    short: float = 0.0


def measure(transport: str, nbytes: int | None = None, rounds: int = 5) -> Link:
    """Measure this machine. nbytes: of each process' buffer (256 MiB; on GPUs 4 GiB). ConfigError for an unknown transport."""
    if transport not in TRANSPORTS:
        raise ConfigError(f"transport={transport}: bench link knows {', '.join(TRANSPORTS)}")
    device = transport in ON_GPUS
    nbytes = nbytes or ((4 << 30) if device else (256 << 20))
    if nbytes < 1 << 20:
        raise ConfigError(f"bytes={nbytes}: at least {1 << 20}")
    count = 2 if device else 4
    # Sources first: a GPU's process writes to that of the other GPU.
    peers = [Remote(TRANSPORTS[transport], nbytes, device, i * 2 // count) for i in range(count)]
    try:
        places = together(peers, "describe")
        sources, targets = peers[: count // 2], places[count // 2 :]
        for source, (_, endpoint) in zip(sources, targets, strict=True):
            source.call("probe", endpoint)
        return _measure(peers, sources, targets, nbytes, rounds, device, short=transport == "ipc")
    finally:
        for peer in peers:
            peer.end()


def _measure(
    peers: Sequence[Remote],
    sources: Sequence[Remote],
    targets: Sequence[tuple[int, Any]],
    nbytes: int,
    rounds: int,
    device: bool,
    *,
    short: bool,
) -> Link:
    size = min(4 << 20, nbytes)
    count = nbytes // size

    def both() -> tuple[float, float]:
        """(bytes/s together, core seconds a byte) of all pairs at once."""
        before = sum(together(peers, "cpu"))
        for source, (address, endpoint) in zip(sources, targets, strict=True):
            source.ask("write", address, endpoint, size, count)
        seconds = max(source.answer() for source in sources)
        used = sum(together(peers, "cpu")) - before
        moved = len(sources) * size * count
        return moved / seconds, used / moved

    def one() -> float:
        return size * count / sources[0].call("write", *targets[0], size, count)

    def shorter() -> float:
        return nbytes // 65536 * 65536 / sources[0].call("write", *targets[0], 65536, nbytes // 65536)

    def small() -> float:
        return sources[0].call("write", *targets[0], 4096, 4000) / 4000

    def hashed(who: Sequence[Remote]) -> float:
        return sum(nbytes / seconds for seconds in together(who, "digested", size))

    def called() -> float:
        began = time.perf_counter()
        for _ in range(20):
            peers[0].call("nothing")
        return (time.perf_counter() - began) / 20

    def median(action: Callable[[], float]) -> float:
        action()  # connections, pages, kernels
        return statistics.median(action() for _ in range(rounds))

    pair = median(one)
    pairs = [both() for _ in range(rounds)]
    digest = median(lambda: hashed(peers[:1]))
    call = median(called)
    quantised = [peers[0].call("quantised") for _ in range(min(rounds, 3))]
    memory, host = peers[0].call("memory")
    items = measure_items(sources[0], peers[-1], call, rounds)
    receive = max(items.receive - items.nbytes / digest, 0.0)
    return Link(
        pair=pair,
        pairs=statistics.median(p for p, _ in pairs),
        wire=statistics.median(w for _, w in pairs),
        write=max(median(small) - 4096 / pair, 0.0),
        copy=1 / median(lambda: peers[0].call("copied")),
        digest=digest,
        digests=digest if device else median(lambda: hashed(peers[: min(os.cpu_count() or 1, len(peers))])),
        call=call,
        look=statistics.median(look for look, _ in quantised),
        make=statistics.median(make for _, make in quantised),
        check=items.check,
        # Where a write costs next to nothing it is what writing takes beside the look that nothing moved; elsewhere it
        # cannot be told from the writes, and is taken as the other side's: both digest the same transfers.
        send=max(items.write - items.check * items.per_transfer - items.nbytes / pair, 0.0) if device else receive,
        receive=receive,
        compare=items.compare,
        memory=memory,
        host=host,
        short=median(shorter) if short else 0.0,
    )


def cluster_of(link: Link, name: str, transport: str) -> Cluster:
    """A one-machine cluster with the measured numbers.

    Cores count as many as hashing on all of them is faster than on one. What two pairs reach together tells how many core
    seconds a byte on the wire really takes: more than the processes' own when the kernel works beside them.
    """
    device, card = transport in ON_GPUS, transport == "rdma"
    cores = max(1.0, link.digests / link.digest)
    rate = max(link.pair, link.pairs / 2)
    data: dict[str, Any] = {
        "name": name,
        "description": f"this machine: {os.cpu_count()} cores, {transport} between its processes",
        "transports": [transport],
        "gpus_per_node": 64,
        "gpu_memory": link.memory,
        "local": {"rate": rate, "domain": 64, "serial": transport == "nvlink"},
        "writes": {"seconds": link.write},
        "copy_rate": link.copy,
        "digest_source": link.digest,
        "digest_target": link.digest,
        # A pause and a finish are two calls to every rank or engine, one after the other; a round and a verification one.
        "control": {
            "pause": 2 * link.call,
            "round": link.call,
            "verify": link.call,
            "finish": 2 * link.call,
            "compare": link.compare,
        },
        "python": {"check": link.check, "send": link.send, "receive": link.receive},
        "quantise": {"look": link.look, "make": link.make},
        "detect": {"dead_peer": DEAD_PEER[transport]},
    }
    if link.short:
        data["local"]["ipc"] = link.short
    if device:
        data["pcie"] = link.host
    elif card:
        data["nic"] = {"per_node": 1, "rate": link.pair}
    else:
        data["cores"] = {"count": cores, "wire": cores / link.pairs}
    return parse_cluster(data, "measured")


SOURCES = {
    "gpus_per_node": "assumed: places for ranks, no limit of this machine",
    "domain": "assumed: places for ranks, no limit of this machine",
    "per_node": "measured here: one card",
    "gpu_memory": "measured here: memory of a GPU, or of the machine where there is none, all ranks together",
    "rate": "measured here: one process to another, in 4 MB writes",
    "ipc": "measured here: likewise, in ranges of 64 KB, which a kernel of ours takes",
    "pcie": "measured here: a GPU to pinned host memory",
    "seconds": "measured here: a 4 KB write beyond its bytes",
    "threads": "assumed: one thread writes",
    "copy_rate": "measured here: rows of 2 KB out of rows of 4 KB",
    "digest_source": "measured here: transfers of 4 MB, one process",
    "digest_target": "measured here: as digest_source",
    "count": "measured here: hashing on all cores against hashing on one",
    "wire": "measured here: core seconds a byte, from two pairs writing at once",
    "pause": "measured here: two calls to a process over a pipe",
    "round": "measured here: one such call",
    "verify": "measured here: one such call",
    "finish": "measured here: two such calls",
    "compare": "measured here: a transfer, controller and both digests' way there",
    "check": "measured here: a parameter seen not to have moved",
    "send": "measured here: a transfer on its trainer rank",
    "receive": "measured here: a transfer on its engine worker",
    "look": "measured here: bytes of bf16 weights, fp8 in blocks of 128 x 128",
    "make": "measured here: bytes read and written, with the report of the error",
    "dead_peer": "measured before, with this transport, not here",
}


def as_yaml(cluster: Cluster) -> str:
    """The cluster file's text, every number with where it comes from."""
    import yaml

    data = cluster.model_dump(exclude_none=True, exclude={"fabric"}, mode="json")
    known = SOURCES | ({"dead_peer": "assumed"} if set(cluster.transports) & set(ON_GPUS) else {})
    lines = ["# Written by `python -m weight_sync bench link` on the machine it describes."]
    for line in yaml.safe_dump(_plain(data), sort_keys=False).splitlines():
        key = line.split(":")[0].strip()
        lines.append(f"{line:34}  # {known[key]}" if key in known and not line.endswith(":") else line)
    return "\n".join(lines) + "\n"


def _plain(value: Any) -> Any:
    """Floats with four digits, as YAML 1.1 reads them back (with a dot before the exponent)."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value
