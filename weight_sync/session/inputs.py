"""Plan inputs as plain data: the controller sends them to every trainer rank, and all must arrive at the same schedule."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import xxhash

from weight_sync.errors import ConfigError
from weight_sync.layout import resolve as resolved
from weight_sync.layout.family import (
    Convention,
    Model,
    apply,
    engine_convention,
    mcore_convention,
    parse_convention,
    parse_family,
)
from weight_sync.layout.parallel import Dims, EngineDims, TrainerDims
from weight_sync.layout.table import Layout
from weight_sync.layout.whole import whole
from weight_sync.plan.extend import add_engine, drop_engine
from weight_sync.plan.plan import Plan
from weight_sync.plan.planner import make_plan
from weight_sync.plan.proof import prove_exact_once
from weight_sync.plan.schedule import Budget, CostModel, Schedule, make_schedule
from weight_sync.plan.straddle import refuse
from weight_sync.plan.waves import schedule_in_waves
from weight_sync.quant.emission import Quantisation

EXCHANGE, REFUSE = "exchange", "refuse"
"""What to do where groups of quantised weights lie on several trainer ranks."""

_MADE: dict[str, Schedule] = {}
_LOCK = threading.Lock()
_KEPT = 8
_SMALL = 100_000
"""Transfers. Larger schedules take memory that a trainer rank needs, and are made once in a job anyway."""


@dataclass(frozen=True, slots=True)
class Declared:
    """A layout to resolve from YAML. family, convention: merged YAML (convention None: the family's mcore rules).

    config: the HF config. dims: constructor arguments of TrainerDims or EngineDims. symbols: see resolve(). held_as: the dtype
    of this side's parameters where it is not the model's, a declared cast of them all; see layout.family.Convention. quant:
    what the engines' checkpoint is quantised with, the same on both sides (Quantisation.to_json()); None: not at all.
    """

    family: Mapping[str, Any]
    config: Mapping[str, Any]
    dims: Mapping[str, Any]
    convention: Mapping[str, Any] | None = None
    symbols: Mapping[str, int] = field(default_factory=dict[str, int])
    held_as: str = ""
    quant: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Recorded:
    """A rollout layout to be read from the live engines' own loaders (weight_sync.session.recorded).

    family: merged YAML that says which HF tensors there are; None: those that the trainer's ranks publish. config, dims, quant:
    as of Declared. unserved: patterns of HF tensors that no engine takes. untouched: patterns of live parameters that no HF
    tensor fills.
    """

    config: Mapping[str, Any]
    dims: Mapping[str, Any]
    family: Mapping[str, Any] | None = None
    unserved: Sequence[str] = ()
    untouched: Sequence[str] = ()
    quant: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class PlanInputs:
    """Everything a plan depends on. source, target may be explicit layouts (Layout.to_json), where read from live ranks.

    avoid: trainer ranks that send only what no other rank holds. changes: engines that came ({"add": hosts of its workers}) and
    went ({"drop": its place}) since the plan of everything else was made, in order; see weight_sync.plan.extend. straddle: what
    to do where groups of quantised weights lie on several trainer ranks: exchange or refuse; see weight_sync.plan.straddle.
    loader: 0: bytes go into live tensors of the engines. Else: into staging memory of so many bytes beside them, as whole HF
    tensors, for the engines' own loaders.
    """

    source: Declared | Mapping[str, Any]
    target: Declared | Mapping[str, Any]
    source_hosts: Sequence[str]
    target_hosts: Sequence[str]
    dropped: Sequence[str] = ()
    costs: CostModel = field(default_factory=CostModel)
    budget: Budget = field(default_factory=Budget)
    avoid: Sequence[int] = ()
    changes: Sequence[Mapping[str, Any]] = ()
    straddle: str = EXCHANGE
    loader: int = 0

    def to_json(self) -> dict[str, Any]:
        def side(value: Declared | Mapping[str, Any]) -> dict[str, Any]:
            if isinstance(value, Declared):
                return {"declared": asdict(value)}
            return {"explicit": dict(value)}

        return {
            "source": side(self.source),
            "target": side(self.target),
            "source_hosts": list(self.source_hosts),
            "target_hosts": list(self.target_hosts),
            "dropped": list(self.dropped),
            "costs": asdict(self.costs),
            "budget": asdict(self.budget),
            "avoid": list(self.avoid),
            "changes": [dict(change) for change in self.changes],
            "straddle": self.straddle,
            "loader": self.loader,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> PlanInputs:
        def side(value: Mapping[str, Any]) -> Declared | Mapping[str, Any]:
            return Declared(**value["declared"]) if "declared" in value else value["explicit"]

        return cls(
            side(data["source"]),
            side(data["target"]),
            data["source_hosts"],
            data["target_hosts"],
            data["dropped"],
            CostModel(**data["costs"]),
            Budget(**data["budget"]),
            data["avoid"],
            data["changes"],
            data["straddle"],
            data["loader"],
        )

    def layouts(self) -> tuple[Layout, Layout]:
        """Both sides, resolved; the engines' as their weights lie, whoever puts bytes there."""
        return layout_of(self.source, "trainer"), layout_of(self.target, "rollout")

    def schedule(self, layouts: tuple[Layout, Layout] | None = None) -> Schedule:
        """Resolve both sides (layouts: already resolved), plan, prove, schedule. Equal inputs give equal digests everywhere.

        A small schedule that was made for equal inputs a moment ago in this process is given again: it is a value.
        """
        key = xxhash.xxh3_128_hexdigest(json.dumps(self.to_json()).encode())
        with _LOCK:
            known = _MADE.get(key)
        if known is not None:
            return known
        source, target = layouts or self.layouts()
        target = whole(target) if self.loader else target
        plan = make_plan(source, target, self.source_hosts, self.target_hosts, self.avoid)
        prove_exact_once(plan, self.dropped, source=source, target=target)
        for change in self.changes:
            plan = self._changed(plan, change, source)
        schedule = self._scheduled(plan)
        if self.straddle == REFUSE:
            refuse(plan, schedule.straddles)
        if len(plan) <= _SMALL:
            with _LOCK:
                _MADE[key] = schedule
                while len(_MADE) > _KEPT:
                    _MADE.pop(next(iter(_MADE)))
        return schedule

    def changed(self, change: Mapping[str, Any]) -> PlanInputs:
        """The inputs of the plan that extend() makes."""
        return replace(self, changes=[*self.changes, change])

    def extend(self, schedule: Schedule, change: Mapping[str, Any]) -> Schedule:
        """`schedule`, made of these inputs, changed by one engine: changed(change).schedule(), without planning anew."""
        plan = self._changed(schedule.plan, change, layout_of(self.source, "trainer"))
        return self._scheduled(plan)

    def _scheduled(self, plan: Plan) -> Schedule:
        if self.loader:
            return schedule_in_waves(plan, self.costs, self.budget, self.loader)
        return make_schedule(plan, self.costs, self.budget)

    def _changed(self, plan: Plan, change: Mapping[str, Any], source: Layout) -> Plan:
        if "add" in change:
            return add_engine(plan, source, change["add"], dropped=self.dropped, avoid=self.avoid)
        return drop_engine(plan, int(change["drop"]), int(change["width"]))


def tensors_of(side: Declared | Recorded) -> Model | None:
    """The model whose HF tensors a side moves, or None where no family declares them."""
    return None if side.family is None else quantised(apply(parse_family(side.family), side.config), side.quant)


def quantised(model: Model, quant: Mapping[str, Any] | None) -> Model:
    """The model with the HF tensors of the engines' checkpoint."""
    return model if quant is None else replace(model, catalog=Quantisation.from_json(quant).catalog(model.catalog))


def model_of(declared: Declared) -> tuple[Model, Convention]:
    family = parse_family(declared.family)
    convention = (
        mcore_convention(family) if declared.convention is None else engine_convention(parse_convention(declared.convention))
    )
    return quantised(apply(family, declared.config), declared.quant), replace(convention, held_as=declared.held_as)


def dims_of(declared: Declared | Recorded, side: str) -> Dims:
    values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in declared.dims.items()}
    try:
        return TrainerDims(**values) if side == "trainer" else EngineDims(**values)
    except TypeError as error:
        raise ConfigError(f"{side} parallel sizes {values}: {error}") from None


def layout_of(value: Declared | Mapping[str, Any], side: str) -> Layout:
    if not isinstance(value, Declared):
        return Layout.from_json(value)
    model, convention = model_of(value)
    return resolved.resolve(model, convention, dims_of(value, side), side, **value.symbols)


def computed_names(declared: Declared, side: str) -> dict[str, str]:
    """HF name -> how a side declares its values to be computed, for those that it does not hold byte for byte."""
    model, convention = model_of(declared)
    return resolved.computed_names(model, convention, dims_of(declared, side), side, **declared.symbols)


def dropped_names(declared: Declared, side: str) -> tuple[str, ...]:
    """The HF names that a side declares it does not hold."""
    model, convention = model_of(declared)
    return resolved.dropped_names(model, convention, dims_of(declared, side), side, **declared.symbols)
