"""A picture of one sync: a row for each rank, a bar for each span. One SVG file, readable in any browser, nothing to load.

Rows are placed by wall clock at the start of each span and by monotonic length: between hosts, bars are as well aligned as
the hosts' clocks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from xml.sax.saxutils import escape

from weight_sync.observe.records import CONTROLLER, PHASES, Phase, Span, SyncRecord, busy_seconds
from weight_sync.observe.report import write_atomic
from weight_sync.observe.units import bytes_text, rate_text, seconds_text

COLOURS: dict[Phase, str] = {
    "plan": "#8c8c8c",
    "pause": "#d1495b",
    "gather": "#e08e2b",
    "quantise": "#b5a300",
    "encode": "#6b7fd7",
    "write": "#2f6db5",
    "verify": "#3a9e6e",
    "commit": "#7b4fa3",
    "post": "#a65f3d",
    "resume": "#37a6b5",
    "keep": "#c58fb0",
}
MAX_ROWS = 64
"""More ranks than this are not legible: the busiest are drawn and the picture says how many were left out."""

ROW, GAP, LABEL, PLOT, TOP, FOOT = 16, 4, 150, 850, 58, 36


def timeline_svg(spans: Iterable[Span], title: str) -> str:
    """The picture as text. Raises ValueError when there is no span."""
    by_rank: dict[str, list[Span]] = {}
    for span in spans:
        by_rank.setdefault(span.rank, []).append(span)
    if not by_rank:
        raise ValueError(f"timeline {title!r}: there is no span to draw")
    rows = _rows(by_rank)
    first = min(span.wall for group in by_rank.values() for span in group)
    last = max(span.wall + span.seconds for group in by_rank.values() for span in group)
    length = (last - first) or 1e-9
    left_out = len(by_rank) - len(rows)
    bottom = TOP + len(rows) * (ROW + GAP)
    width, height = LABEL + PLOT + 20, bottom + FOOT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="11" fill="#222">',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        f'<text x="10" y="18" font-size="14">{escape(title)}</text>',
        *_legend({span.phase for group in by_rank.values() for span in group}),
        *_axis(length, bottom),
    ]
    for number, rank in enumerate(rows):
        y = TOP + number * (ROW + GAP)
        parts.append(f'<text x="{LABEL - 8}" y="{y + 12}" text-anchor="end">{escape(_short(rank))}</text>')
        for span in sorted(by_rank[rank], key=lambda span: span.wall):
            x = LABEL + PLOT * (span.wall - first) / length
            # A span too short to see still leaves a mark.
            breadth = max(1.0, PLOT * span.seconds / length)
            parts.append(
                f'<rect x="{x:.2f}" y="{y}" width="{breadth:.2f}" height="{ROW}" fill="{COLOURS[span.phase]}">'
                f"<title>{escape(_hint(span))}</title></rect>"
            )
    if left_out:
        parts.append(f'<text x="10" y="{height - 6}">{left_out} less busy ranks not shown</text>')
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


def write_timeline(directory: Path, record: SyncRecord, spans: Iterable[Span]) -> Path:
    """Write timeline-<version>.svg beside the report and return its path. A retry of the version gets a number behind it."""
    state = "failed" if record.error is not None else "verified" if record.verified else "not verified"
    title = f"version {record.version}: {bytes_text(record.bytes)} in {seconds_text(record.seconds)}, {state}"
    path, attempt = directory / f"timeline-{record.version}.svg", 1
    while path.exists():
        attempt += 1
        path = directory / f"timeline-{record.version}-{attempt}.svg"
    write_atomic(path, timeline_svg(spans, title))
    return path


def _rows(by_rank: dict[str, list[Span]]) -> list[str]:
    others = sorted((rank for rank in by_rank if rank != CONTROLLER), key=_natural)
    room = MAX_ROWS - (CONTROLLER in by_rank)
    if len(others) > room:
        busiest = sorted(others, key=lambda rank: -busy_seconds(by_rank[rank]))[:room]
        others = sorted(busiest, key=_natural)
    return ([CONTROLLER] if CONTROLLER in by_rank else []) + others


def _natural(label: str) -> list[int | str]:
    """Sort key under which "trainer 10" comes after "trainer 9": text and numbers alternate, so they compare in pairs."""
    return [int(word) if number % 2 else word for number, word in enumerate(re.split(r"(\d+)", label))]


def _legend(present: set[Phase]) -> list[str]:
    parts = []
    shown: list[Phase] = [phase for phase in PHASES if phase in present]
    for number, phase in enumerate(shown):
        x = LABEL + number * 90
        parts.append(f'<rect x="{x}" y="28" width="11" height="11" fill="{COLOURS[phase]}"/>')
        parts.append(f'<text x="{x + 15}" y="38">{phase}</text>')
    return parts


def _axis(length: float, bottom: int) -> list[str]:
    parts = []
    for tick in range(6):
        x = LABEL + PLOT * tick / 5
        parts.append(f'<line x1="{x:.1f}" y1="{TOP - 4}" x2="{x:.1f}" y2="{bottom}" stroke="#ddd"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 14}" text-anchor="middle">{seconds_text(length * tick / 5)}</text>')
    return parts


def _hint(span: Span) -> str:
    text = f"{span.rank}: {span.phase}, {seconds_text(span.seconds)}"
    if span.nbytes:
        text += f", {bytes_text(span.nbytes)}"
        text += f", {rate_text(span.nbytes / span.seconds)}" if span.seconds > 0 else ""
    return text


def _short(label: str) -> str:
    return label if len(label) <= 24 else label[:23] + "…"
