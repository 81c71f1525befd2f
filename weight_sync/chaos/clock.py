"""Virtual time, and calls that run one after another in a seeded order: a run is a function of its seed, and costs no waiting.

Inside virtual(clock, order) the modules of this library read `clock` instead of `time`, the calls that a controller makes side
by side are made one by one, in an order drawn from `order`, and what is planned from equal inputs is planned once for all runs
(planning is a pure function; what a rank was asked to plan still decides what it gets). Everything else of them is as it is.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from weight_sync.ids import Deadline
from weight_sync.session import calls, inputs


class Clock:
    """Stands in for the module `time`. Seconds pass only when something sleeps, waits or calls tick().

    offset: of the wall clock, which may jump either way; monotonic() never does. jumped: seconds that jump() has passed.
    """

    def __init__(self) -> None:
        self._now = 1000.0
        self.jumped = 0.0
        self.offset = 1.7e9

    def monotonic(self) -> float:
        self._now += 1e-6  # a loop that polls gets on
        return self._now

    perf_counter = monotonic

    def time(self) -> float:
        return self._now + self.offset

    def sleep(self, seconds: float) -> None:
        self._now += max(0.0, seconds)

    tick = sleep

    def jump(self, seconds: float) -> None:
        """Everything stood still for so long: a suspended host."""
        self.jumped += seconds
        self._now += seconds


K = TypeVar("K")
V = TypeVar("V")


def one_by_one(order: random.Random) -> Callable[..., tuple[dict[Any, Any], dict[Any, BaseException]]]:
    """A weight_sync.session.calls.settled that makes the calls one after another, in a drawn order."""

    def settled(calls: Mapping[K, Callable[[], V]], deadline: Deadline) -> tuple[dict[K, V], dict[K, BaseException]]:
        results: dict[K, V] = {}
        failed: dict[K, BaseException] = {}
        for key in order.sample(list(calls), len(calls)):
            try:
                results[key] = calls[key]()
            except BaseException as error:  # noqa: BLE001 - as settled() does: whoever asked decides
                failed[key] = error
        return {k: results[k] for k in calls if k in results}, {k: failed[k] for k in calls if k in failed}

    return settled


def remembered(function: Callable[..., Any]) -> Callable[..., Any]:
    """A pure function that is computed once for equal first arguments."""
    known: dict[str, Any] = {}

    def call(first: Any, *others: Any, **named: Any) -> Any:
        key = f"{first!r} {[o for o in others if isinstance(o, str)]}"
        if key not in known:
            known[key] = function(first, *others, **named)
        return known[key]

    return call


_REMEMBERED: dict[Any, Callable[..., Any]] = {}
_PLANNED = {
    name: (getattr(inputs, name), remembered(getattr(inputs, name)))
    for name in ("model_of", "tensors_of", "dropped_names", "computed_names")
    if hasattr(inputs, name)
}


@contextmanager
def virtual(clock: Clock, order: random.Random) -> Iterator[None]:
    """Not for two runs at once in one process."""
    doubles: dict[str, tuple[Any, Any]] = {"time": (time, clock), "settled": (calls.settled, one_by_one(order)), **_PLANNED}
    changed: list[tuple[Any, str, Any]] = []
    for name, module in list(sys.modules.items()):
        if name.startswith("weight_sync.") and not name.startswith("weight_sync.chaos"):
            for attribute, (real, double) in doubles.items():
                if vars(module).get(attribute) is real:
                    changed.append((module, attribute, real))
                    setattr(module, attribute, double)
    for method in ("schedule", "layouts", "to_json"):
        real = getattr(inputs.PlanInputs, method)
        changed.append((inputs.PlanInputs, method, real))
        setattr(inputs.PlanInputs, method, _REMEMBERED.setdefault(real, remembered(real)))
    try:
        yield
    finally:
        for module, attribute, real in changed:
            setattr(module, attribute, real)
