"""Runs: a job, a few syncs, faults at drawn points, and at the end a sync without faults that must succeed."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from weight_sync.chaos.case import CASES
from weight_sync.chaos.clock import virtual
from weight_sync.chaos.faults import FAULTS, Arm
from weight_sync.chaos.job import Job
from weight_sync.session.failure import FailurePolicy
from weight_sync.session.verify import Level

REAL_SECONDS = 30
"""A run that takes longer for real is stuck in a lock or a loop: it counts as a hang. (One takes some 20 ms.)"""


@dataclass(frozen=True, slots=True)
class Run:
    """What came of one seed. faults: those that struck. failed: syncs that raised or whose controller died. deltas: syncs that
    sent only what had changed."""

    seed: int
    case: str
    faults: tuple[str, ...]
    committed: int
    failed: int
    wrong: tuple[str, ...]
    hung: tuple[str, ...]
    deltas: int = 0


@dataclass(slots=True)
class Summary:
    """Runs by outcome: each is one of silent_wrong, hangs, failed (a sync raised, and a later one repaired all), committed.

    hangs: a sync past its deadlines, or a job that no sync could repair when the faults had stopped. by_fault: the same counts
    for the runs in which a fault struck.
    """

    runs: int = 0
    silent_wrong: int = 0
    hangs: int = 0
    committed: int = 0
    failed: int = 0
    by_fault: dict[str, dict[str, int]] = field(default_factory=dict)

    def add(self, run: Run) -> None:
        outcome = "silent_wrong" if run.wrong else "hangs" if run.hung else "failed" if run.failed else "committed"
        self.runs += 1
        setattr(self, outcome, getattr(self, outcome) + 1)
        for fault in set(run.faults) or {"none"}:
            counts = self.by_fault.setdefault(fault, dict.fromkeys(("runs", "silent_wrong", "hangs", "committed", "failed"), 0))
            counts["runs"] += 1
            counts[outcome] += 1

    def merge(self, other: Summary) -> None:
        for outcome in ("runs", "silent_wrong", "hangs", "committed", "failed"):
            setattr(self, outcome, getattr(self, outcome) + getattr(other, outcome))
        for fault, counts in other.by_fault.items():
            mine = self.by_fault.setdefault(fault, dict.fromkeys(counts, 0))
            for outcome, count in counts.items():
                mine[outcome] += count

    def to_json(self) -> dict[str, Any]:
        return {
            "runs": self.runs, "silent_wrong": self.silent_wrong, "hangs": self.hangs, "committed": self.committed,
            "failed": self.failed, "by_fault": dict(sorted(self.by_fault.items())),
        }  # fmt: skip


class _Stuck(BaseException):
    pass


@contextmanager
def _real_limit(seconds: int) -> Iterator[None]:
    """Ends what is stuck for real. For the main thread; elsewhere there is no limit."""

    def ring(*_: object) -> None:
        raise _Stuck

    try:
        before = signal.signal(signal.SIGALRM, ring)
    except ValueError:
        yield
        return
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def run(
    seed: int, *, faults: Sequence[str] = tuple(FAULTS), level: Level | None = None, story: list[str] | None = None,
    deltas: bool = False,
) -> Run:  # fmt: skip
    """One run, a function of its seed, the faults to draw from, the level of verification (None: drawn, never off) and deltas:
    whether syncs send only what changed; there are more of them then.

    story: gets a line for everything that happened.
    """
    luck = random.Random(seed)
    case = luck.choice(CASES)
    job = Job(
        case, seed, eager=luck.random() < 0.6, landing=luck.random() < 0.4, failure=_policy(luck),
        level=level or luck.choices((Level.DIGEST, Level.FULL, Level.CHECK_WEIGHT_EQUAL), (8, 1, 1))[0], story=story,
        deltas=deltas,
    )  # fmt: skip
    committed = failed = 0
    with virtual(job.clock, job.order), _real_limit(REAL_SECONDS):
        try:
            connecting = True
            for _ in range(luck.randint(1, 3) + 3 * deltas):
                _arm(job, luck, faults, connecting)
                job.step()
                done = job.attempt(job.controller)
                committed, failed = committed + done, failed + (not done)
                connecting = not done
                job.disarm()
                if luck.random() < 0.8:
                    job.reboot()
                if job.controller.sender.dead or (not done and luck.random() < 0.1):
                    job.takeover(recover=luck.random() < 0.5)
                if luck.random() < 0.3:
                    job.settle()
                if luck.random() < (0.1 if deltas else 0.25):
                    _arm(job, luck, faults, connecting=True, joining=True)
                    job.change(luck)
                    job.disarm()
            job.reboot()
            if job.controller.sender.dead:
                job.takeover()
            job.network.deliver_late()
            job.settle()
            _recover(job, luck)
            job.settle()
            job.step()
            job.check()
        except _Stuck:
            job.hang(f"the run did not end within {REAL_SECONDS} real seconds")
        finally:
            job.end()
    return Run(
        seed, case.name, tuple(sorted(job.network.fired)), committed, failed, tuple(job.wrong), tuple(job.hung), job.sent
    )


def _arm(job: Job, luck: random.Random, faults: Sequence[str], connecting: bool, joining: bool = False) -> None:
    for name in luck.choices(faults, k=luck.choice((0, 1, 1, 1, 2, 3))) if faults else ():
        FAULTS[name](Arm(job, luck, name, connecting, joining))


def _policy(luck: random.Random) -> FailurePolicy:
    attempts = luck.choice((1, 1, 1, 2, 3))
    if attempts == 1:
        return FailurePolicy()
    return FailurePolicy(attempts, on_suspect=luck.choice(("keep", "drop")), other_source=luck.random() < 0.5)


def _recover(job: Job, luck: random.Random) -> None:
    """No fault strikes any more: all engines must soon serve a new version.

    The first sync may find out who is new (and, if so configured, go on without), the second must succeed; unless another
    controller has taken over, which is then started again, as a supervisor does.
    """
    for patience in range(3):
        job.step()
        job.change(luck, back=True)
        done = job.attempt(job.controller)
        if done and all(engine.serving and engine.version == job.versions for engine in job.engines):
            return
        if patience and len(job.controllers) > 1:
            job.takeover()
    job.hang("all faults have stopped, and no sync brings all engines to a new version")


def many(seeds: Iterable[int], *, faults: Sequence[str] = tuple(FAULTS), deltas: bool = False) -> tuple[Summary, list[Run]]:
    """All of `seeds`, one after another, and those runs that went wrong or hung."""
    summary, bad = Summary(), []
    for seed in seeds:
        result = run(seed, faults=faults, deltas=deltas)
        summary.add(result)
        if result.wrong or result.hung:
            bad.append(result)
    return summary, bad
