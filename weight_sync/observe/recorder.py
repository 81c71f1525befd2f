"""Taking the measurements: SpanLog in any process, Recorder in the one that drives the sync.

with Recorder(version, session) as recorder:        # the sync's seconds run from here
    with recorder.phase("write"):                   # the controller's own span
        ...
    recorder.add_spans("trainer 0", spans)          # what a rank measured, as plain data or as Spans
    recorder.mark_verified(); recorder.mark_committed()
record = recorder.record()                          # also after an exception, which always passes through
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

from weight_sync.errors import SessionError
from weight_sync.observe.records import CONTROLLER, PHASES, Phase, Span, SyncRecord, busy_seconds, reduce_phases

Clock = Callable[[], float]


@dataclass(slots=True)
class OpenSpan:
    """What `SpanLog.span` hands to its block: the block reports the bytes it moved here."""

    nbytes: int = 0


class SpanLog:
    """Spans of one process, in the order they ended. `take()` gives them away as plain data, for any transport of results."""

    def __init__(self, rank: str, *, clock: Clock = time.monotonic, wall: Clock = time.time) -> None:
        self.rank = rank
        self._clock = clock
        self._wall = wall
        self._spans: list[Span] = []

    @contextmanager
    def span(self, phase: Phase, nbytes: int = 0) -> Iterator[OpenSpan]:
        """Time the block. The span is kept when the block raises, and the exception passes through."""
        check_phase(phase)
        opened = OpenSpan(nbytes)
        wall, start = self._wall(), self._clock()
        try:
            yield opened
        finally:
            self._spans.append(Span(self.rank, phase, start, self._clock(), wall, opened.nbytes))

    @property
    def spans(self) -> tuple[Span, ...]:
        return tuple(self._spans)

    def take(self) -> list[dict[str, Any]]:
        """Every span since the last take, as plain data."""
        taken, self._spans = self._spans, []
        return [span.to_json() for span in taken]


class Recorder:
    """Measures one sync. Not reusable, not thread-safe: one controller thread drives it.

    limit: bytes per second the wire could do, for share_of_limit. on_phase: called with the name when a phase begins. on_say:
    called with what say() is given.
    """

    def __init__(
        self,
        version: int,
        session: str,
        *,
        limit: float | None = None,
        on_phase: Callable[[Phase], None] | None = None,
        on_say: Callable[[str], None] | None = None,
        clock: Clock = time.monotonic,
        wall: Clock = time.time,
    ) -> None:
        self.version = version
        self.session = session
        self._limit = limit
        self._on_phase = on_phase
        self._on_say = on_say
        self._clock = clock
        self._wall = wall
        self._log = SpanLog(CONTROLLER, clock=clock, wall=wall)
        self._ranks: list[Span] = []
        self._current: Phase | None = None
        self._failed_in: Phase | None = None
        self._begin: float | None = None
        self._end: float | None = None
        self._started = 0.0
        self._bytes: int | None = None
        self._gathered = self._writes = self._transfers = self._retries = 0
        self._verified = self._committed = False
        self._figures: dict[str, float] = {}
        self._remarks: list[str] = []
        self._error: str | None = None

    def __enter__(self) -> Self:
        if self._begin is not None:
            raise SessionError(f"recorder of version {self.version} was used before: make one recorder for each sync")
        self._started, self._begin = self._wall(), self._clock()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._end = self._clock()
        if error is not None:
            self.fail(error)

    @contextmanager
    def phase(self, name: Phase) -> Iterator[OpenSpan]:
        """Time one phase on the controller. The same phase may come again (staging rounds); its seconds add up."""
        if self._begin is None or self._end is not None:
            raise SessionError(f"phase {name!r} of version {self.version}: the sync is not running, use `with recorder:`")
        if self._current is not None:
            raise SessionError(f"phase {name!r} begins inside phase {self._current!r}: phases of the controller do not nest")
        check_phase(name)
        if self._on_phase is not None:
            self._on_phase(name)
        self._current, self._failed_in = name, name
        try:
            with self._log.span(name) as opened:
                yield opened
            self._failed_in = None
        finally:
            self._current = None

    def add_spans(self, rank: str, spans: Iterable[Span | Mapping[str, Any]]) -> None:
        """Add what `rank` measured. The label given here wins over the label in the spans.

        Raises ValueError for a span with an unknown phase, a negative length or the controller's own label.
        """
        if rank == CONTROLLER:
            raise ValueError(f"{CONTROLLER!r} is the recorder's own label: give the rank that measured these spans")
        typed = (span if isinstance(span, Span) else Span.from_json(span) for span in spans)
        self._ranks.extend([replace(span, rank=rank) for span in typed])

    def count(
        self, *, bytes: int | None = None, gathered_bytes: int = 0, writes: int = 0, transfers: int = 0, retries: int = 0
    ) -> None:
        """Add what was really done (not what was planned) to the counts.

        bytes: without any count of it, the record sums the ranks' write spans.
        """
        if bytes is not None:
            self._bytes = (self._bytes or 0) + bytes
        self._gathered += gathered_bytes
        self._writes += writes
        self._transfers += transfers
        self._retries += retries

    def figures(self, values: Mapping[str, float]) -> None:
        """More numbers of this sync, by name; the last value counts."""
        self._figures.update(values)

    def say(self, text: str) -> None:
        """Something a person should read now: an attempt that failed and is made again, a replica that is left out."""
        self._remarks.append(text)
        if self._on_say is not None:
            self._on_say(text)

    def mark_verified(self) -> None:
        """Every digest was compared and is equal."""
        self._verified = True

    def mark_committed(self) -> None:
        """Every replica holds the version: it counts from here on, even if resuming then fails."""
        self._committed = True

    def fail(self, error: BaseException | str) -> None:
        """Note why the sync failed, for failures that are not raised through the `with` block. The first reason stays."""
        if self._error is None:
            text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
            self._error = f"{self._failed_in}: {text}" if self._failed_in is not None else text

    @property
    def spans(self) -> tuple[Span, ...]:
        """The controller's spans, then the ranks'."""
        return self._log.spans + tuple(self._ranks)

    def record(self) -> SyncRecord:
        """Reduce everything. Raises SessionError while the sync is still running."""
        if self._begin is None or self._end is None:
            raise SessionError(f"record of version {self.version}: the sync has not ended yet")
        by_rank: dict[str, list[Span]] = {}
        for span in self._ranks:
            if span.phase == "write":
                by_rank.setdefault(span.rank, []).append(span)
        rank_bytes = {rank: sum(span.nbytes for span in by_rank[rank]) for rank in sorted(by_rank)}
        times = reduce_phases(self.spans, written=self._bytes, gathered=self._gathered)
        written = self._bytes if self._bytes is not None else sum(t.nbytes for t in times if t.phase == "write")
        return SyncRecord(
            version=self.version,
            session=self.session,
            bytes=written,
            gathered_bytes=self._gathered or sum(t.nbytes for t in times if t.phase == "gather"),
            seconds=self._end - self._begin,
            phases={t.phase: t.seconds for t in times},
            verified=self._verified and self._error is None,
            committed=self._committed,
            started=self._started,
            writes=self._writes,
            transfers=self._transfers,
            retries=self._retries,
            stalled_seconds=self._stalled(self._end),
            rank_seconds={rank: busy_seconds(by_rank[rank]) for rank in sorted(by_rank)},
            rank_bytes=rank_bytes,
            phase_times=times,
            limit=self._limit,
            error=self._error,
            figures=dict(self._figures),
            remarks=tuple(self._remarks),
        )

    def _stalled(self, end: float) -> float:
        paused = [span.start for span in self._log.spans if span.phase == "pause"]
        resumed = [span.end for span in self._log.spans if span.phase == "resume"]
        # A sync that failed leaves the engines paused: at least until its own end nothing was generated.
        until = end if self._error is not None or not resumed else max(resumed)
        return until - min(paused) if paused else 0.0


def check_phase(name: str) -> None:
    if name not in PHASES:
        raise ValueError(f"unknown phase {name!r}; the phases are {', '.join(PHASES)}")
