"""Connecting two live sides: everything that can be wrong is found here, before an engine is paused.

describe both sides -> same model, same parallel sizes -> layouts -> plan and proof, on every rank -> second witness -> bind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from weight_sync.errors import BindError, PlanError, WeightSyncError, listed
from weight_sync.ids import Deadline
from weight_sync.layout.parallel import EngineDims, world_error
from weight_sync.layout.table import Layout, Param, layout_from_shards
from weight_sync.layout.witness import agree
from weight_sync.plan.plan import Plan
from weight_sync.plan.schedule import Budget, CostModel, Schedule
from weight_sync.session.contracts import EngineDescription, PauseMode, RolloutEngine, TrainerGroup
from weight_sync.session.inputs import Declared, PlanInputs, dims_of, dropped_names, model_of
from weight_sync.session.tables import target_table

K = TypeVar("K")
V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class SyncSpec:
    """What to sync and how. trainer: declared, or None to read the layout from live shards (FSDP).

    witness: compare the declared rollout layout with a recording of the engine's own loader.
    """

    trainer: Declared | None
    rollout: Declared
    witness: bool = True
    costs: CostModel = field(default_factory=CostModel)
    budget: Budget = field(default_factory=Budget)


@dataclass(frozen=True, slots=True, eq=False)
class Connection:
    """A schedule bound to live processes. epochs: of each engine's workers, by engine, then local rank."""

    schedule: Schedule
    layouts: tuple[Layout, Layout]
    epochs: tuple[dict[int, int], ...]

    @property
    def plan(self) -> Plan:
        return self.schedule.plan


def together(calls: Mapping[K, Callable[[], V]]) -> dict[K, V]:
    """Run all calls at once, wait for all, and return their results; raise the first error with the others as notes."""
    with ThreadPoolExecutor(max_workers=max(1, len(calls))) as pool:
        futures = {key: pool.submit(call) for key, call in calls.items()}
    failed = {key: error for key, future in futures.items() if (error := future.exception()) is not None}
    if failed:
        (_, first), *others = failed.items()
        for key, error in others:
            add_error(first, f"also {key}", error)
        raise first
    return {key: future.result() for key, future in futures.items()}


def on_each(engines: Sequence[RolloutEngine], call: Callable[[int, RolloutEngine], V]) -> dict[int, V]:
    """call(index, engine) for all engines at once; results by index. Errors as together() has them."""
    calls = {f"engine {engine.name}": partial(call, i, engine) for i, engine in enumerate(engines)}
    if len(calls) != len(engines):
        raise BindError(f"engines need names of their own, got {listed(engine.name for engine in engines)}")
    return dict(enumerate(together(calls).values()))


def add_error(first: BaseException, what: str, other: BaseException) -> None:
    """Note `other`, with what was noted on it, on the error that will be raised."""
    first.add_note(f"{what}: {type(other).__name__}: {other}")
    for note in list(getattr(other, "__notes__", [])) if other is not first else []:
        first.add_note(f"{what}: {note}")


def connect(
    trainers: TrainerGroup,
    engines: Sequence[RolloutEngine],
    spec: SyncSpec,
    deadline: Deadline,
    *,
    pause: PauseMode | None = None,
) -> Connection:
    """Make, prove and bind the plan. Raises one error for anything that does not fit; nothing is paused or written.

    pause: the mode that syncs will use; refused here if an engine does not offer it.
    """
    ranks = range(trainers.world)
    described = trainers.call("describe", {rank: {} for rank in ranks}, deadline)
    servers = on_each(engines, lambda _, engine: engine.describe(deadline))
    for server in servers.values():
        if pause is not None and pause not in server.pause_modes:
            raise BindError(f"engine {server.name} cannot pause with mode {pause}; it offers {listed(server.pause_modes)}")
    _same_model(spec, servers, engines)
    dims = _same_sizes(spec, servers, engines)
    source: Declared | Mapping[str, Any]
    if spec.trainer is not None:
        source = spec.trainer
        _trainer_sizes(spec.trainer, described)
    else:
        source = live_layout(spec.rollout, described).to_json()
    inputs = PlanInputs(
        source=source,
        target=spec.rollout,
        source_hosts=[described[rank]["host"] for rank in ranks],
        target_hosts=[server.ranks[r].host for server in servers.values() for r in range(dims.engine_world)],
        dropped=sorted(dropped_names(spec.rollout, "rollout")),
        costs=spec.costs,
        budget=spec.budget,
    )
    layouts = inputs.layouts()
    schedule = inputs.schedule(layouts)
    payload = inputs.to_json()
    answers = trainers.call("plan", dict.fromkeys(ranks, payload), deadline)
    if wrong := {rank: a["digest"] for rank, a in answers.items() if a["digest"] != schedule.digest}:
        raise PlanError(f"trainer ranks computed another plan than the controller's {schedule.digest}: {wrong}")
    if spec.witness:
        _witness(engines, layouts[1], dims, deadline)
    bindings = on_each(engines, lambda i, engine: engine.bind(_tables(schedule, i, dims), deadline))
    for i, by_rank in bindings.items():
        if sorted(by_rank) != list(range(dims.engine_world)):
            raise BindError(f"engine {engines[i].name}: workers {sorted(by_rank)} of {dims.engine_world} answered bind")
    targets = {i * dims.engine_world + local: b for i, by_rank in bindings.items() for local, b in by_rank.items()}
    bind = {"plan": schedule.digest, "targets": targets, "seconds": deadline.remaining()}
    trainers.call("bind", dict.fromkeys(ranks, bind), deadline)
    epochs = tuple({local: b["epoch"] for local, b in by_rank.items()} for _, by_rank in sorted(bindings.items()))
    return Connection(schedule, layouts, epochs)


def _tables(schedule: Schedule, engine: int, dims: EngineDims) -> dict[int, dict[str, Any]]:
    width = dims.engine_world
    return {local: target_table(schedule, engine * width + local) for local in range(width)}


def _same_model(spec: SyncSpec, servers: Mapping[int, EngineDescription], engines: Sequence[RolloutEngine]) -> None:
    """Every engine must serve the declared model: same architecture, same sizes."""
    want, _ = model_of(spec.rollout)
    for i, server in servers.items():
        try:
            have, _ = model_of(replace(spec.rollout, config=server.model))
        except WeightSyncError as error:
            raise BindError(f"engine {engines[i].name} serves another model: {error}") from None
        wrong = [
            f"{k} {want.symbols[k]} here, {have.symbols[k]} there" for k in want.symbols if want.symbols[k] != have.symbols[k]
        ]
        if wrong:
            raise BindError(f"engine {engines[i].name} serves a model of other sizes: {listed(wrong)}")


def _same_sizes(spec: SyncSpec, servers: Mapping[int, EngineDescription], engines: Sequence[RolloutEngine]) -> EngineDims:
    dims = dims_of(spec.rollout, "rollout")
    assert isinstance(dims, EngineDims)
    if len(engines) != dims.engines:
        raise BindError(f"rollout.engines={dims.engines}, but {len(engines)} engines are connected")
    for i, server in servers.items():
        axes = [axis for axis in dims.sizes if axis in server.sizes and axis != "engine"]
        wrong = [f"{a}={dims.sizes[a]} declared, {server.sizes[a]} live" for a in axes if dims.sizes[a] != server.sizes[a]]
        if wrong:
            raise BindError(f"engine {engines[i].name} runs with other parallel sizes: {listed(wrong)}")
        if len(server.ranks) != dims.engine_world:
            raise world_error(f"engine {engines[i].name}", {"tp": dims.tp, "pp": dims.pp}, len(server.ranks))
        for rank in server.ranks:
            want = dims.coords(rank.rank)
            off = [
                f"{a} {want[a]} declared, {c} live"
                for a, c in rank.coords.items()
                if a in want and a != "engine" and want[a] != c
            ]
            if off:
                raise BindError(f"engine {engines[i].name}, worker {rank.rank} sits elsewhere on the mesh: {listed(off)}")
    return dims


def _trainer_sizes(declared: Declared, described: Mapping[int, Mapping[str, Any]]) -> None:
    dims = dims_of(declared, "trainer")
    if dims.world != len(described):
        raise world_error("trainer", {k: v for k, v in dims.sizes.items() if k in ("tp", "cp", "dp", "pp")}, len(described))
    for rank, description in described.items():
        want = dims.coords(rank)
        off = [f"{a} {want[a]} declared, {c} live" for a, c in description["coords"].items() if a in want and want[a] != c]
        if off:
            raise BindError(f"trainer rank {rank} sits elsewhere on the mesh than declared: {listed(off)}")


def live_layout(declared: Declared, described: Mapping[int, Mapping[str, Any]]) -> Layout:
    """The trainer's layout as its ranks publish it. declared: gives the model's HF tensors."""
    model, _ = model_of(declared)
    params: list[list[Param]] = []
    shards: list[list[Mapping[str, Any]]] = []
    for rank in sorted(described):
        description = described[rank]
        if description.get("shards") is None:
            raise BindError(f"trainer rank {rank} publishes no shards, and no trainer layout is declared")
        params.append([Param(rank, p["name"], tuple(p["shape"]), p["dtype"]) for p in description["params"]])
        shards.append(list(description["shards"]))
    return layout_from_shards("trainer", model.catalog, params, shards)


def _witness(engines: Sequence[RolloutEngine], declared: Layout, dims: EngineDims, deadline: Deadline) -> None:
    tensors = {name: (list(pattern.shape), pattern.dtype) for pattern in declared.catalog.patterns for name in pattern.names()}
    recordings = on_each(engines, lambda _, engine: engine.record(tensors, deadline))
    for i, by_rank in recordings.items():
        if sorted(by_rank) != list(range(dims.engine_world)):
            raise BindError(f"engine {engines[i].name}: workers {sorted(by_rank)} of {dims.engine_world} were recorded")
        for local, recording in sorted(by_rank.items()):
            agree(declared, i * dims.engine_world + local, recording["shards"], recording["unexplained"])
