"""A long run: one sync after another while engines join and leave, with every byte compared and every process watched."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.drill_job import Job

WARM = 10
"""Syncs before memory is measured: the first ones open connections and touch pages."""


@dataclass
class Soak:
    """rss, fds: for each process the first and last value after warming up, and the slope for 100 syncs (bytes, descriptors).

    pulled: joins that read from an engine; the others waited for the trainer's next sync.
    """

    syncs: int
    joins: int = 0
    pulled: int = 0
    leaves: int = 0
    bytes: int = 0
    seconds: list[float] = field(default_factory=list)
    digests: int = 0
    compared: int = 0
    rss: dict[str, tuple[int, int, float]] = field(default_factory=dict)
    fds: dict[str, tuple[int, int, float]] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    def text(self) -> str:
        lines = [
            f"{self.syncs} syncs, {self.joins} joins ({self.pulled} by reading from an engine), {self.leaves} leaves, "
            f"{self.bytes / 1e9:.2f} GB, median {np.median(self.seconds):.2f} s; {self.digests} different digests; "
            f"{self.compared / 1e9:.2f} GB of live parameters compared with the trainer's: "
            + ("; ".join(self.wrong) or "all equal"),
            "",
            "| process | RSS, MB | per 100 syncs | descriptors | per 100 syncs |",
            "|---|---|---|---|---|",
        ]
        for name, (first, last, slope) in self.rss.items():
            low, high, grows = self.fds[name]
            lines.append(
                f"| {name} | {first / 1e6:.1f} to {last / 1e6:.1f} | {slope / 1e6:+.2f} MB | {low} to {high} | {grows:+.2f} |"
            )
        return "\n".join(lines)


def soak(job: Job, syncs: int, after: int = 0) -> Soak:
    """Every third sync an engine leaves, and joins again before the next but one: by turns out of another engine, and without.

    after: the version that is committed already.
    """
    result, seen = Soak(syncs), set[str]()
    members, outside = list(job.servers), list[str]()
    samples: dict[str, list[tuple[int, int, int]]] = {}
    for number in range(1, syncs + 1):
        version = after + number
        job.step(version)
        reply = _good(job.ask("sync", version=version), result, f"sync {version}")
        result.bytes += reply.get("bytes", 0)
        result.seconds.append(reply["seconds"])
        seen.add(reply.get("digest", ""))
        _compare(job, members, version, result)
        if number % 3 == 1 and len(members) > 1:
            name = members.pop(number // 3 % len(members))
            _good(job.ask("leave", name=name, gone=False), result, f"{name} leaves after {version}")
            outside.append(name)
            result.leaves += 1
        elif number % 3 == 0 and outside:
            name, pull = outside.pop(0), number % 2 == 0
            _good(job.ask("join", engine=job.servers[name].about, pull=pull), result, f"{name} joins after {version}")
            members.append(name)
            result.joins, result.pulled = result.joins + 1, result.pulled + pull
            if pull:
                _compare(job, members, version, result)
        if result.wrong:
            break
        for name, pid in _processes(job).items():
            samples.setdefault(name, []).append((number, *_sizes(pid)))
    for name, rows in samples.items():
        at, rss, fds = np.array(rows, np.float64)[min(WARM, len(rows) // 2) :].T
        result.rss[name] = (int(rss[0]), int(rss[-1]), float(np.polyfit(at, rss, 1)[0] * 100))
        result.fds[name] = (int(fds[0]), int(fds[-1]), float(np.polyfit(at, fds, 1)[0] * 100))
    result.digests = len(seen)
    return result


def _good(reply: dict[str, Any], result: Soak, what: str) -> dict[str, Any]:
    if not reply["ok"]:
        result.wrong.append(f"{what}: {reply['error']}")
    return reply


def _compare(job: Job, members: list[str], version: int, result: Soak) -> None:
    """Every live byte of every member, and the version that it stamps on what it generates."""
    for name in members:
        if wrong := job.wrong(name, version):
            result.wrong.append(f"version {version}: {name}: {wrong}")
        engine = job.servers[name]
        result.compared += sum(storage.nbytes for rank in engine.described.ranks for storage in rank.storages)
        stamped = engine.adapter.describe(engine.soon()).version
        if stamped != version:
            result.wrong.append(f"{name} should be at version {version}, says {stamped}")


def _processes(job: Job) -> dict[str, int]:
    found = {"controller": job.controller.pid}
    found |= {f"trainer {rank}": child.pid for rank, child in enumerate(job.trainers)}
    for name, engine in job.servers.items():
        found[f"{name} server"] = engine.group
        found |= {f"{name} worker {rank}": pid for rank, pid in enumerate(engine.workers)}
    return found


def _sizes(pid: int) -> tuple[int, int]:
    """(resident bytes, open file descriptors)."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * 4096, len(list(Path(f"/proc/{pid}/fd").iterdir()))
