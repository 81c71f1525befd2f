"""One trainer rank's part of a plan, without planning the whole.

Who sends a box depends on what its holders have to send already, so ranks that hold copies of the same tensors must be planned
together: with Megatron that is a pipeline stage, or several that share a tied embedding. Other stages have no say in it, so a
part is exactly the rows of the whole plan that start on the rank, found in about 1/pp of the time.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from weight_sync.errors import ConfigError
from weight_sync.layout.catalog import Catalog
from weight_sync.layout.parallel import Dims
from weight_sync.layout.resolve import resolve_part
from weight_sync.layout.table import Ints
from weight_sync.plan.plan import COLUMNS, Plan
from weight_sync.plan.planner import make_plan
from weight_sync.session.inputs import Declared, PlanInputs, dims_of, model_of


def rank_part(inputs: PlanInputs, rank: int) -> Plan:
    """The transfers of the whole plan that start on a trainer rank, in its order.

    The part has parameter tables of its own: those of the ranks planned with it, and the rollout parameters they write to.
    Raises ConfigError when a side is not declared, and what make_plan raises. The exact-once proof needs the whole plan.
    """
    source, target = inputs.source, inputs.target
    if not isinstance(source, Declared) or not isinstance(target, Declared):
        raise ConfigError("one rank's part is planned from declared layouts; here a side is read from live ranks")
    model, convention = model_of(source)
    dims = dims_of(source, "trainer")
    unit = _units(model.catalog)
    stage = {r: dims.coords(r)["pp"] for r in range(dims.world)}
    firsts = [next(r for r in stage if stage[r] == pp) for pp in range(dims.sizes["pp"])]
    heads = resolve_part(model, convention, dims, "trainer", source.symbols, ranks=firsts)
    holds = {stage[r]: set(unit[heads.tensor[heads.rank == r]].tolist()) for r in firsts}
    together = _together(holds, stage[_inside(rank, dims)])
    units = set().union(*(holds[pp] for pp in together))
    wanted: NDArray[np.bool_] = np.isin(unit, np.fromiter(units, np.int64, len(units)))
    ranks = [r for r in stage if stage[r] in together]
    here = resolve_part(model, convention, dims, "trainer", source.symbols, ranks=ranks)
    there_model, there_convention = model_of(target)
    there_dims = dims_of(target, "rollout")
    there = resolve_part(there_model, there_convention, there_dims, "rollout", target.symbols, wanted=wanted)
    plan = make_plan(here, there, inputs.source_hosts, inputs.target_hosts)
    rows = plan.rows_from(rank)
    return replace(plan, **{name: getattr(plan, name)[rows] for name in COLUMNS})


def _inside(rank: int, dims: Dims) -> int:
    dims.coords(rank)  # raises ParallelError outside the world
    return rank


def _units(catalog: Catalog) -> Ints:
    """For every tensor, a number that experts of one layer share: ranks of a stage hold all of them or none."""
    parts: list[Ints] = []
    first = 0
    for pattern in catalog.patterns:
        each = max(pattern.experts, 1)
        layers = pattern.count // each
        parts.append(np.repeat(np.arange(first, first + layers, dtype=np.int64), each))
        first += layers
    return np.concatenate(parts)[catalog.base]  # what is made of a weight goes with it


def _together(holds: dict[int, set[int]], stage: int) -> set[int]:
    """The stages that share a tensor with `stage`, or with one that does."""
    found, left = {stage}, [stage]
    while left:
        mine = holds[left.pop()]
        for other, theirs in holds.items():
            if other not in found and mine & theirs:
                found.add(other)
                left.append(other)
    return found
