"""Plan inputs as plain data: the controller sends them to every trainer rank, and all must arrive at the same schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

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
from weight_sync.plan.planner import make_plan
from weight_sync.plan.proof import prove_exact_once
from weight_sync.plan.schedule import Budget, CostModel, Schedule, make_schedule


@dataclass(frozen=True, slots=True)
class Declared:
    """A layout to resolve from YAML. family, convention: merged YAML (convention None: the family's mcore rules).

    config: the HF config. dims: constructor arguments of TrainerDims or EngineDims. symbols: see resolve().
    """

    family: Mapping[str, Any]
    config: Mapping[str, Any]
    dims: Mapping[str, Any]
    convention: Mapping[str, Any] | None = None
    symbols: Mapping[str, int] = field(default_factory=dict[str, int])


@dataclass(frozen=True, slots=True)
class PlanInputs:
    """Everything a plan depends on. source may be an explicit layout (Layout.to_json) where it is read from live ranks."""

    source: Declared | Mapping[str, Any]
    target: Declared | Mapping[str, Any]
    source_hosts: Sequence[str]
    target_hosts: Sequence[str]
    dropped: Sequence[str] = ()
    costs: CostModel = field(default_factory=CostModel)
    budget: Budget = field(default_factory=Budget)

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
        )

    def layouts(self) -> tuple[Layout, Layout]:
        """Both sides, resolved."""
        return layout_of(self.source, "trainer"), layout_of(self.target, "rollout")

    def schedule(self, layouts: tuple[Layout, Layout] | None = None) -> Schedule:
        """Resolve both sides (layouts: already resolved), plan, prove, schedule. Equal inputs give equal digests everywhere."""
        source, target = layouts or self.layouts()
        plan = make_plan(source, target, self.source_hosts, self.target_hosts)
        prove_exact_once(plan, self.dropped, source=source, target=target)
        return make_schedule(plan, self.costs, self.budget)


def model_of(declared: Declared) -> tuple[Model, Convention]:
    family = parse_family(declared.family)
    convention = (
        mcore_convention(family) if declared.convention is None else engine_convention(parse_convention(declared.convention))
    )
    return apply(family, declared.config), convention


def dims_of(declared: Declared, side: str) -> Dims:
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


def dropped_names(declared: Declared, side: str) -> tuple[str, ...]:
    """The HF names that a side declares it does not hold."""
    model, convention = model_of(declared)
    return resolved.dropped_names(model, convention, dims_of(declared, side), side, **declared.symbols)
