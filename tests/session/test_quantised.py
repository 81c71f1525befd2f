"""Whole sessions in which weights are quantised on their way, against the float64 reference of each scheme."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from session_support import ALWAYS_DIRECT, MOE, NEVER_SHORT_RUNS, World, build, declared

from weight_sync.errors import ParallelError, PlanError, SessionError, VerifyError, WeightsError
from weight_sync.plan.schedule import Budget
from weight_sync.quant.emission import Quantisation
from weight_sync.quant.published import Excludes
from weight_sync.quant.scheme import Scheme, load_scheme
from weight_sync.session.failure import FailurePolicy
from weight_sync.session.state import State
from weight_sync.session.verify import Level

SIZES = MOE | {"hidden_size": 32, "head_dim": 8, "moe_intermediate_size": 32, "intermediate_size": 64, "num_attention_heads": 8}
SIZES |= {"num_key_value_heads": 4, "num_experts": 4}


def scheme(name: str, **overrides: Any) -> Scheme:
    from weight_sync.config import quant_yaml

    return load_scheme(name, quant_yaml, overrides)


def quantised(of: Scheme, trainer: dict[str, Any] | None = None, rollout: dict[str, Any] | None = None) -> Any:
    quant = Quantisation(of, Excludes("fp8")).to_json()
    source, target = declared(SIZES, trainer, rollout)
    return replace(source, quant=quant), replace(target, quant=quant)


SCHEMES = {
    "fp8 blocks": scheme("fp8_block", group=[8, 8]),
    "fp8 blocks, ue8m0": scheme("fp8_block_ue8m0", group=[8, 16]),
    "fp8 channels": scheme("fp8_channel"),
    "fp8 tensors": scheme("fp8_tensor"),
    "mxfp8": scheme("mxfp8"),
    "mxfp4": scheme("mxfp4"),
    "int4 groups": scheme("int4_group", group=[1, 8]),
    "nvfp4": scheme("nvfp4"),
}
CUTS = {"as the trainer": {"tp": 1}, "tp2 ep2": {"tp": 2, "moe_ep": 2}}


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("explicit", [False, True], ids=["megatron", "rows over ranks"])
@pytest.mark.parametrize("budget", [Budget(), Budget(2048, 2048)], ids=["one round", "many rounds"])
def test_values_and_scales_arrive_as_the_reference_makes_them(name: str, explicit: bool, budget: Budget) -> None:
    world = build(quantised(SCHEMES[name], rollout={"tp": 1}), explicit=explicit, budget=budget)
    for version in (1, 2):
        world.commit(version)
        world.step()


@pytest.mark.parametrize("name", ["fp8 blocks", "int4 groups"])
@pytest.mark.parametrize("level", [Level.FULL, Level.CHECK_WEIGHT_EQUAL, Level.OFF])
@pytest.mark.parametrize("costs", [ALWAYS_DIRECT, NEVER_SHORT_RUNS], ids=["short", "long"])
def test_every_level_of_verification_takes_quantised_transfers(name: str, level: Level, costs: Any) -> None:
    world = build(quantised(SCHEMES[name], rollout={"tp": 2, "moe_ep": 2}), level=level, costs=costs, budget=Budget(1024, 1024))
    expected = world.expected()
    world.sync.sync(1)
    world.check(expected)


@pytest.mark.parametrize("rollout", [{"tp": 2}, {"tp": 2, "moe_ep": 2}, {"tp": 4, "moe_ep": 2}, {"tp": 2, "engines": 2}])
def test_blocks_arrive_at_every_cut_of_the_engine(rollout: dict[str, Any]) -> None:
    world = build(quantised(SCHEMES["fp8 blocks"], {"ranks": 4, "tp": 2, "pp": 2, "ep": 2}, rollout))
    world.commit(1)


def cut_blocks() -> Any:
    """Blocks of 32 rows, whole at the engine; the trainer's tp2 and FSDP rows cut them."""
    return quantised(scheme("fp8_block", group=[32, 32]), rollout={"tp": 1})


@pytest.mark.parametrize("explicit", [False, True], ids=["megatron", "rows over ranks"])
def test_groups_that_several_trainer_ranks_hold_get_one_scale_and_its_bytes_are_counted(explicit: bool) -> None:
    world = build(cut_blocks(), explicit=explicit)
    straddles = world.sync.connect().schedule.straddles
    assert len(straddles)
    outcome = world.commit(1)
    assert outcome.gathered_bytes == straddles.nbytes > 0


def test_groups_that_several_trainer_ranks_hold_are_refused_where_the_config_says_so() -> None:
    world = build(cut_blocks())
    world.sync._spec = replace(world.sync._spec, straddle="refuse")
    with pytest.raises(PlanError, match=r"groups of \[32, 32\] lie on several trainer ranks.*straddle"):
        world.sync.sync(1)
    untouched(world)


def untouched(world: World) -> None:
    assert not any("pause" in world.traps.verbs(f"engine {e.name}") for e in world.engines)
    assert (world.sync.version, [e.version for e in world.engines]) == (-1, [-1] * len(world.engines))


def test_a_cut_of_the_engine_through_blocks_is_refused_with_the_numbers() -> None:
    with pytest.raises(
        ParallelError, match=r"o_proj.*attn_tp=4.*edges of values' groups of 32.*legal sizes of the axis: 1, 2$"
    ):
        build(quantised(scheme("fp8_block", group=[8, 32]), rollout={"tp": 4}))


@pytest.mark.parametrize("what", [np.uint16(0x7FC0), np.uint16(0xFF80)], ids=["NaN", "infinity"])
def test_numbers_that_are_none_are_named_before_anything_is_paused(what: np.uint16) -> None:
    world = build(quantised(SCHEMES["fp8 blocks"]), failure=FailurePolicy(attempts=3))
    world.commit(1)
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    world.hf[name][3, 5] = what
    for rank, buffer in enumerate(world.source):
        world._fill(world.layouts[0], rank, buffer, buffer.bytes)
    world.traps.log.clear()
    with pytest.raises(WeightsError, match=rf"trainer rank 1: 1 weights.*{name} \[.*\]: 1\. Nothing was sent"):
        world.sync.sync(2)
    assert not any("pause" in world.traps.verbs(f"engine {e.name}") for e in world.engines)
    assert world.traps.verbs("trainer 1").count("scan") == 1, "weights do not get better by asking again"
    assert world.sync.version == 1
    assert [(e.version, e.serving) for e in world.engines] == [(1, True)]
    assert not any(source.quiet for source in world.sources), "the trainer may step again"
    world.step()
    world.commit(2)


def test_numbers_that_are_none_may_be_let_through() -> None:
    world = build(quantised(SCHEMES["fp8 blocks"]))
    world.hf["model.layers.0.mlp.experts.0.up_proj.weight"][0, 0] = 0x7FC0
    for rank, buffer in enumerate(world.source):
        world._fill(world.layouts[0], rank, buffer, buffer.bytes)
    world.sync._spec = replace(world.sync._spec, finite=False)
    assert world.sync.sync(1).version == 1


def test_a_scale_that_changes_on_its_way_is_found_and_nothing_resumes() -> None:
    world = build(quantised(SCHEMES["fp8 blocks"]))

    def damage() -> None:
        world.target[0].arrays["model.layers.0.mlp.experts.w13_weight_scale_inv"].reshape(-1)[3] *= 2

    world.traps.do("worker 0", "verify", damage)
    with pytest.raises(VerifyError, match=r"experts\.\d\.(gate|up)_proj\.weight_scale_inv"):
        world.sync.sync(1)
    assert world.sync.version == -1
    assert not any(e.serving for e in world.engines)
    assert world.sync.state is State.FAILED
    world.commit(1)


def test_an_engine_that_joins_gets_values_and_scales() -> None:
    from session_support import admitted, spare

    world = build(quantised(SCHEMES["fp8 blocks"]))
    world.commit(1)
    one = spare(world, "late")
    world.sync.join(one.engine)
    admitted(world, one)
    world.step()
    world.commit(2)


def test_what_quantising_cost_is_reported() -> None:
    from weight_sync.observe.recorder import Recorder

    class Watch:
        def sync(self, version: int, session: str, *, nbytes: int | None = None) -> Recorder:
            self.recorder = Recorder(version, session)
            return self.recorder

    watch = Watch()
    world = build(quantised(SCHEMES["fp8 blocks"]), observer=watch)
    name = "model.layers.0.mlp.experts.0.up_proj.weight"
    world.hf[name][:8, :8] = 0
    world.become(SCHEMES["fp8 blocks"], [world.layouts[1].catalog.ids[name]])
    for rank, buffer in enumerate(world.source):
        world._fill(world.layouts[0], rank, buffer, buffer.bytes)
    world.commit(1)
    record = watch.recorder.record()
    assert record.figures["quant/zero_blocks"] == 1
    assert record.figures["quant/saturated"] == 0
    # e4m3 has three bits of mantissa: half a step of the largest values is 16 of 448
    assert 0 < record.figures["quant/max_relative_error"] <= 16 / 448 + 1e-6
    assert "quantise" in record.phases


def test_a_sync_without_a_report_says_nothing_and_sends_the_same() -> None:
    world = build(quantised(SCHEMES["fp8 blocks"]))
    world.sync._spec = replace(world.sync._spec, report=False)
    world.commit(1)
    assert all(agent._bound.quantiser.stats() is None for agent in world.source_agents)


def changed(world: World, rank: int, by: float) -> None:
    """The rank's weights are multiplied, as by a trainer that steps although it was told to stand."""
    for array in world.source[rank].arrays.values():
        values = np.asarray(array).view(ml_dtypes.bfloat16)
        with np.errstate(all="ignore"):  # what is not quantised is noise
            values[...] = (values.astype(np.float32) * by).astype(ml_dtypes.bfloat16)


@pytest.mark.parametrize(("level", "verb"), [(Level.FULL, "compare"), (Level.CHECK_WEIGHT_EQUAL, "scan")])
def test_stricter_levels_find_weights_that_shrank_after_their_magnitudes_were_taken(level: Level, verb: str) -> None:
    world = build(quantised(scheme("fp8_block", group=[16, 16])), level=level)
    world.traps.do("trainer 1", "write", lambda: changed(world, 1, 0.25))
    with pytest.raises(VerifyError, match=r"weights changed (during the sync: \d+ magnitudes|between two writes)"):
        world.sync.sync(1)
    assert verb in world.traps.verbs("trainer 1")
    assert (world.sync.version, [e.serving for e in world.engines]) == (-1, [False])


def test_a_write_after_a_new_binding_is_refused_until_weights_were_looked_at() -> None:
    world = build(cut_blocks())
    world.commit(1)
    agent, bound = world.source_agents[0], []
    bind = agent._bind
    agent._bind = lambda payload: (bound.append(payload), bind(payload))[1]  # type: ignore[method-assign]
    world.sync.connect()
    world.traps.do("trainer 0", "write", lambda: bind(bound[-1]))
    with pytest.raises(SessionError, match=r"trainer rank 0: write for session .* weights were last looked at for none"):
        world.sync.sync(2)
    assert (world.sync.version, [e.serving for e in world.engines]) == (1, [False])
    world.commit(2)


@pytest.mark.parametrize("budget", [Budget(), Budget(64, 64)])
def test_reading_back_makes_scales_of_cut_groups_anew_whatever_the_pieces_were(budget: Budget) -> None:
    world = build(quantised(scheme("fp8_block", group=[2, 24]), rollout={"tp": 1}), level=Level.FULL, budget=budget)
    assert len(world.sync.connect().schedule.straddles)
    world.commit(1)
    world.step()
    world.commit(2)


def test_rows_of_short_and_long_weights_get_the_scales_of_every_step() -> None:
    """Magnitudes of short rows are found again in each piece, those of long rows, which pieces cut, are kept."""
    sizes = SIZES | {"moe_intermediate_size": 1024, "intermediate_size": 1024, "num_hidden_layers": 1, "num_experts": 2}
    source, target = declared(sizes, {"ranks": 1, "tp": 1}, {"tp": 1})
    quant = Quantisation(scheme("fp8_channel"), Excludes("fp8")).to_json()
    world = build((replace(source, quant=quant), replace(target, quant=quant)), budget=Budget(1024, 1024))
    for version in (1, 2):
        world.commit(version)
        world.step()


@pytest.mark.parametrize("level", [Level.DIGEST, Level.OFF])
@pytest.mark.parametrize("report", [True, False])
def test_weights_that_grew_after_their_magnitudes_were_taken_are_found_at_every_level(level: Level, report: bool) -> None:
    world = build(quantised(scheme("fp8_block", group=[16, 16])), level=level, budget=Budget(2048, 2048))
    world.sync._spec = replace(world.sync._spec, report=report)
    world.commit(1) if level is Level.DIGEST else world.sync.sync(1)
    world.traps.do("trainer 1", "write", lambda: changed(world, 1, 4))
    with pytest.raises(VerifyError, match=r"trainer rank 1: weights changed .*: in \d+ groups an element is larger"):
        world.sync.sync(2)
    assert (world.sync.version, [e.serving for e in world.engines]) == (1, [False])
    assert not world.sync._fence.hurt, "its write was no failure: another source would not help"
