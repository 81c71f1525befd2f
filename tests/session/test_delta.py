"""Delta sessions: the same bytes as a complete one, fewer on the wire; and when they are not allowed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from delta_support import SMALL, complete, delta, nudge, served, settled
from session_support import (
    ALWAYS_DIRECT,
    DENSE,
    NEVER_SHORT_RUNS,
    World,
    admitted,
    build,
    declared,
    departed,
    spare,
)
from test_casts import GLM45
from test_casts import sides as sides_of
from test_quantised import SCHEMES, quantised

from weight_sync.delta.regions import regions_of, snapshot_bytes
from weight_sync.delta.spec import DeltaSpec
from weight_sync.errors import ConfigError
from weight_sync.observe.recorder import Recorder
from weight_sync.plan.schedule import Budget
from weight_sync.session.delta import Reason
from weight_sync.session.session import WeightSync
from weight_sync.session.silent import SilentObserver
from weight_sync.session.verify import Level


def held_as(dtype: str) -> Any:
    source, target = sides_of(GLM45, "sglang")
    return replace(source, held_as=dtype), target


WORLDS: dict[str, Any] = {
    "experts, tp2 to two engines": {"sides": declared(rollout={"tp": 2, "engines": 2})},
    "attention data parallel": {"sides": declared(rollout={"tp": 2, "attn_dp": 2})},
    "cut three ways, staged in rounds": {
        "sides": declared(DENSE, rollout={"tp": 3}), "costs": NEVER_SHORT_RUNS, "budget": Budget(512, 512),
    },
    "cut three ways, strided writes": {"sides": declared(DENSE, rollout={"tp": 3}), "costs": ALWAYS_DIRECT},
    "rows over ranks": {"sides": declared(), "explicit": True},
    "float32 to bfloat16": {"sides": held_as("float32")},
    "fp8 blocks": {"sides": quantised(SCHEMES["fp8 blocks"], rollout={"tp": 2, "moe_ep": 2}), "budget": Budget(2048, 2048)},
    "nvfp4, rows over ranks": {"sides": quantised(SCHEMES["nvfp4"], rollout={"tp": 1}), "explicit": True},
    "int4 groups": {"sides": quantised(SCHEMES["int4 groups"], rollout={"tp": 1})},
}  # fmt: skip


@pytest.mark.parametrize("name", WORLDS)
def test_after_every_sync_every_byte_is_what_a_complete_session_would_have_written(name: str) -> None:
    world, twin = (build(delta=spec, **WORLDS[name]) for spec in (SMALL, None))
    nudge(world, 0.0)
    nudge(twin, 0.0)
    complete(world, 1, Reason.FIRST)
    twin.commit(1)
    for version, share in enumerate((0.01, 0.0, 0.2, 0.001, 0.01), 2):
        nudge(world, share)
        nudge(twin, share)
        mine, whole = delta(world, version), twin.sync.sync(version)
        assert mine.digest == whole.digest, "the same bytes, by the same proof"
        assert mine.transfers == whole.transfers
        assert mine.delta is not None
        if share == 0.0:
            assert (mine.bytes, mine.writes, mine.delta.changed) == (0, 0, 0)
        elif share <= 0.01:
            assert mine.bytes < whole.bytes / 2


def test_what_changed_is_counted_once_however_many_engines_get_it() -> None:
    world = build(declared(rollout={"tp": 2, "engines": 3}), delta=SMALL)
    complete(world, 1, Reason.FIRST)
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    world.hf[name].reshape(-1)[[0, 5, 17]] ^= np.uint16(1)
    for rank, buffer in enumerate(world.source):
        world._fill(world.layouts[0], rank, buffer, buffer.bytes)
    outcome = delta(world, 2)
    assert outcome.delta is not None
    assert outcome.delta.changed == 3
    connection = world.sync._connection
    assert connection is not None
    kept = snapshot_bytes(connection.plan)
    assert outcome.delta.snapshot == dict(enumerate(kept.tolist()))
    for rank, agent in enumerate(world.source_agents):
        regions = regions_of(connection.plan, connection.plan.rows_from(rank))
        assert agent._delta.nbytes == regions.total <= regions.nbytes.sum() + 64 * len(regions.first)
        # Of three engines' bytes one copy; a norm, which all ranks hold, may come from another one for each engine.
        assert regions.nbytes.sum() * 2.9 < connection.plan.nbytes[regions.rows].sum()


def test_an_engine_keeps_serving_until_everything_is_encoded() -> None:
    world = settled()
    world.traps.do("trainer 1", "encode", lambda: None)
    served_then: list[bool] = []
    world.traps.do("trainer 0", "encode", lambda: served_then.append(world.engines[0].serving), after=True)
    delta(world, 3)
    assert served_then == [True]


# -- when it is not allowed --------------------------------------------------------------------------------------------


def test_changes_that_take_more_than_their_share_are_sent_as_a_complete_session_and_the_next_delta_is_one() -> None:
    world = settled(replace(SMALL, max_share=0.3))
    world.step()
    kept: list[int] = []
    world.traps.do("engine e0", "begin", lambda: kept.extend(a._delta._encoded.changed for a in world.source_agents))
    outcome = complete(world, 3, Reason.SHARE)
    assert outcome.delta is not None
    assert "more than 30% of its" in outcome.delta.text
    assert 0 < outcome.delta.changed <= outcome.delta.elements
    assert set(kept) == {0}, "what will not be sent is not kept while everything else is"
    nudge(world, 0.005)
    delta(world, 4)


@pytest.mark.parametrize("level", [Level.FULL, Level.CHECK_WEIGHT_EQUAL])
def test_higher_levels_of_verification_check_a_delta_too(level: Level) -> None:
    world = settled(sides=declared(rollout={"tp": 2, "engines": 2}))
    before = [buffer.bytes.copy() for buffer in world.target]
    world.sync._level = level
    expected = world.expected()
    outcome = world.sync.sync(3)
    world.check(expected)
    assert outcome.delta is not None
    assert outcome.delta.used
    assert any((a != b.bytes).any() for a, b in zip(before, world.target, strict=True))
    nudge(world, 0.01)
    world.sync._level = Level.DIGEST
    delta(world, 4)


def test_without_verification_every_session_is_complete_and_none_is_a_base() -> None:
    world = settled()
    world.sync._level = Level.OFF
    expected = world.expected()
    outcome = world.sync.sync(3)
    world.check(expected)
    assert outcome.delta is not None
    assert (outcome.delta.reason, outcome.bytes) == (Reason.LEVEL, world.payload())
    world.sync._level = Level.DIGEST
    nudge(world, 0.01)
    complete(world, 4, Reason.BOUND)
    nudge(world, 0.01)
    delta(world, 5)


def test_a_check_against_what_engines_hold_is_complete() -> None:
    world = settled()
    delta(world, 3)
    outcome = world.sync.check_weight_equal(4)
    assert outcome.delta is not None
    assert outcome.delta.reason is Reason.LEVEL
    nudge(world, 0.01)
    delta(world, 5)


def test_an_engine_that_lost_its_receipt_gets_a_complete_session() -> None:
    world = settled(sides=declared(rollout={"tp": 2, "engines": 2}))
    world.engines[1]._receipt = None  # its weights were loaded from elsewhere, as it says
    outcome = complete(world, 3, Reason.RECEIPT)
    assert outcome.delta is not None
    assert "engine e1 does not show the receipt of version 2" in outcome.delta.text
    nudge(world, 0.01)
    delta(world, 4)


def test_engines_that_join_leave_or_are_replaced_are_followed_by_a_complete_session() -> None:
    world = settled(sides=declared(DENSE | {"num_hidden_layers": 1}, rollout={"tp": 3, "engines": 2}))
    one = spare(world, "e9")
    world.sync.join(one.engine)
    admitted(world, one)
    complete(world, 3, Reason.BOUND)
    nudge(world, 0.01)
    delta(world, 4)
    world.sync.leave("e0")
    departed(world, "e0")
    nudge(world, 0.01)
    complete(world, 5, Reason.BOUND)
    nudge(world, 0.01)
    delta(world, 6)
    two = spare(world, "e7")
    world.sync.replace("e1", two.engine, pull=True)
    departed(world, "e1")
    admitted(world, two)
    nudge(world, 0.01)
    complete(world, 7, Reason.BOUND)
    nudge(world, 0.01)
    delta(world, 8)


def test_binding_anew_is_followed_by_a_complete_session() -> None:
    world = settled()
    world.sync.connect()
    complete(world, 3, Reason.BOUND)
    nudge(world, 0.01)
    delta(world, 4)


def test_another_controller_may_give_deltas_more_staging_than_the_one_before() -> None:
    """Where engines need more for unpacking anyway, nothing else of the binding changes, and transports stay."""
    world = settled(
        sides=declared(DENSE, rollout={"tp": 1}), spec=DeltaSpec(staging=1024, max_share=1.0), costs=NEVER_SHORT_RUNS,
        budget=Budget(1 << 17, 1 << 17),
    )  # fmt: skip
    assert min(world.sync.connect().schedule.stage_bytes.values()) > 4096
    transports = [agent._transport for agent in world.source_agents]
    old = world.sync
    spec = DeltaSpec("device", staging=4096, max_share=1.0)
    world.sync = WeightSync(world.trainers, world.engines, replace(old._spec, delta=spec), timeouts=old._timeouts)
    complete(world, 3, Reason.FIRST)
    nudge(world, 0.3)
    delta(world, 4)
    assert transports == [agent._transport for agent in world.source_agents]


def test_a_rank_without_the_snapshot_of_this_very_version_makes_the_session_complete() -> None:
    world = settled()
    held = world.source_agents[1]._delta._held
    assert held is not None
    world.source_agents[1]._delta._held = replace(held[0], version=1), held[1]
    outcome = complete(world, 3, Reason.SNAPSHOT)
    assert outcome.delta is not None
    assert "trainer rank 1 has no snapshot of version 2" in outcome.delta.text
    nudge(world, 0.01)
    delta(world, 4)


# -- what is said ------------------------------------------------------------------------------------------------------


class Records(SilentObserver):
    def __init__(self) -> None:
        self.recorders: list[Recorder] = []

    def sync(self, version: int, session: str, *, nbytes: int | None = None) -> Any:
        self.recorders.append(Recorder(version, session))
        return self.recorders[-1]


def test_reasons_numbers_and_phases_are_in_the_record(caplog: pytest.LogCaptureFixture) -> None:
    watch = Records()
    world: World = build(delta=DeltaSpec(), observer=watch)
    with caplog.at_level("INFO"):
        served(world, 1)
    nudge(world, 0.02)
    served(world, 2)
    first, second = (recorder.record() for recorder in watch.recorders)
    assert first.figures["delta/complete/first"] == 1.0
    assert first.remarks == ("version 1: complete session, no delta: nothing was committed by this controller yet",)
    assert first.remarks[0] in caplog.text
    assert first.to_json()["remarks"] == list(first.remarks)
    assert {"keep"} <= first.phases.keys()
    assert "encode" not in first.phases
    assert second.remarks == ()
    assert {"encode", "keep"} <= second.phases.keys()
    figures = second.figures
    assert 0.005 < figures["delta/changed_share"] < 0.05
    assert second.bytes == figures["delta/encoded_bytes"] < figures["delta/complete_bytes"] / 5
    assert figures["delta/encoded_share"] == second.bytes / world.payload()
    assert figures["delta/snapshot_bytes"] == max(agent._delta.nbytes for agent in world.source_agents)
    assert {"delta/encode_seconds", "delta/apply_seconds", "delta/keep_seconds", "delta/rounds"} <= figures.keys()
    assert not any(name.startswith("delta/complete/") for name in figures)


def test_without_deltas_nothing_of_them_is_there() -> None:
    watch = Records()
    world = build(observer=watch)
    world.commit(1)
    nudge(world, 0.01)
    outcome = world.commit(2)
    assert outcome.delta is None
    assert not any(name.startswith("delta") for name in watch.recorders[-1].record().figures)
    assert all(agent._delta.nbytes == 0 and agent._delta._snapshot is None for agent in world.source_agents)
    assert all(agent._stage is None for agent in world.target_agents)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [({"snapshot": "disk"}, "host or device"), ({"max_share": 0.0}, "at most 1"), ({"staging": 512}, "at least 1024 bytes")],
)
def test_settings_that_are_not_legal_are_refused(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        DeltaSpec(**wrong)
