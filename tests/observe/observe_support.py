"""Hand-made spans, clocks and records for the observe tests."""

from __future__ import annotations

from typing import Any

from weight_sync.observe.recorder import Recorder
from weight_sync.observe.records import Span, SyncRecord


class Clock:
    """A clock that only moves when told to."""

    def __init__(self, now: float = 100.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def tick(self, seconds: float) -> None:
        self.now += seconds


SECONDS = {"plan": 0.25, "pause": 0.125, "write": 2.0, "verify": 0.5, "commit": 0.25, "post": 0.25, "resume": 0.125}
"""Exact in binary, so that sums can be compared with ==. Together 3.5 s, 3.25 s from pause to resume."""


def recorded(
    version: int = 1,
    *,
    session: str = "s1",
    limit: float | None = 4e9,
    seconds: dict[str, float] | None = None,
    started: float = 1000.0,
    **counts: Any,
) -> Recorder:
    """One good sync of 4 GB: two ranks write 3 GB in 2 s and 1 GB in 1 s."""
    clock, wall = Clock(), Clock(started)
    recorder = Recorder(version, session, limit=limit, clock=clock, wall=wall)
    with recorder:
        for name, length in (seconds or SECONDS).items():
            with recorder.phase(name):  # type: ignore[arg-type]
                clock.tick(length)
                wall.tick(length)
        write_at = started + 0.375
        recorder.add_spans("trainer 0", [Span("", "write", 7.0, 9.0, write_at, 3_000_000_000)])
        recorder.add_spans("trainer 1", [Span("", "write", 50.0, 51.0, write_at, 1_000_000_000)])
        recorder.count(writes=40, transfers=20, **counts)
        recorder.mark_verified()
        recorder.mark_committed()
    return recorder


def record(version: int = 1, **arguments: Any) -> SyncRecord:
    return recorded(version, session=arguments.pop("session", f"s{version}"), **arguments).record()


def failed_record(version: int = 1, text: str = "endpoint 10.0.0.1:5 refused") -> SyncRecord:
    clock = Clock()
    recorder = Recorder(version, f"failed{version}", clock=clock, wall=Clock(2000.0))
    try:
        with recorder:
            with recorder.phase("pause"):
                clock.tick(0.5)
            with recorder.phase("write"):
                clock.tick(1.0)
                raise OSError(text)
    except OSError:
        pass
    return recorder.record()
