"""A simulation as trace events, the JSON that Perfetto and chrome://tracing open: a bar for each span, a curve for each kind of
link."""

from __future__ import annotations

from typing import Any

import numpy as np

from weight_sync.simulate import Simulation

_PROCESSES = {"controller": 0, "trainer": 1, "rollout": 2, "links": 3}


def trace_events(simulation: Simulation, title: str) -> dict[str, Any]:
    """Times in microseconds since the sync began. Curves: share in use, mean of the resources of a kind that are used, and
    of the fullest one."""
    events: list[dict[str, Any]] = [
        {"name": "process_name", "ph": "M", "pid": number, "args": {"name": name}} for name, number in _PROCESSES.items()
    ]
    for span in simulation.spans:
        side, _, rank = span.rank.partition(" ")
        events.append(
            {
                "name": span.phase, "ph": "X", "pid": _PROCESSES[side], "tid": int(rank or 0), "ts": span.start * 1e6,
                "dur": span.seconds * 1e6, "args": {"rank": span.rank, "bytes": span.nbytes},
            }
        )  # fmt: skip
    kinds = np.asarray(simulation.network.kinds)
    used = np.zeros(len(kinds), np.bool_)
    for step in simulation.writing:
        used |= step.usage > 0
    for kind in dict.fromkeys(kinds[used].tolist()):
        mine = np.flatnonzero(used & (kinds == kind))
        for step in simulation.writing:
            share = step.usage[mine]
            args = {"mean": float(share.mean()), "fullest": float(share.max())}
            events.append({"name": kind, "ph": "C", "pid": _PROCESSES["links"], "ts": step.start * 1e6, "args": args})
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"title": title, "failed": simulation.failed}}
