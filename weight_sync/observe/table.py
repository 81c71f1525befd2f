"""The table at the end of a run: one row for each phase of each sync, a total for each sync, a total over all of them.

GB/s and share of the limit stand in the write row (over the write phase) and in the total rows (over the whole sync), so
that the difference between the two is the time spent around the wire.
"""

from __future__ import annotations

import io
from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from weight_sync.observe.records import PhaseTimes, SyncRecord, rate, share
from weight_sync.observe.units import bytes_text

COLUMNS = ("version", "phase", "seconds", "bytes", "GB/s", "of limit")


def rows(records: Sequence[SyncRecord]) -> list[tuple[str, ...]]:
    """The cells as text, row by row, in the order of COLUMNS."""
    result: list[tuple[str, ...]] = []
    for record in records:
        for times in record.phase_times:
            result.append(_phase_row(record, times))
        state = "failed" if record.error is not None else "verified" if record.verified else "not verified"
        result.append(
            _row(
                str(record.version),
                f"total ({state})",
                record.seconds,
                record.bytes,
                record.sync_gb_per_s,
                record.sync_share_of_limit,
            )
        )
    if len(records) > 1:
        seconds, nbytes = sum(r.seconds for r in records), sum(r.bytes for r in records)
        limits = {r.limit for r in records}
        speed = rate(nbytes, seconds)
        part = share(speed, limits.pop()) if len(limits) == 1 else None
        result.append(_row("all", f"{len(records)} syncs", seconds, nbytes, speed, part))
    return result


def table(records: Sequence[SyncRecord]) -> Table:
    """For a rich console. Errors of failed syncs stand below the rows, whole."""
    failures = [f"version {record.version}: {record.error}" for record in records if record.error is not None]
    built = Table(title="weight syncs", box=SIMPLE_HEAD, caption="\n".join(failures) or None, caption_justify="left")
    for position, name in enumerate(COLUMNS):
        built.add_column(name, justify="left" if position < 2 else "right", no_wrap=True)
    for cells in rows(records):
        total = cells[1].startswith("total") or cells[0] == "all"
        built.add_row(*cells, end_section=total, style="bold" if total else None)
    return built


def table_text(records: Sequence[SyncRecord], width: int = 100) -> str:
    """The same table without escape codes, for logs and files."""
    buffer = io.StringIO()
    Console(file=buffer, width=width, force_terminal=False, color_system=None, markup=False).print(table(records))
    return buffer.getvalue()


def _phase_row(record: SyncRecord, times: PhaseTimes) -> tuple[str, ...]:
    name = times.phase if times.timed_by == "controller" else f"{times.phase} (slowest rank)"
    speed = part = None
    if times.phase == "write":
        speed, part = record.gb_per_s, record.share_of_limit
    return _row(str(record.version), name, times.seconds, times.nbytes, speed, part)


def _row(version: str, phase: str, seconds: float, nbytes: int, speed: float | None, part: float | None) -> tuple[str, ...]:
    return (
        version,
        phase,
        f"{seconds:.4f}",
        bytes_text(nbytes) if nbytes else "",
        "" if speed is None else f"{speed:.2f}",
        "" if part is None else f"{part:.0%}",
    )
