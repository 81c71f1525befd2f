"""Engines that place HF tensors with loaders of their own: order, budget, proof before each hand-over, and what is refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import pytest
from session_support import ALWAYS_DIRECT, MOE, NEVER_SHORT_RUNS, Spare, World, admitted, build, declared, spare
from test_quantised import SCHEMES, quantised

from weight_sync.delta.spec import DeltaSpec
from weight_sync.errors import BindError, PlanError, RolloutError, SessionError, VerifyError
from weight_sync.ids import ITEMSIZE
from weight_sync.plan.schedule import Budget
from weight_sync.plan.waves import brick
from weight_sync.session.inprocess import typed
from weight_sync.session.landing import Landing, To
from weight_sync.session.registry import ReplicaState
from weight_sync.session.verify import Level


class Packing:
    """An engine's loader over a test's buffer: it cuts whole HF tensors to the rank's part, as load_weights does."""

    def __init__(self, world: World, local: int, buffer: Any) -> None:
        self.world, self.local, self.buffer = world, local, buffer
        self.fed: list[tuple[set[str], bool, bool]] = []
        self.staging, self.abandoned, self.error = 0, 0, list[Exception]()
        self.raw = np.zeros(0, np.uint8)

    def allocate(self, nbytes: int, places: Mapping[str, tuple[list[int], str, int]]) -> dict[str, Any]:
        self.staging, self.raw = nbytes, np.full(nbytes, 0xEE, np.uint8)
        found = {}
        for name, (shape, dtype, first) in places.items():
            words = self.raw[first : first + prod(shape) * ITEMSIZE[dtype]].view(f"u{ITEMSIZE[dtype]}")
            found[name] = typed(words.reshape(shape), dtype)
        return found

    def feed(self, tensors: Mapping[str, Any], first: bool, last: bool) -> None:
        if self.error:
            raise self.error.pop()
        self.fed.append((set(tensors), first, last))
        layout = self.world.layouts[1]
        params = {p.name: p for p in layout.rank_params(self.local)}
        for shard in layout.rank_shards(self.local):
            if shard.tensor in tensors:
                cut = tuple(slice(o, e) for o, e in zip(shard.box.offset, shard.box.end, strict=True))
                view = self.buffer.elements(self.buffer.bytes, params[shard.param], shard.start, shard.strides, shard.box.shape)
                words = np.asarray(tensors[shard.tensor])[cut]
                view[...] = words.astype(np.uint32) << 16 if words.itemsize < view.itemsize else words

    def abandon(self) -> None:
        self.abandoned += 1

    def settle(self) -> dict[str, int]:
        return {}

    def snapshot(self) -> int:
        self.kept = self.buffer.bytes.copy()
        return self.kept.nbytes

    def scramble(self) -> int:
        layout = self.world.layouts[1]
        params = {p.name: p for p in layout.rank_params(self.local)}
        for s in layout.rank_shards(self.local):
            view = self.buffer.elements(self.buffer.bytes, params[s.param], s.start, s.strides, s.box.shape)
            view[...] = ~view
        return self.buffer.bytes.nbytes

    def compare(self) -> int:
        if not np.array_equal(self.kept, self.buffer.bytes):
            raise VerifyError("not as it was")
        return self.kept.nbytes


STUCK = {"rank 0 qkv": "post-processing packed it"}


def can_load(world: World, engine: Any, agents: Any, buffers: Any, stuck: dict[str, str], reason: str = "") -> list[Packing]:
    packing = [Packing(world, local, buffer) for local, buffer in enumerate(buffers)]
    for agent, one in zip(agents, packing, strict=True):
        agent._loader = lambda one=one: one
    describe = engine.describe
    engine.describe = lambda deadline: replace(describe(deadline), not_writable=dict(stuck), no_loader=reason)
    return packing


def loading(
    sides: Any = None,
    *,
    to: To = To.LOADER,
    budget: int = 8192,
    stuck: dict[str, str] | None = None,
    reason: str = "",
    **more: Any,
) -> tuple[World, list[Packing]]:
    world = build(sides or declared(rollout={"tp": 2, "moe_ep": 2, "engines": 2}), **more)
    world.sync._spec = replace(world.sync._spec, landing=Landing(to, budget))
    packing: list[Packing] = []
    for i, engine in enumerate(world.engines):
        part = slice(i * world.width, (i + 1) * world.width)
        packing += can_load(world, engine, world.target_agents[part], world.target[part], stuck or {}, reason)
    return world, packing


def synced(world: World, version: int, level: Level | None = None) -> None:
    expected = world.expected()
    world.sync.sync(version, level=level)
    world.check(expected)
    assert [(e.version, e.serving) for e in world.engines] == [(version, True)] * len(world.engines)


@pytest.mark.parametrize("level", [Level.DIGEST, Level.FULL, Level.CHECK_WEIGHT_EQUAL, Level.OFF])
@pytest.mark.parametrize("costs", [ALWAYS_DIRECT, NEVER_SHORT_RUNS], ids=["direct", "packed and unpacked"])
@pytest.mark.parametrize("explicit", [False, True], ids=["megatron", "rows over ranks"])
def test_every_level_brings_every_byte_wave_by_wave(level: Level, costs: Any, explicit: bool) -> None:
    world, packing = loading(costs=costs, budget=8192, explicit=explicit)
    world.sync._spec = replace(world.sync._spec, budget=Budget(2048, 2048))
    for version in (1, 2):
        synced(world, version, level)
        world.step()
    waves = world.sync._connection.schedule.waves
    assert len(waves) > 2
    for one in packing:
        assert one.staging <= 8192
        runs = 4 if level is Level.CHECK_WEIGHT_EQUAL else 2
        assert [(first, last) for _, first, last in one.fed] == [
            (i == 0, i == len(waves) - 1) for i in range(len(waves))
        ] * runs  # fmt: skip
        names = Counter(name for fed, _, _ in one.fed for name in fed)
        layout = world.layouts[1]
        assert names == dict.fromkeys({s.tensor for s in layout.rank_shards(one.local)}, runs)


@pytest.mark.parametrize("name", SCHEMES)
def test_values_and_scales_are_handed_over_together_as_the_reference_makes_them(name: str) -> None:
    world, packing = loading(quantised(SCHEMES[name], rollout={"tp": 1}), budget=9000)
    for version in (1, 2):
        synced(world, version)
        world.step()
    assert len(world.sync._connection.schedule.waves) > 1
    for fed, _, _ in packing[0].fed:
        weights = {brick(name) for name in fed if "scale" in name}
        assert weights <= {brick(name) for name in fed if "scale" not in name}


def test_what_a_loader_must_see_together_is_one_brick() -> None:
    layer = "model.layers.3."
    assert len({brick(f"{layer}self_attn.{n}") for n in ("q_proj.weight", "kv_a_proj_with_mqa.weight_scale_inv")}) == 1
    assert len({brick(f"{layer}mlp.experts.7.{n}_proj.weight") for n in ("gate", "up", "down")}) == 1
    assert brick(f"{layer}mlp.experts.7.up_proj.weight") != brick(f"{layer}mlp.experts.8.up_proj.weight")
    assert brick(f"{layer}mlp.gate.weight") == brick(f"{layer}mlp.shared_experts.up_proj.weight")
    assert brick("model.embed_tokens.weight") == "model.embed_tokens"


def test_a_budget_below_the_largest_brick_is_refused_with_the_budget_that_would_do() -> None:
    world, _ = loading(budget=1024)
    with pytest.raises(PlanError, match=r"weight_sync.landing.budget=1024: .*at least (\d+) is needed") as caught:
        world.sync.connect()
    assert not any("pause" in verb for _, verb in world.traps.log)
    enough = int(str(caught.value).split("at least ")[1].split()[0])
    world.sync._spec = replace(world.sync._spec, landing=Landing(To.LOADER, enough))
    synced(world, 1)


def test_a_byte_that_changed_on_its_way_is_never_handed_to_the_loader() -> None:
    world, packing = loading()

    def corrupt() -> None:
        packing[1].raw[0] ^= 1

    world.traps.do("worker 1", "verify", lambda: None)
    world.traps.do("worker 1", "verify", corrupt)
    with pytest.raises(VerifyError, match="arrived with other bytes than were sent"):
        world.sync.sync(1)
    assert world.traps.sprung
    assert [len(one.fed) for one in packing] == [1] * len(packing)  # the wave before
    assert [(e.version, e.serving) for e in world.engines] == [(-1, False)] * 2
    assert world.sync.version == -1
    assert all(one.abandoned for one in packing)
    synced(world, 1)


def test_a_loader_that_fails_half_way_leaves_all_engines_paused_until_a_complete_sync() -> None:
    world, packing = loading()
    synced(world, 1)
    world.step()
    world.traps.do("worker 2", "feed", lambda: None)
    world.traps.do("worker 2", "feed", lambda: packing[2].error.append(RolloutError("its own loader failed")))
    with pytest.raises(RolloutError, match="its own loader failed"):
        world.sync.sync(2)
    assert world.sync.version == 1
    assert [e.serving for e in world.engines] == [False, False]
    assert {replica.state for replica in world.sync.replicas} == {ReplicaState.SUSPECT}
    with pytest.raises(Exception, match="is not the receipt of its last finish"):
        world.engines[0].resume(None, None)
    synced(world, 2)


def test_waves_are_handed_over_in_order_once_each_and_only_after_they_were_looked_at() -> None:
    world, _ = loading(declared(rollout={"tp": 1}))
    agent = world.target_agents[0]

    def refused(wave: int, text: str) -> None:
        with pytest.raises(SessionError, match=text):
            agent.call("feed", {"session": session(), "wave": wave})

    def session() -> str:
        return str(agent._session)

    def ahead() -> None:
        refused(2, "wave 2 of .* next is 1, verified last was 1")

    world.traps.do("worker 0", "verify", lambda: refused(0, "next is 0, verified last was none"))
    world.traps.do("worker 0", "verify", lambda: refused(0, "next is 1, verified last was none"))
    world.traps.do("worker 0", "verify", lambda: None, after=True)
    world.traps.do("worker 0", "verify", ahead, after=True)
    synced(world, 1)
    assert world.traps.sprung


def test_auto_takes_the_loader_where_tensors_cannot_be_written_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    world, packing = loading(to=To.AUTO, stuck=STUCK)
    synced(world, 1)
    assert "qkv: post-processing packed it" in world.sync._connection.by_loader
    assert "load what they receive with their own loaders" in caplog.text
    world, packing = loading(to=To.AUTO)
    world.commit(1)
    assert not any(one.fed for one in packing)
    assert world.sync._connection.by_loader == ""


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ({"to": To.LIVE, "stuck": STUCK}, "qkv: post-processing packed it.*weight_sync.landing.to=live"),
        (
            {"to": To.AUTO, "stuck": STUCK, "reason": "it has none"},
            "qkv: .*its own loader cannot take the weights.*it has none",
        ),
        ({"reason": "it has none"}, "landing.to=loader, and its own loader cannot .*it has none"),
        ({"delta": DeltaSpec()}, "turn weight_sync.delta off"),
    ],
)
def test_what_cannot_land_is_refused_by_name_before_a_pause(how: dict[str, Any], text: str) -> None:
    world, _ = loading(**how)
    with pytest.raises(BindError, match=text):
        world.sync.connect()
    assert not any(verb == "pause" for _, verb in world.traps.log)


def test_an_engine_joins_for_the_next_sync_and_cannot_pull_from_live_memory() -> None:
    world, _ = loading()
    synced(world, 1)
    one = spare(world, "late")
    can_load(world, one.engine, one.engine._agents.values(), one.buffers, {})
    with pytest.raises(SessionError, match="nothing to pull: engines place what they receive with their own loaders"):
        world.sync.join(one.engine, pull=True)
    assert one.engine.serving
    assert all(engine.serving for engine in world.engines)
    world.sync.join(one.engine)
    admitted(world, one)
    world.step()
    synced(world, 2)
    world.sync.leave("e0")
    assert [replica.name for replica in world.sync.replicas] == ["e1", "late"]


def test_an_engine_that_cannot_be_written_does_not_join_a_job_that_writes_in_place() -> None:
    world = build(declared({**MOE, "num_hidden_layers": 1}, rollout={"tp": 2}))
    world.commit(1)
    one: Spare = spare(world, "late")
    can_load(world, one.engine, one.engine._agents.values(), one.buffers, STUCK)
    with pytest.raises(BindError, match="engine late: the engines of this job are written in place"):
        world.sync.join(one.engine)
    assert one.engine.serving


def test_weights_may_be_compared_with_what_an_engine_held() -> None:
    world, _ = loading()
    synced(world, 1)
    world.sync.check_weight_equal(2)
    world.step()
    with pytest.raises(VerifyError, match="not as it was"):
        world.sync.check_weight_equal(3)
    assert world.sync.version == 2
