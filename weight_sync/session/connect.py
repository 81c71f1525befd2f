"""Connecting two live sides: everything that can be wrong is found here, before an engine is paused.

describe both sides -> same model, same parallel sizes -> layouts -> plan and proof, on every rank -> the trainer's
witness, if it is asked for -> the engines' witness -> bind.
Where the rollout layout is not declared it is recorded before the plan is made, and there is no second witness.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from weight_sync.delta.spec import DeltaSpec
from weight_sync.errors import BindError, PlanError, WeightSyncError, listed
from weight_sync.ids import Deadline
from weight_sync.layout.catalog import Catalog
from weight_sync.layout.family import model_dtype
from weight_sync.layout.parallel import EngineDims, world_error
from weight_sync.layout.table import Layout, Param, layout_from_shards
from weight_sync.layout.witness import agree, agree_on_tensors
from weight_sync.plan.plan import Plan
from weight_sync.plan.schedule import Budget, CostModel, Schedule
from weight_sync.quant.emission import Quantisation
from weight_sync.session.calls import on_each
from weight_sync.session.contracts import EngineDescription, PauseMode, RolloutEngine, TrainerGroup
from weight_sync.session.digests import kind_for
from weight_sync.session.exported import check_export, refuse_without_export
from weight_sync.session.inputs import (
    EXCHANGE,
    Declared,
    PlanInputs,
    Recorded,
    computed_names,
    dims_of,
    dropped_names,
    tensors_of,
)
from weight_sync.session.landing import Landing, decide
from weight_sync.session.recorded import ONE_WITNESS, published_catalog, recorded_layout, unserved_names
from weight_sync.session.tables import target_table
from weight_sync.session.takeover import Survey, survey


@dataclass(frozen=True, slots=True)
class SyncSpec:
    """What to sync and how. trainer: declared, or None to read the layout from live shards (FSDP).

    casts: dtypes that live trainer parameters may have where the HF tensor has another; their values are cast. A declared
    trainer says it itself (Declared.held_as). witness: compare a declared rollout layout with a recording of the engine's own
    loader. trainer_witness: compare the trainer's layout with its own export (weight_sync.session.exported). straddle: see
    PlanInputs. finite: NaN and infinities in weights that are quantised are an error. report: say what quantising cost. delta:
    how syncs send only what changed; None: never. landing: into live tensors, or by engines' loaders.
    """

    trainer: Declared | None
    rollout: Declared | Recorded
    witness: bool = True
    costs: CostModel = field(default_factory=CostModel)
    budget: Budget = field(default_factory=Budget)
    casts: Sequence[str] = ()
    straddle: str = EXCHANGE
    finite: bool = True
    report: bool = True
    delta: DeltaSpec | None = None
    landing: Landing = field(default_factory=Landing)
    trainer_witness: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Connection:
    """A schedule bound to live processes. bindings: what each engine's workers answered to bind, by engine, then local rank.

    layouts: those that `inputs` describe, before its changes. dims: of one engine and how many there were then. labels, rounds:
    for each engine, the digest and staging rounds of the schedule that it was bound with. An engine that joined later did not
    change what the others were told, so nobody tells them again.
    """

    schedule: Schedule
    layouts: tuple[Layout, Layout]
    inputs: PlanInputs
    dims: EngineDims
    bindings: tuple[dict[int, dict[str, Any]], ...]
    labels: tuple[str, ...]
    rounds: tuple[int, ...]
    digest: str
    """Which digest both sides compute of every transfer (weight_sync.session.digests)."""
    finite: bool = True
    """NaN and infinities in weights that are quantised are an error."""
    report: bool = True
    """Ranks that quantise say what it cost."""
    delta: DeltaSpec | None = None
    """Ranks and workers keep what deltas need."""
    by_loader: str = ""
    """Why the engines' own loaders place what is received; "" where it is written into live tensors."""
    witnessed: str = ""
    """What the trainer's own export said when this was made; "" where it was not asked."""

    @property
    def plan(self) -> Plan:
        return self.schedule.plan

    @property
    def epochs(self) -> tuple[dict[int, int], ...]:
        """Of each engine's workers, by engine, then local rank."""
        return tuple({local: b["epoch"] for local, b in by_rank.items()} for by_rank in self.bindings)


def connect(
    trainers: TrainerGroup,
    engines: Sequence[RolloutEngine],
    spec: SyncSpec,
    deadline: Deadline,
    *,
    pause: PauseMode | None = None,
    controller: str = "",
    avoid: Sequence[int] = (),
    found: Survey | None = None,
) -> Connection:
    """Make, prove and bind the plan. Raises one error for anything that does not fit; nothing is paused or written.

    pause: the mode that syncs will use; refused here if an engine does not offer it. controller: its name, see gate.py. avoid:
    trainer ranks that send only what no other rank holds. found: both sides' descriptions, if they were asked a moment ago.
    """
    ranks = range(trainers.world)
    found = found or survey(trainers, engines, deadline)
    described, servers = found.trainers, found.engines
    if spec.trainer_witness:
        refuse_without_export(described)
    dims = check_engines(spec, servers, engines, pause)
    landed = decide(spec.landing, servers, declared=isinstance(spec.rollout, Declared), delta=spec.delta is not None)
    model = tensors_of(spec.rollout)
    served = model_dtype(spec.rollout.config)
    if model is None:
        catalog = published_catalog(described, dict.fromkeys(spec.casts, served))
        catalog = catalog if spec.rollout.quant is None else Quantisation.from_json(spec.rollout.quant).catalog(catalog)
    else:
        catalog = model.catalog
    source: Declared | Mapping[str, Any]
    if spec.trainer is not None:
        source = spec.trainer
        _trainer_sizes(spec.trainer, described)
    else:
        source = live_layout(catalog, described, spec.casts).to_json()
    target, dropped = _target(spec.rollout, catalog, engines, servers, deadline)
    inputs = PlanInputs(
        source=source,
        target=target,
        source_hosts=[described[rank]["host"] for rank in ranks],
        target_hosts=[server.ranks[r].host for server in servers.values() for r in range(dims.engine_world)],
        dropped=sorted(dropped),
        costs=spec.costs,
        budget=spec.budget,
        avoid=sorted(avoid),
        straddle=spec.straddle,
        loader=landed.loader,
    )
    layouts = inputs.layouts()
    schedule = inputs.schedule(layouts)
    payload = inputs.to_json() | {"controller": controller}
    answers = trainers.call("plan", dict.fromkeys(ranks, payload), deadline)
    if wrong := {rank: a["digest"] for rank, a in answers.items() if a["digest"] != schedule.digest}:
        raise PlanError(f"trainer ranks computed another plan than the controller's {schedule.digest}: {wrong}")
    witnessed = ""
    if spec.trainer_witness:
        witnessed = check_export(trainers, described, layouts[0], schedule.digest, controller, deadline)
    if isinstance(spec.rollout, Declared):
        check_recordings(spec, layouts[1], engines, dims, deadline, by_loader=landed.loader > 0)
    devices = [described[rank]["device"] for rank in ranks] + [r.device for server in servers.values() for r in server.ranks]
    digest = kind_for(devices)
    bindings = bind_engines(dict(enumerate(engines)), schedule, dims, digest, controller, deadline, spec.delta)
    everybody = len(engines)
    connection = Connection(
        schedule,
        layouts,
        inputs,
        dims,
        tuple(bindings[i] for i in range(everybody)),
        (schedule.digest,) * everybody,
        (schedule.rounds,) * everybody,
        digest,
        spec.finite,
        spec.report,
        spec.delta,
        landed.why,
        witnessed,
    )
    bind_trainers(trainers, connection, controller, deadline)
    return connection


def bind_engines(
    engines: Mapping[int, RolloutEngine],
    schedule: Schedule,
    dims: EngineDims,
    digest: str,
    controller: str,
    deadline: Deadline,
    delta: DeltaSpec | None = None,
) -> dict[int, dict[int, dict[str, Any]]]:
    """Bind engines, given by their place in the plan; digest, delta: as in Connection.

    Returns what their workers answered, by place, then local rank.
    """
    width = dims.engine_world
    places = list(engines)

    def tables(place: int) -> dict[int, dict[str, Any]]:
        ranks = range(place * width, (place + 1) * width)
        common = {"controller": controller, "digest": digest}
        made = {local: target_table(schedule, rank) | common for local, rank in enumerate(ranks)}
        if delta is not None:  # what changed arrives where pieces to be unpacked do
            for table in made.values():
                table["stage_bytes"] = max(table["stage_bytes"], delta.staging)
                table["deltas"] = True
        return made

    answers = on_each([engines[i] for i in places], lambda i, engine: engine.bind(tables(places[i]), deadline), deadline)
    for i, by_rank in answers.items():
        if sorted(by_rank) != list(range(width)):
            raise BindError(f"engine {engines[places[i]].name}: workers {sorted(by_rank)} of {width} answered bind")
    return {places[i]: by_rank for i, by_rank in answers.items()}


def bind_trainers(trainers: TrainerGroup, connection: Connection, controller: str, deadline: Deadline) -> None:
    """Tell every trainer rank where the engines' workers are; each proves that its peers answer."""
    width = connection.dims.engine_world
    targets = {i * width + local: b for i, by_rank in enumerate(connection.bindings) for local, b in by_rank.items()}
    bind = {
        "plan": connection.schedule.digest,
        "targets": targets,
        "digest": connection.digest,
        "controller": controller,
        "report": connection.report,
        "delta": None if connection.delta is None else connection.delta.to_json(),
        "seconds": deadline.check("bind"),
    }
    trainers.call("bind", dict.fromkeys(range(trainers.world), bind), deadline)


def check_engines(
    spec: SyncSpec, servers: Mapping[int, EngineDescription], engines: Sequence[RolloutEngine], pause: PauseMode | None
) -> EngineDims:
    """Raise BindError unless the engines are those of the spec, as many and as large, and can be paused by that mode."""
    for server in servers.values():
        if server.refusals:
            raise BindError(f"engine {server.name} cannot be synced as it runs: {'; '.join(server.refusals)}")
        if pause is not None and pause not in server.pause_modes:
            raise BindError(f"engine {server.name} cannot pause with mode {pause}; it offers {listed(server.pause_modes)}")
    _same_model(spec, servers, engines)
    return _same_sizes(spec, servers, engines)


def check_recordings(
    spec: SyncSpec,
    rollout: Layout,
    engines: Sequence[RolloutEngine],
    dims: EngineDims,
    deadline: Deadline,
    *,
    by_loader: bool = False,
) -> None:
    """The second witness: what the loaders of these engines do, against the first engines' part of the layout.

    A layout that is not declared was recorded from the engines there were; one that joins has to agree with it. by_loader:
    these loaders take whole HF tensors. Then there is a witness whatever the spec says, of which tensors each one reads.
    """
    if isinstance(spec.rollout, Declared):
        if spec.witness or by_loader:
            _witness(engines, rollout, computed_names(spec.rollout, "rollout"), dims, deadline, by_loader=by_loader)
    else:
        _witness(engines, rollout, {}, dims, deadline)


def _same_model(spec: SyncSpec, servers: Mapping[int, EngineDescription], engines: Sequence[RolloutEngine]) -> None:
    """Every engine must serve the declared model: same architecture, same sizes (which a recording proves by itself)."""
    want = tensors_of(spec.rollout)
    for i, server in servers.items():
        if want is None:
            ours, theirs = (list(config.get("architectures") or []) for config in (spec.rollout.config, server.model))
            if ours != theirs:
                raise BindError(f"engine {engines[i].name} serves another model: architectures={theirs}, not {ours}")
            continue
        try:
            have = tensors_of(replace(spec.rollout, config=server.model))
            assert have is not None
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


def live_layout(catalog: Catalog, described: Mapping[int, Mapping[str, Any]], casts: Sequence[str] = ()) -> Layout:
    """The trainer's layout as its ranks publish it. catalog: the model's HF tensors. casts: see SyncSpec."""
    params: list[list[Param]] = []
    shards: list[list[Mapping[str, Any]]] = []
    for rank in sorted(described):
        description = described[rank]
        if description.get("shards") is None:
            raise BindError(f"trainer rank {rank} publishes no shards, and no trainer layout is declared")
        params.append(_live_params(catalog, rank, description, casts))
        shards.append(list(description["shards"]))
    return layout_from_shards("trainer", catalog, params, shards)


def _live_params(catalog: Catalog, rank: int, description: Mapping[str, Any], casts: Sequence[str]) -> list[Param]:
    """One rank's parameters; those of a dtype in `casts` are cast from the dtype that their HF tensors have instead."""
    stored: dict[str, set[str]] = {}
    for shard in description["shards"]:
        if (tensor := catalog.ids.get(shard["tensor"])) is not None:
            stored.setdefault(shard["param"], set()).add(catalog.pattern_of(tensor).dtype)
    result: list[Param] = []
    for p in description["params"]:
        others = sorted(stored.get(p["name"], set[str]()) - {p["dtype"]})
        cast_from = others[0] if p["dtype"] in casts and len(others) == 1 else ""
        result.append(Param(rank, p["name"], tuple(p["shape"]), p["dtype"], cast_from=cast_from))
    return result


def _target(
    rollout: Declared | Recorded,
    catalog: Catalog,
    engines: Sequence[RolloutEngine],
    servers: Mapping[int, EngineDescription],
    deadline: Deadline,
) -> tuple[Declared | Mapping[str, Any], Sequence[str]]:
    """(the rollout's layout as PlanInputs takes it, the HF names it does not hold)."""
    if isinstance(rollout, Declared):
        return rollout, dropped_names(rollout, "rollout")
    dims = dims_of(rollout, "rollout")
    assert isinstance(dims, EngineDims)
    recordings = _recordings(engines, catalog, dims, deadline)
    numbers = range(len(engines))
    layout = recorded_layout(catalog, [servers[i] for i in numbers], [recordings[i] for i in numbers], rollout.untouched)
    logging.getLogger("weight_sync").warning(ONE_WITNESS)  # a warning: it is shown without any logging being set up
    return layout.to_json(), unserved_names(layout, rollout.unserved)


def _recordings(
    engines: Sequence[RolloutEngine], catalog: Catalog, dims: EngineDims, deadline: Deadline
) -> dict[int, dict[int, dict[str, Any]]]:
    """What every worker's loader does with the catalog's tensors, by engine, then worker rank."""
    tensors = {
        name: (list(catalog.pattern_of(tensor).shape), catalog.dtype_of(tensor))
        for name, tensor in catalog.ids.items()
        if catalog.served[tensor]
    }
    recordings = on_each(engines, lambda _, engine: engine.record(tensors, deadline), deadline)
    for i, by_rank in recordings.items():
        if sorted(by_rank) != list(range(dims.engine_world)):
            raise BindError(f"engine {engines[i].name}: workers {sorted(by_rank)} of {dims.engine_world} were recorded")
    return recordings


def _witness(
    engines: Sequence[RolloutEngine],
    declared: Layout,
    computed: Mapping[str, str],
    dims: EngineDims,
    deadline: Deadline,
    *,
    by_loader: bool = False,
) -> None:
    for i, by_rank in _recordings(engines, declared.catalog, dims, deadline).items():
        for local, recording in sorted(by_rank.items()):
            rank, found = i * dims.engine_world + local, recording["unexplained"]
            if by_loader:
                agree_on_tensors(declared, rank, recording["shards"], found)
            else:
                agree(declared, rank, recording["shards"], found, computed)
