"""Whole syncs between random trainers and engines: every byte arrives, nothing else is touched."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from session_support import ALWAYS_DIRECT, DENSE, MOE, NEVER_SHORT_RUNS, World, build, declared

from weight_sync.plan.schedule import Budget, CostModel
from weight_sync.transport import preflight, registry
from weight_sync.transport.memory import MemoryTransport

TRAINERS: list[dict[str, Any]] = [
    {"ranks": 1},
    {"ranks": 2},
    {"ranks": 2, "tp": 2},
    {"ranks": 2, "pp": 2},
    {"ranks": 2, "pp": 2, "pipeline": [1, 1]},
    {"ranks": 4, "tp": 2, "pp": 2, "ep": 2},
    {"ranks": 3, "tp": 3, "ep": 3},
    {"ranks": 4, "tp": 2, "ep": 2, "order": "tp-cp-ep-pp-dp"},
    {"ranks": 2, "tp": 2, "etp": 2},
    {"ranks": 1, "vpp": 2, "pp": 1},
]
ROLLOUTS: list[dict[str, Any]] = [
    {"tp": 1},
    {"tp": 2},
    {"tp": 3},
    {"tp": 2, "pp": 2},
    {"tp": 2, "moe_ep": 2},
    {"tp": 2, "engines": 2},
    {"tp": 2, "attn_dp": 2},
]
COSTS = {"direct": ALWAYS_DIRECT, "default": CostModel(), "packed": NEVER_SHORT_RUNS}


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    config=st.sampled_from([MOE, DENSE]),
    trainer=st.sampled_from(TRAINERS),
    rollout=st.sampled_from(ROLLOUTS),
    engine=st.sampled_from(["sglang", "vllm"]),
    costs=st.sampled_from(sorted(COSTS)),
    stage=st.sampled_from([64, 320, 4096, 1 << 20]),
    landing=st.none() | st.integers(0, 1000),
    explicit=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_every_destination_byte_is_the_source_byte_and_no_other_byte_changes(
    config: dict[str, Any],
    trainer: dict[str, Any],
    rollout: dict[str, Any],
    engine: str,
    costs: str,
    stage: int,
    landing: int | None,
    explicit: bool,
    seed: int,
) -> None:
    if "num_experts" not in config:
        trainer = {k: v for k, v in trainer.items() if k not in ("ep", "etp")}
        rollout = {k: v for k, v in rollout.items() if k != "moe_ep"}
    if engine == "vllm":
        rollout = {k: v for k, v in rollout.items() if k != "attn_dp"}

    def transport(side: str, rank: int, hub: Any) -> MemoryTransport:
        return MemoryTransport(hub, landing_seed=None if landing is None else landing + rank)

    world = build(
        declared(config, trainer, rollout, engine),
        transport=transport, seed=seed, explicit=explicit, costs=COSTS[costs], budget=Budget(stage, stage),
    )  # fmt: skip
    world.commit(1)
    for name, part in world.sync.connect().schedule.summary().items():
        if part["transfers"]:
            event(name)
    world.step()
    world.commit(2)


@pytest.mark.parametrize(
    ("trainer", "rollout", "method"),
    [
        ({"ranks": 2, "tp": 2}, {"tp": 1}, "unpack"),
        ({"ranks": 1}, {"tp": 2}, "pack"),
        ({"ranks": 2, "tp": 2}, {"tp": 3}, "both"),
    ],
)
def test_strided_transfers_go_through_many_rounds_of_a_tiny_staging_buffer(
    trainer: dict[str, Any], rollout: dict[str, Any], method: str
) -> None:
    world = build(declared(DENSE, trainer, rollout), costs=NEVER_SHORT_RUNS, budget=Budget(64, 64))
    schedule = world.sync.connect().schedule
    assert schedule.summary()[method]["transfers"] > 0
    if method == "pack":
        assert schedule.rounds == 1
    else:
        assert schedule.rounds > 10
        assert max(schedule.stage_bytes.values()) <= 64
    for version in (1, 2):
        world.commit(version)
        world.step()


def test_a_sync_without_anything_wrong_pauses_writes_verifies_commits_and_resumes_in_this_order() -> None:
    world = build(declared(rollout={"tp": 2, "engines": 2}))
    world.sync.connect()
    connected = len(world.traps.log)
    world.commit(1)
    log = world.traps.log[connected:]
    for engine in ("engine e0", "engine e1"):
        assert [v for w, v in log if w == engine] == ["pause", "begin", "verify", "finish", "resume"]
    assert [v for w, v in log if w == "trainer 0"] == ["quiesce", "write", "release"]
    order = {step: [i for i, entry in enumerate(log) if entry[1] == step] for step in {entry[1] for entry in log}}
    for earlier, later in (
        ("quiesce", "pause"), ("pause", "begin"), ("begin", "write"), ("write", "verify"), ("verify", "finish"),
        ("finish", "resume"), ("resume", "release"),
    ):  # fmt: skip
        assert max(order[earlier]) < min(order[later]), (earlier, later)


def test_later_syncs_use_the_binding_of_the_first() -> None:
    world = build()
    world.commit(1)
    first = {agent._describe({})["epoch"] for agent in world.target_agents}
    world.step()
    world.commit(2)
    assert world.traps.verbs("engine e0").count("bind") == 1
    assert first == {agent._describe({})["epoch"] for agent in world.target_agents}


def test_connecting_again_keeps_bindings_that_still_fit() -> None:
    world = build()
    before = world.sync.connect().epochs
    assert world.sync.connect().epochs == before
    world.commit(1)


@pytest.mark.parametrize("version", [1, 0, -1, 1.5, "2"])
def test_a_version_that_is_not_above_the_committed_one_is_refused_before_anything_is_paused(version: Any) -> None:
    world = build()
    world.commit(1)
    seen = len(world.traps.log)
    with pytest.raises(Exception, match=r"is not an integer above the committed 1"):
        world.sync.sync(version)
    assert len(world.traps.log) == seen
    world.step()
    world.commit(7)


@pytest.mark.parametrize(("name", "options"), [("mooncake", {"protocol": "tcp"}), ("cma", {}), ("nixl", {"protocol": "tcp"})])
def test_real_transports_move_the_same_bytes(name: str, options: dict[str, Any]) -> None:
    strategy = {"mooncake": "p2p_tcp", "cma": "p2p_cma", "nixl": "p2p_nixl"}[name]
    if reason := preflight.reachable(preflight.facts(gpus=False))[strategy]:
        pytest.skip(f"{name}: {reason}")
    world: World = build(
        transport=lambda side, rank, hub: registry.create(name, **options), costs=NEVER_SHORT_RUNS, budget=Budget(4096, 4096)
    )
    try:
        for version in (1, 2):
            world.commit(version)
            world.step()
    finally:
        for agent in (*world.source_agents, *world.target_agents):
            agent._close()
