"""A picture of a simulated sync: who is busy when, and how full the links are. Needs matplotlib (extra `picture`).

Above, one row for each rank (or for each group of neighbouring ranks when there are many: the bar is the slowest one's, the
shade says how many were still at it), and for how long the engines are paused. Below, the share of each kind of link that is
used: mean over the links of that kind that are used at all, and the fullest one.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from weight_sync.errors import ConfigError
from weight_sync.simulate.sync import Simulation, Span

COLOURS = {
    "quantise": "#b5a300", "pause": "#d1495b", "check": "#d98a3d", "write": "#2f6db5", "place": "#8c6bb1", "verify": "#3a9e6e",
    "finish": "#37a6b5",
}  # fmt: skip
WORDS = {
    "quantise": "looking at weights to be quantised", "pause": "pausing engines", "check": "has a parameter moved?",
    "write": "sending, receiving", "place": "unpacking", "verify": "digesting, comparing", "finish": "commit, resume",
}  # fmt: skip
KINDS = {
    "local": "NVLink or loopback", "nic": "network cards", "pcie": "PCIe", "leaf": "switch uplinks", "cores": "CPU cores",
    "issue": "message rate", "work": "hashing and copying",
}  # fmt: skip
ROWS = 16
"""Rows of each side; more ranks than this share rows."""


def check(file: str | Path) -> Path:
    """The file's path. Raises ConfigError for a suffix that is neither .png nor .svg, and without matplotlib."""
    path = Path(file)
    if path.suffix not in (".png", ".svg"):
        raise ConfigError(f"picture={file}: must end in .png or .svg")
    if find_spec("matplotlib") is None:
        raise ConfigError("picture=: matplotlib is not installed; pip install weight_sync[picture]")
    return path


def draw(simulation: Simulation, file: str | Path, title: str) -> Path:
    """Write the picture and return its path. Raises as check does."""
    path = check(file)
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    groups = {side: _groups(simulation.spans, side) for side in ("trainer", "rollout")}
    rows = 1 + sum(map(len, groups.values()))
    figure, (gantt, links) = pyplot.subplots(
        2, 1, figsize=(10, 2.2 + 0.19 * rows + 2.0), height_ratios=(0.19 * rows + 0.4, 2.0), sharex=True, layout="constrained"
    )
    p = simulation.prediction
    state = f"FAILED: {simulation.failed}" if simulation.failed else f"{p.seconds:.3g} s, lower bound {p.bound_seconds:.3g} s"
    figure.suptitle(f"{title}\n{p.nbytes / 1e9:,.0f} GB in {p.writes:,.0f} writes: {state}; limit: {p.limit}", fontsize=10)
    _gantt(gantt, simulation, groups)
    _links(links, simulation)
    links.set_xlabel("seconds since the sync began")
    links.set_xlim(0, p.seconds * 1.02 or 1.0)
    figure.savefig(path, dpi=110, metadata={"Date": None} if path.suffix == ".svg" else {"Software": None})
    pyplot.close(figure)
    return path


def _groups(spans: tuple[Span, ...], side: str) -> list[tuple[str, list[Span]]]:
    """(label, spans) of the rows of one side."""
    mine = [s for s in spans if s.rank.startswith(side)]
    ranks = sorted({int(s.rank.split()[1]) for s in mine})
    each = max(1, -(-len(ranks) // ROWS))
    result: list[tuple[str, list[Span]]] = []
    for low in range(0, len(ranks), each):
        part = ranks[low : low + each]
        label = f"{side} {part[0]}" + (f"-{part[-1]}" if len(part) > 1 else "")
        result.append((label, [s for s in mine if part[0] <= int(s.rank.split()[1]) <= part[-1]]))
    return result


def _gantt(axes: Any, simulation: Simulation, groups: dict[str, list[tuple[str, list[Span]]]]) -> None:
    from matplotlib.patches import Patch

    control = [s for s in simulation.spans if s.rank == "controller"]
    rows = [("controller", control), *groups["trainer"], *groups["rollout"]]
    for y, (_, spans) in enumerate(rows):
        for phase in COLOURS:
            for start in sorted({s.start for s in spans if s.phase == phase}):
                here = [s for s in spans if s.phase == phase and s.start == start]
                # Every rank of the row on top of the others: where all are busy the bar is dark.
                for s in here:
                    alpha = 1 - (1 - 0.95) ** (1 / len(here))
                    axes.barh(y, s.seconds, left=s.start, height=0.8, color=COLOURS[phase], alpha=alpha, linewidth=0)
    axes.set_yticks(range(len(rows)), [label for label, _ in rows], fontsize=7)
    axes.set_ylim(len(rows) - 0.4, -1.6)
    axes.axhline(0.5 + len(groups["trainer"]), color="#888", linewidth=0.6)
    begin, end = next((s.start for s in control if s.phase == "pause"), 0.0), simulation.prediction.seconds
    axes.axvspan(begin, end, color="#d1495b", alpha=0.05, linewidth=0)
    after = "and longer" if simulation.failed else ""
    axes.text((begin + end) / 2, -1.0, f"engines paused for {end - begin:.3g} s {after}".strip(), fontsize=7, ha="center",
              va="center", color="#a03040")  # fmt: skip
    present = {s.phase for s in simulation.spans}
    seen = [phase for phase in COLOURS if phase in present]
    axes.legend(handles=[Patch(color=COLOURS[p], label=WORDS[p]) for p in seen], ncols=4, fontsize=7, loc="lower center",
                bbox_to_anchor=(0.5, 1.0), frameon=False)  # fmt: skip


def _links(axes: Any, simulation: Simulation) -> None:
    steps, kinds = simulation.writing, np.asarray(simulation.network.kinds)
    if not steps:
        return
    usage = np.stack([s.usage for s in steps])
    edges = np.asarray([*(s.start for s in steps), steps[-1].start + steps[-1].seconds])
    for i, (kind, words) in enumerate(KINDS.items()):
        columns = np.flatnonzero((kinds == kind) & (usage > 0).any(axis=0))
        if not len(columns) or usage[:, columns].max() < 0.02:
            continue
        colour = f"C{i}"
        mean, most = usage[:, columns].mean(axis=1), usage[:, columns].max(axis=1)
        axes.stairs(mean, edges, color=colour, label=f"{words} (mean of {len(columns)})", linewidth=1.6)
        axes.stairs(most, edges, color=colour, linewidth=0.8, linestyle=":")
    axes.set_ylim(0, 1.05)
    axes.set_ylabel("share in use\n(dotted: fullest)", fontsize=8)
    axes.legend(fontsize=7, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4, frameon=False)
    axes.grid(alpha=0.25)
