"""Which way of driving Mooncake is fastest, and how far the transports are from a plain copy. Prints medians.

    python benchmarks/transport_micro.py [--megabytes 512] [--repeats 7] [--windows]

Writes the same bytes into another process of this host: as one write, as 1 MB and as 64 KB pieces. The "raw" lines
call the engine directly and spin; the others go through the library. cpu: seconds of this process for each GB.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from weight_sync.ids import Deadline
from weight_sync.transport import registry
from weight_sync.transport.base import Batch, Endpoint, Region, Transport
from weight_sync.transport.mooncake import MooncakeTransport
from weight_sync.transport.mooncake_pump import Tuning

MB = 1 << 20
SECONDS = 120.0


def buffer(nbytes: int, fill: int) -> np.ndarray:
    data = np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)
    data[:] = fill
    return data


def peer_main(name: str, options: dict[str, Any], nbytes: int) -> None:
    transport = registry.create(name, **options)
    data = buffer(nbytes, 0)
    transport.register([Region(data.ctypes.data, nbytes)])
    print(json.dumps({"endpoint": transport.describe().to_json(), "base": data.ctypes.data}), flush=True)
    sys.stdin.readline()
    transport.close()


class Peer:
    def __init__(self, name: str, options: dict[str, Any], nbytes: int) -> None:
        words = [sys.executable, __file__, "--peer", name, json.dumps(options), str(nbytes)]
        self.process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        said = json.loads(self.process.stdout.readline())
        self.endpoint, self.base = Endpoint.from_json(said["endpoint"]), said["base"]

    def close(self) -> None:
        self.process.communicate("\n", timeout=60)


def measure(nbytes: int, repeats: int, moves: dict[str, Callable[[], None]]) -> None:
    """Time all of `moves` in turn, `repeats` rounds: what else runs on the machine then hits each of them alike."""
    seconds: dict[str, list[float]] = {label: [] for label in moves}
    cpu: dict[str, list[float]] = {label: [] for label in moves}
    for round_ in range(repeats + 1):
        for label, move in moves.items():
            times, start = os.times(), time.perf_counter()
            move()
            if round_:  # the first round opens connections and touches pages
                seconds[label].append(time.perf_counter() - start)
                cpu[label].append(os.times().user + os.times().system - times.user - times.system)
    for label in moves:
        print(
            f"{label:48s} {nbytes / 1e9 / statistics.median(seconds[label]):7.2f} GB/s"
            f"  best {nbytes / 1e9 / min(seconds[label]):7.2f}"
            f"  cpu {statistics.median(cpu[label]) / (nbytes / 1e9):5.2f} s/GB",
            flush=True,
        )


def through(transport: Transport, endpoint: Endpoint, local: int, remote: int, piece: int, nbytes: int) -> Callable[[], None]:
    offsets = np.arange(0, nbytes, piece, dtype=np.int64)
    sizes = np.minimum(piece, nbytes - offsets)
    batch = Batch(endpoint, local + offsets, remote + offsets, sizes, ["bench"] * len(offsets))
    return lambda: void(transport.wait(transport.write(batch), Deadline.after(SECONDS)))


def void(_: object) -> None:
    return None


def raw(engine: Any, session: str, local: int, remote: int, piece: int, nbytes: int) -> Callable[[], None]:
    """The engine's own blocking batch call, which spins."""
    offsets = list(range(0, nbytes, piece))

    def move() -> None:
        for at in range(0, len(offsets), 1024):
            part = offsets[at : at + 1024]
            if engine.batch_transfer_sync_write(
                session, [local + o for o in part], [remote + o for o in part], [min(piece, nbytes)] * len(part)
            ):
                raise SystemExit("a raw batch failed")

    return move


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--windows", action="store_true", help="also compare ways of cutting and feeding tcp writes")
    asked = parser.parse_args()
    nbytes = asked.megabytes * MB
    tcp: dict[str, Any] = {"protocol": "tcp", "host": "127.0.0.1"}
    variants: dict[str, tuple[str, dict[str, Any]]] = {"cma": ("cma", {}), "mooncake tcp": ("mooncake", tcp)}
    if asked.windows:
        for piece in (4, 16, 64, asked.megabytes):
            for window, limit in ((16, 64), (128, 64), (1024, 64), (1024, 256)):
                tuning = Tuning(piece=piece * MB, window=window, window_bytes=limit * MB, batched=False)
                label = f"tcp pieces {piece} MB, window {window} x, {limit} MB"
                variants[label] = ("mooncake", {**tcp, "tuning": tuning})
    peers = {name: Peer(name, options, nbytes) for name, options in (("cma", {}), ("mooncake", tcp))}
    data, other = buffer(nbytes, 7), buffer(nbytes, 0)
    local = data.ctypes.data
    transports: dict[str, tuple[Transport, Peer]] = {}
    for label, (name, options) in variants.items():
        transport = registry.create(name, **options)
        transport.register([Region(local, nbytes)])
        transport.probe(peers[name].endpoint, Deadline.after(SECONDS))
        transports[label] = (transport, peers[name])
    mooncake = transports["mooncake tcp"][0]
    assert isinstance(mooncake, MooncakeTransport)
    engine, tcp_peer = mooncake._pump.engine, peers["mooncake"]
    for word, piece, total in (("one write", nbytes, nbytes), ("1 MB", MB, nbytes), ("64 KB", 64 << 10, nbytes // 2)):
        print(f"--- {total // MB} MB as {word}")
        moves: dict[str, Callable[[], None]] = {
            "numpy copy inside one process": lambda total=total: np.copyto(other[:total], data[:total]),
            "raw batch_transfer_sync_write": raw(engine, tcp_peer.endpoint.address, local, tcp_peer.base, piece, total),
        }
        for label, (transport, peer) in transports.items():
            moves[label] = through(transport, peer.endpoint, local, peer.base, piece, total)
        measure(total, asked.repeats, moves)
    for transport, _ in transports.values():
        transport.close()
    for peer in peers.values():
        peer.close()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--peer"]:
        peer_main(sys.argv[2], json.loads(sys.argv[3]), int(sys.argv[4]))
    else:
        main()
