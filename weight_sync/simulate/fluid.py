"""Flows over shared resources, solved event by event with max-min fair sharing.

A flow needs `coef` units of each of its resources for every byte; a resource gives `capacity` units a second. Between two
events all rates are constant: they rise together until a resource is full, its flows keep their rate, and the others rise on
(progressive filling). An event is the end of at least one flow. Plain numpy: 20,000 flows take a second, where a process
for each of a million writes (simpy and the like) would take minutes and say the same, as no message is ever queued long
enough to matter beyond the cost of issuing it, which is a resource too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_TIE = 1e-3
"""Resources that fill up within this share of each other are taken as full at the same time."""


@dataclass(frozen=True, slots=True)
class Flows:
    """amount [flows]: bytes. resource, coef [flows, k]: resource ids and units for each byte (coef 0: unused slot)."""

    amount: Floats
    resource: Ints
    coef: Floats

    def __len__(self) -> int:
        return len(self.amount)


@dataclass(frozen=True, slots=True)
class Step:
    """From `start` for `seconds`, resource r was used at share usage[r] of its capacity."""

    start: float
    seconds: float
    usage: Floats


@dataclass(frozen=True, slots=True)
class Solution:
    """begin, finish: of every flow, seconds from the start. steps: what every resource did meanwhile."""

    finish: Floats
    steps: tuple[Step, ...]

    @property
    def seconds(self) -> float:
        return float(self.finish.max(initial=0.0))


def summed(index: Ints, weights: Floats | Ints, length: int) -> Floats:
    """Sum of weights for each index below `length`."""
    return np.bincount(index, weights, length).astype(np.float64)


def loads(flows: Flows, capacity: Floats) -> Floats:
    """Seconds that each resource needs for its share of the flows, were it alone."""
    work = np.bincount(flows.resource.ravel(), (flows.coef * flows.amount[:, None]).ravel(), len(capacity))
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(work > 0, work / capacity, 0.0)


def fair_rates(flows: Flows, capacity: Floats, active: Ints) -> Floats:
    """Bytes/s of each active flow. A flow over a resource of capacity 0 gets 0."""
    rate = np.zeros(len(active))
    left = capacity.astype(np.float64).copy()
    resource, coef = flows.resource[active], flows.coef[active]
    live = np.arange(len(active))
    while len(live):
        res, need = resource[live], coef[live]
        load = np.bincount(res.ravel(), need.ravel(), len(left))
        with np.errstate(divide="ignore", invalid="ignore"):
            room = np.where(load > 0, left / load, np.inf)
        step = room.min()
        if not np.isfinite(step):
            rate[live] = np.inf  # needs nothing: done at once
            break
        step = max(step, 0.0)
        rate[live] += step
        left = np.maximum(left - step * load, 0.0)
        full = room <= step * (1 + _TIE)
        live = live[~(full[res] & (need > 0)).any(axis=1)]
    return rate


def solve(flows: Flows, capacity: Floats, slot: float = 0.0, watch: Callable[[Step], None] | None = None) -> Solution:
    """Run all flows, which start together, to their ends.

    slot: seconds below which two ends count as one event: rates are not shared out anew in between, so a result is late by
    at most about one slot. 0 is exact. Raises ValueError when a flow can never end.
    """
    remaining = flows.amount.astype(np.float64).copy()
    finish = np.zeros(len(flows))
    steps: list[Step] = []
    active = np.flatnonzero(remaining > 0)
    now = 0.0
    while len(active):
        rate = fair_rates(flows, capacity, active)
        if (rate <= 0).any():
            raise ValueError(f"{int((rate <= 0).sum())} flows have no way: a resource on it has no capacity")
        left = remaining[active] / rate
        seconds = min(max(float(left.min()), slot), float(left.max()))
        done = left <= seconds * (1 + 1e-12)
        moved = np.where(done, remaining[active], rate * seconds)
        finish[active[done]] = now + left[done]
        remaining[active] -= moved
        if seconds > 0:
            work = np.bincount(flows.resource[active].ravel(), (flows.coef[active] * moved[:, None]).ravel(), len(capacity))
            with np.errstate(divide="ignore", invalid="ignore"):
                usage = np.where(work > 0, work / (capacity * seconds), 0.0)
            steps.append(Step(now, seconds, usage))
            if watch is not None:
                watch(steps[-1])
        now += seconds
        active = active[~done]
    return Solution(finish, tuple(steps))
