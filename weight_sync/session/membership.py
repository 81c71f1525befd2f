"""Engines that come and go between syncs: the plan grows or shrinks by one, and nobody else is spoken to.

A connection is a value here: these functions return the next one, and the session forgets the old one first, so that whatever
fails in between is followed by planning and binding everything anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from weight_sync.errors import PlanError, SessionError
from weight_sync.ids import Deadline
from weight_sync.plan.plan import Plan
from weight_sync.plan.schedule import Schedule
from weight_sync.session import landing
from weight_sync.session.attempt import Attempt, check_receipt
from weight_sync.session.connect import Connection, SyncSpec, bind_engines, bind_trainers, check_engines, check_recordings
from weight_sync.session.contracts import EngineDescription, PauseMode, Receipt, RolloutEngine, TrainerGroup
from weight_sync.session.digests import split_digests
from weight_sync.session.registry import Replica
from weight_sync.session.tables import target_table
from weight_sync.session.verify import check_joiner

Region = tuple[str, int]
"""Where a transfer ends in one worker: engine name of the parameter, first element."""


@dataclass(frozen=True)
class Committed:
    """What the last commit proved of the workers of one engine, the first of `plan`: `found`, the digests of each.

    Engines of one job are alike, so it is what every other engine must hold as well.
    """

    version: int
    digest: str
    plan: Plan
    found: tuple[str, ...]

    @cached_property
    def workers(self) -> tuple[dict[Region, str], ...]:
        """For each worker, the digest of every transfer by where it ends. Made when an engine joins, not at every commit."""
        return tuple(
            dict(zip(_regions(self.plan, rank), split_digests(text), strict=True)) for rank, text in enumerate(self.found)
        )


def committed_by(attempt: Attempt) -> Committed | None:
    """None where nothing was compared (verify.level=off)."""
    verified = attempt.verified
    if verified is None or not verified.by_rank:
        return None
    width = attempt.connection.dims.engine_world
    found = tuple(verified.by_rank[rank] for rank in range(width))
    return Committed(attempt.version, verified.digest, attempt.connection.plan, found)


def _regions(plan: Plan, rank: int) -> list[Region]:
    rows = plan.rows_to(rank)
    names = [plan.target_params[i].name for i in plan.target[rows].tolist()]
    return list(zip(names, plan.target_start[rows].tolist(), strict=True))


def check_engine(engine: RolloutEngine, spec: SyncSpec, pause: PauseMode, deadline: Deadline) -> EngineDescription:
    """Describe an engine that wants to join. BindError for another model, other sizes, a pause mode it lacks."""
    server = engine.describe(deadline)
    alone = replace(spec, rollout=replace(spec.rollout, dims={**spec.rollout.dims, "engines": 1}))
    check_engines(alone, {0: server}, [engine], pause)
    return server


def grow(
    trainers: TrainerGroup,
    connection: Connection,
    spec: SyncSpec,
    engine: RolloutEngine,
    server: EngineDescription,
    controller: str,
    deadline: Deadline,
) -> Connection:
    """The connection with one more engine, which is bound and whose own loader agrees with the layout."""
    width, loader = connection.dims.engine_world, connection.inputs.loader
    landing.check_joiner(loader, server)
    check_recordings(spec, connection.layouts[1], [engine], connection.dims, deadline, by_loader=loader > 0)
    change = {"add": [server.ranks[r].host for r in range(width)]}
    schedule = _extended(trainers, connection, change, controller, deadline)
    _unchanged(connection.schedule, schedule)
    place = len(connection.bindings)
    joining = {place: engine}
    binding = bind_engines(joining, schedule, connection.dims, connection.digest, controller, deadline, connection.delta)[place]
    grown = replace(
        connection,
        schedule=schedule,
        inputs=connection.inputs.changed(change),
        bindings=(*connection.bindings, binding),
        labels=(*connection.labels, schedule.digest),
        rounds=(*connection.rounds, schedule.rounds),
    )
    bind_trainers(trainers, grown, controller, deadline)
    return grown


def shrink(trainers: TrainerGroup, connection: Connection, place: int, controller: str, deadline: Deadline) -> Connection:
    """The connection without the engine at `place`; not with its last one."""
    width = connection.dims.engine_world
    change = {"drop": place, "width": width}
    schedule = _extended(trainers, connection, change, controller, deadline)
    _unchanged(connection.schedule, schedule, range(place * width, (place + 1) * width))

    def without(items: tuple[Any, ...]) -> tuple[Any, ...]:
        return items[:place] + items[place + 1 :]

    shrunk = replace(
        connection,
        schedule=schedule,
        inputs=connection.inputs.changed(change),
        bindings=without(connection.bindings),
        labels=without(connection.labels),
        rounds=without(connection.rounds),
    )
    bind_trainers(trainers, shrunk, controller, deadline)
    return shrunk


def _extended(
    trainers: TrainerGroup, connection: Connection, change: Mapping[str, Any], controller: str, deadline: Deadline
) -> Schedule:
    """The changed schedule, of which every trainer rank has computed the same. Those without the base plan anew."""
    schedule = connection.inputs.extend(connection.schedule, change)
    payload = {"base": connection.schedule.digest, "change": change, "controller": controller}
    answers = trainers.call("extend", dict.fromkeys(range(trainers.world), payload), deadline)
    if anew := [rank for rank, answer in answers.items() if answer["digest"] is None]:
        inputs = connection.inputs.changed(change).to_json() | {"controller": controller}
        answers |= trainers.call("plan", dict.fromkeys(anew, inputs), deadline)
    if wrong := {rank: a["digest"] for rank, a in answers.items() if a["digest"] != schedule.digest}:
        raise PlanError(f"trainer ranks extended the plan to another than the controller's {schedule.digest}: {wrong}")
    return schedule


def _unchanged(before: Schedule, after: Schedule, gone: range = range(0)) -> None:
    """Engines that stay are told nothing, so their transfers must travel and be unpacked as they were told.

    gone: rollout ranks of `before` that `after` has no more; those behind them have moved up.
    """
    now = {rank: rank - len(gone) * (rank >= gone.stop) for rank in range(before.plan.target_world) if rank not in gone}

    def staged(schedule: Schedule, rank: int) -> list[tuple[Any, ...]]:
        row = {row: i for i, row in enumerate(schedule.plan.rows_to(rank).tolist())}
        return [(row[p.row], p.at, p.shape, p.round, p.stage) for p in schedule.unpacked.get(rank, ())]

    if changed := [rank for rank in now if staged(before, rank) != staged(after, now[rank])]:
        raise PlanError(f"extending the plan changed how transfers to rollout ranks {changed} are staged")


def pull_version(
    connection: Connection,
    replica: Replica,
    lender: int,
    committed: Committed,
    session: str,
    deadline: Deadline,
) -> int:
    """Bring one joiner (the last in the plan) to the committed version out of the live memory of the engine at `lender`.

    Returns bytes. The engine is resumed with a receipt of its own, after each of its workers' digests of every transfer were
    found equal to those that were committed.
    """
    engine, place = replica.engine, len(connection.bindings) - 1
    width = connection.dims.engine_world
    engine.begin(session, committed.version, connection.labels[place], connection.epochs[place], deadline)
    replies = engine.pull(session, connection.bindings[lender], deadline)
    if sorted(replies) != list(range(width)):
        raise SessionError(f"engine {replica.name}: workers {sorted(replies)} of {width} answered pull")
    found = engine.verify(session, deadline)
    if sorted(found) != list(range(width)):
        raise SessionError(f"engine {replica.name}: workers {sorted(found)} of {width} sent digests")
    for local in range(width):
        table = target_table(connection.schedule, place * width + local)
        regions = zip(table["params"], table["start"], strict=True)
        check_joiner(replica.name, table, [committed.workers[local].get(region, "") for region in regions], found[local])
    receipt = engine.finish(session, committed.version, committed.digest, deadline)
    check_receipt(receipt, replica.name, session, committed.version, committed.digest)
    engine.resume(Receipt(replica.name, session, committed.version, committed.digest), deadline)
    return sum(int(reply["bytes"]) for reply in replies.values())
