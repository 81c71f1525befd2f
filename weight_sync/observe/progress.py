"""What a person sees while a sync runs: bars on a terminal, one plain line per phase anywhere else.

Both forms take the same calls, from any thread:

    on_phase(name)               a phase begins (pass it to Recorder(on_phase=...))
    on_bytes(rank, done, total)  a source rank has moved `done` of its `total` bytes in this phase; done never shrinks
    say(text)                    a line that a person should read now (an attempt that is made again)
    end(record)                  the sync is over, committed or not

`begin(version, nbytes)` opens a sync; nbytes is what the plan will write, None where the ranks' totals must do.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Protocol, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from weight_sync.observe.records import Phase, SyncRecord
from weight_sync.observe.units import bytes_text, rate_text, seconds_text

RANK_BARS = 8
"""With more source ranks than this the single bars fold into one that names the rank that is furthest behind."""

Clock = Callable[[], float]


class SyncProgress(Protocol):
    """See the module docstring."""

    def begin(self, version: int, nbytes: int | None = None) -> None: ...

    def on_phase(self, name: Phase) -> None: ...

    def on_bytes(self, rank: str, done: int, total: int) -> None: ...

    def say(self, text: str) -> None: ...

    def end(self, record: SyncRecord) -> None: ...

    def close(self) -> None: ...


class Meter:
    """Bytes of the running phase, by rank. Both forms draw from it. Call only under the owner's lock."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.version = 0
        self.expected: int | None = None
        self.phase: Phase | None = None
        self.began = 0.0
        self.ranks: dict[str, tuple[int, int]] = {}

    def begin(self, version: int, nbytes: int | None) -> None:
        self.version, self.expected, self.phase, self.ranks = version, nbytes, None, {}

    def enter(self, phase: Phase) -> None:
        """A phase that comes again at once (staging rounds) keeps its bytes and its clock."""
        if phase != self.phase:
            self.phase, self.began, self.ranks = phase, self._clock(), {}

    def moved(self, rank: str, done: int, total: int) -> None:
        if not 0 <= done <= total:
            raise ValueError(f"progress of rank {rank!r}: {done} of {total} bytes is impossible")
        # Reports of one rank may arrive out of order from several threads: the largest is the newest.
        before = self.ranks.get(rank, (0, 0))
        self.ranks[rank] = (max(done, before[0]), max(total, before[1]))

    @property
    def done(self) -> int:
        return sum(done for done, _ in self.ranks.values())

    @property
    def total(self) -> int:
        known = sum(total for _, total in self.ranks.values())
        return max(known, self.expected or 0) if self.phase == "write" else known

    @property
    def seconds(self) -> float:
        return self._clock() - self.began

    def behind(self) -> str:
        """The rank with the least share done."""
        return min(self.ranks, key=lambda rank: (self.ranks[rank][0] / max(1, self.ranks[rank][1]), rank))


class LineProgress:
    """One line per phase when it ends, no escape codes: for files, pipes and job logs."""

    def __init__(self, stream: TextIO, *, clock: Clock = time.monotonic) -> None:
        self._stream = stream
        self._meter = Meter(clock)
        self._lock = threading.Lock()

    def begin(self, version: int, nbytes: int | None = None) -> None:
        with self._lock:
            self._meter.begin(version, nbytes)

    def on_phase(self, name: Phase) -> None:
        with self._lock:
            if name != self._meter.phase:
                self._phase_line()
            self._meter.enter(name)

    def on_bytes(self, rank: str, done: int, total: int) -> None:
        with self._lock:
            self._meter.moved(rank, done, total)

    def say(self, text: str) -> None:
        with self._lock:
            self._write(text)

    def end(self, record: SyncRecord) -> None:
        with self._lock:
            if record.error is None:
                self._phase_line()
            self._meter.phase = None
            self._write(outcome(record))

    def close(self) -> None:
        """Nothing to tear down; the stream stays open."""

    def _phase_line(self) -> None:
        meter = self._meter
        if meter.phase is None:
            return
        text = f"version {meter.version}: {meter.phase} {seconds_text(meter.seconds)}"
        if meter.done:
            ranks = f"{len(meter.ranks)} rank{'s' if len(meter.ranks) > 1 else ''}"
            text += f", {bytes_text(meter.done)} from {ranks}"
            text += f", {rate_text(meter.done / meter.seconds)}" if meter.seconds > 0 else ""
        self._write(text)

    def _write(self, text: str) -> None:
        self._stream.write(text + "\n")
        self._stream.flush()


class LiveProgress:
    """Bars that redraw in place: one for the phase, one for each source rank or one for all of them."""

    def __init__(self, console: Console, *, clock: Clock = time.monotonic) -> None:
        self._meter = Meter(clock)
        self._lock = threading.Lock()
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            TextColumn("{task.fields[moved]}"),
            console=console,
            transient=True,
            refresh_per_second=8,
        )
        self._phase_bar: TaskID | None = None
        self._rank_bars: dict[str, TaskID] = {}
        self._folded: TaskID | None = None

    def begin(self, version: int, nbytes: int | None = None) -> None:
        with self._lock:
            self._clear()
            self._meter.begin(version, nbytes)
            self._phase_bar = self._bars.add_task(f"version {version}", total=None, moved="")
            self._bars.start()

    def on_phase(self, name: Phase) -> None:
        with self._lock:
            if name != self._meter.phase:
                self._drop_rank_bars()
            self._meter.enter(name)
            self._draw_phase()

    def on_bytes(self, rank: str, done: int, total: int) -> None:
        with self._lock:
            self._meter.moved(rank, done, total)
            self._draw_phase()
            if len(self._meter.ranks) <= RANK_BARS:
                self._draw_rank(rank)
            else:
                self._draw_folded()

    def say(self, text: str) -> None:
        with self._lock:
            self._bars.console.print(text, markup=False, highlight=False)

    def end(self, record: SyncRecord) -> None:
        with self._lock:
            self._meter.phase = None
            self._clear()
            self._bars.stop()
            self._bars.console.print(outcome(record), markup=False, highlight=False)

    def close(self) -> None:
        """Stop redrawing, also after a sync that never reached end(). The terminal is usable again."""
        with self._lock:
            self._clear()
            self._bars.stop()

    def _draw_phase(self) -> None:
        meter = self._meter
        if self._phase_bar is None:
            return
        moved = ""
        if meter.ranks:
            moved = f"{bytes_text(meter.done)} / {bytes_text(meter.total)}"
            moved += f"  {rate_text(meter.done / meter.seconds)}" if meter.seconds > 0 else ""
        self._bars.update(
            self._phase_bar,
            description=f"version {meter.version}  {meter.phase or ''}",
            completed=meter.done,
            total=meter.total if meter.ranks else None,
            moved=moved,
        )

    def _draw_rank(self, rank: str) -> None:
        done, total = self._meter.ranks[rank]
        if rank not in self._rank_bars:
            self._rank_bars[rank] = self._bars.add_task(f"  {rank}", total=total, moved="")
        self._bars.update(self._rank_bars[rank], completed=done, total=total, moved=f"{bytes_text(done)} / {bytes_text(total)}")

    def _draw_folded(self) -> None:
        for bar in self._rank_bars.values():
            self._bars.remove_task(bar)
        self._rank_bars = {}
        slowest = self._meter.behind()
        done, total = self._meter.ranks[slowest]
        if self._folded is None:
            self._folded = self._bars.add_task("", total=total, moved="")
        self._bars.update(
            self._folded,
            description=f"  {len(self._meter.ranks)} ranks, last is {slowest}",
            completed=done,
            total=total,
            moved=f"{bytes_text(done)} / {bytes_text(total)}",
        )

    def _drop_rank_bars(self) -> None:
        for bar in [*self._rank_bars.values(), *([] if self._folded is None else [self._folded])]:
            self._bars.remove_task(bar)
        self._rank_bars, self._folded = {}, None

    def _clear(self) -> None:
        self._drop_rank_bars()
        if self._phase_bar is not None:
            self._bars.remove_task(self._phase_bar)
            self._phase_bar = None


class NoProgress:
    """Silence, for ranks other than the one a person watches."""

    def begin(self, version: int, nbytes: int | None = None) -> None: ...

    def on_phase(self, name: Phase) -> None: ...

    def on_bytes(self, rank: str, done: int, total: int) -> None: ...

    def say(self, text: str) -> None: ...

    def end(self, record: SyncRecord) -> None: ...

    def close(self) -> None: ...


def open_progress(stream: TextIO | None = None) -> SyncProgress:
    """Bars if the stream (stdout by default) is a terminal that can move its cursor, plain lines otherwise."""
    target = sys.stdout if stream is None else stream
    console = Console(file=target)
    if console.is_terminal and not console.is_dumb_terminal and target.isatty():
        return LiveProgress(console)
    return LineProgress(target)


def outcome(record: SyncRecord) -> str:
    """The closing line of a sync."""
    if record.error is not None:
        state = "committed, then failed" if record.committed else "failed"
        return f"version {record.version}: {state} after {seconds_text(record.seconds)}: {record.error}"
    checks = "verified" if record.verified else "not verified"
    state = "committed" if record.committed else "not committed"
    speed = "" if record.sync_gb_per_s is None else f", {record.sync_gb_per_s:.2f} GB/s over the sync"
    return f"version {record.version}: {state}, {checks}, {bytes_text(record.bytes)} in {seconds_text(record.seconds)}{speed}"
