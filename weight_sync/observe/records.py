"""What is known about one sync after it ended, as frozen values, and the only place where they are reduced.

A span is one stretch of one phase on one rank. Spans become per-rank sums, those become max, mean and skew, and all of it
ends in one SyncRecord, from which metrics, table, report and wandb are written. Nobody downstream adds up again.

Units: seconds, bytes, bytes per second for limits, 10^9 bytes per second for everything called gb_per_s.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from weight_sync.observe.units import GB

Phase = Literal["plan", "pause", "gather", "quantise", "encode", "write", "verify", "commit", "post", "resume", "keep"]
PHASES: tuple[Phase, ...] = get_args(Phase)
"""In the order of a sync. A phase that did not happen is absent from a record, never zero."""

CONTROLLER = "controller"
"""The rank label of spans taken by the process that drives the sync."""


@dataclass(frozen=True, slots=True)
class Span:
    """One stretch of one phase on one rank.

    start, end: that process's monotonic seconds, good for durations only. wall: unix seconds at `start`, the only clock
    different processes share; it places spans on one picture and is as good as the hosts' clocks agree.
    nbytes: bytes this rank moved in the stretch, 0 where nothing moved.
    """

    rank: str
    phase: Phase
    start: float
    end: float
    wall: float
    nbytes: int = 0

    def __post_init__(self) -> None:
        if self.phase not in PHASES:
            raise ValueError(f"span of rank {self.rank!r}: unknown phase {self.phase!r}, known are {', '.join(PHASES)}")
        if not self.end >= self.start:
            raise ValueError(
                f"span of rank {self.rank!r}, phase {self.phase}: ends at {self.end} before it starts at {self.start}"
            )
        if self.nbytes < 0:
            raise ValueError(f"span of rank {self.rank!r}, phase {self.phase}: {self.nbytes} bytes, must not be negative")

    @property
    def seconds(self) -> float:
        return self.end - self.start

    def to_json(self) -> dict[str, Any]:
        return {
            "rank": self.rank,
            "phase": self.phase,
            "start": self.start,
            "end": self.end,
            "wall": self.wall,
            "nbytes": self.nbytes,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Span:
        return cls(data["rank"], data["phase"], data["start"], data["end"], data["wall"], data["nbytes"])


@dataclass(frozen=True, slots=True)
class RankStats:
    """One quantity over the ranks that reported it. skew is max / mean: 1.0 when every rank took equally long."""

    ranks: int
    max: float
    mean: float
    skew: float
    slowest: str

    @classmethod
    def over(cls, values: Mapping[str, float]) -> RankStats | None:
        """None when no rank reported. Equal maxima: the first label in sorted order is the slowest."""
        if not values:
            return None
        slowest = min(values, key=lambda rank: (-values[rank], rank))
        largest = values[slowest]
        mean = min(largest, math.fsum(values.values()) / len(values))  # rounding must not put the mean above the max
        return cls(len(values), largest, mean, largest / mean if mean > 0 else 1.0, slowest)

    def to_json(self) -> dict[str, Any]:
        return {"ranks": self.ranks, "max": self.max, "mean": self.mean, "skew": self.skew, "slowest": self.slowest}


@dataclass(frozen=True, slots=True)
class PhaseTimes:
    """One phase of one sync.

    seconds: what the controller measured; where it did not time the phase (a phase that only happens inside ranks), the
    slowest rank's busy time, and timed_by says so. Only controller phases are disjoint in time.
    """

    phase: Phase
    seconds: float
    timed_by: Literal["controller", "ranks"]
    nbytes: int
    ranks: RankStats | None


@dataclass(frozen=True, slots=True)
class SyncRecord:
    """One sync, over.

    bytes: bytes written into rollout memory. gathered_bytes: bytes of full tensors materialised on the way (0 when shards
    went straight to shards). seconds: begin to end on the controller. phases: seconds by name, in the order of PHASES.
    verified: the digests were compared, were equal, and the sync ended without an error. committed: the version moved.
    tokens_match: None until somebody compared generations. rank_seconds: busy seconds in the write phase; rank_bytes:
    bytes written; both by source rank label. stalled_seconds: from the start of pause to the end of resume.
    limit: bytes per second the wire could do, None if unknown. step_seconds: one whole training step, sync included.
    error: None, or why the sync failed. started: unix seconds. figures: more numbers by name (quant/saturated, say). remarks:
    what a person was told meanwhile (an attempt that was made again, why no delta was sent).
    """

    version: int
    session: str
    bytes: int
    gathered_bytes: int
    seconds: float
    phases: Mapping[Phase, float]
    verified: bool
    committed: bool
    started: float
    tokens_match: bool | None = None
    writes: int = 0
    transfers: int = 0
    retries: int = 0
    stalled_seconds: float = 0.0
    rank_seconds: Mapping[str, float] = field(default_factory=dict)
    rank_bytes: Mapping[str, int] = field(default_factory=dict)
    phase_times: tuple[PhaseTimes, ...] = ()
    limit: float | None = None
    step_seconds: float | None = None
    error: str | None = None
    figures: Mapping[str, float] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.limit is not None and not self.limit > 0:
            raise ValueError(f"limit must be bytes per second above 0, got {self.limit}; None means unknown")
        if self.step_seconds is not None and not self.step_seconds > 0:
            raise ValueError(f"step_seconds must be above 0, got {self.step_seconds}; None means unknown")
        if self.error is not None and self.verified:
            raise ValueError(f"version {self.version}: a failed sync cannot be verified ({self.error})")

    @property
    def identity(self) -> tuple[int, str, float]:
        """Tells this sync from every other of the run: a retry may reuse version and session, but it starts later."""
        return (self.version, self.session, self.started)

    @property
    def rank_stats(self) -> RankStats | None:
        """Write seconds over source ranks."""
        return next((times.ranks for times in self.phase_times if times.phase == "write"), None)

    @property
    def gb_per_s(self) -> float | None:
        """Over the write phase; None when nothing was written or the phase took no measurable time."""
        return rate(self.bytes, self.phases.get("write"))

    @property
    def sync_gb_per_s(self) -> float | None:
        """Over the whole sync."""
        return rate(self.bytes, self.seconds)

    @property
    def share_of_limit(self) -> float | None:
        """Write rate over `limit`. Not capped: above 1 the limit was measured too low."""
        return share(self.gb_per_s, self.limit)

    @property
    def sync_share_of_limit(self) -> float | None:
        return share(self.sync_gb_per_s, self.limit)

    @property
    def bubble_share(self) -> float | None:
        """Part of a training step during which generation stood still for the sync."""
        return None if self.step_seconds is None else self.stalled_seconds / self.step_seconds

    def with_tokens_match(self, match: bool) -> SyncRecord:
        """The same sync, after generations were compared."""
        return replace(self, tokens_match=match)

    def with_step_seconds(self, seconds: float) -> SyncRecord:
        """The same sync, after the training step it belongs to ended."""
        return replace(self, step_seconds=seconds)

    def to_json(self) -> dict[str, Any]:
        stats = self.rank_stats
        return {
            "version": self.version,
            "session": self.session,
            "bytes": self.bytes,
            "gathered_bytes": self.gathered_bytes,
            "seconds": self.seconds,
            "phases": dict(self.phases),
            "verified": self.verified,
            "committed": self.committed,
            "tokens_match": self.tokens_match,
            "started": self.started,
            "writes": self.writes,
            "transfers": self.transfers,
            "retries": self.retries,
            "gb_per_s": self.gb_per_s,
            "sync_gb_per_s": self.sync_gb_per_s,
            "limit_gb_per_s": None if self.limit is None else self.limit / GB,
            "share_of_limit": self.share_of_limit,
            "stalled_seconds": self.stalled_seconds,
            "bubble_share": self.bubble_share,
            "rank_seconds": None if stats is None else stats.to_json(),
            "error": self.error,
            "figures": dict(self.figures),
            "remarks": list(self.remarks),
        }


def rate(nbytes: int, seconds: float | None) -> float | None:
    """10^9 bytes per second, or None where a rate would be meaningless."""
    return nbytes / seconds / GB if seconds and nbytes else None


def share(gb_per_s: float | None, limit: float | None) -> float | None:
    return None if gb_per_s is None or limit is None else gb_per_s * GB / limit


def busy_seconds(spans: Iterable[Span]) -> float:
    """Length of the union of the spans' intervals: two threads writing at once are busy once. One process's spans only."""
    total, open_from, open_to = 0.0, 0.0, -math.inf
    for start, end in sorted((span.start, span.end) for span in spans):
        if start > open_to:
            total += max(0.0, open_to - open_from)
            open_from, open_to = start, end
        else:
            open_to = max(open_to, end)
    return total + max(0.0, open_to - open_from)


def reduce_phases(
    spans: Iterable[Span], *, written: int | None = None, gathered: int = 0, controller: str = CONTROLLER
) -> tuple[PhaseTimes, ...]:
    """All spans of one sync, reduced to one entry per phase that happened, in the order of PHASES.

    written, gathered: bytes of the write and gather phases where the caller counted them; otherwise, and in every other
    phase, the spans' own bytes, the ranks' where there are any (the controller only waits for the same bytes).
    """
    by_phase: dict[Phase, dict[str, list[Span]]] = {}
    for span in spans:
        by_phase.setdefault(span.phase, {}).setdefault(span.rank, []).append(span)
    result = []
    for phase in PHASES:
        if phase not in by_phase:
            continue
        by_rank = dict(by_phase[phase])
        own = by_rank.pop(controller, [])
        stats = RankStats.over({rank: busy_seconds(group) for rank, group in by_rank.items()})
        movers = list(by_rank.values()) or [own]
        nbytes = sum(span.nbytes for group in movers for span in group)
        if phase == "write" and written is not None:
            nbytes = written
        elif phase == "gather" and gathered:
            nbytes = gathered
        if own:
            result.append(PhaseTimes(phase, busy_seconds(own), "controller", nbytes, stats))
        elif stats is not None:
            result.append(PhaseTimes(phase, stats.max, "ranks", nbytes, stats))
    return tuple(result)
