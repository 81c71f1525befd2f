"""Carrying out casts: against an oracle that knows only the bit layouts, and through a whole session."""

from __future__ import annotations

import copy
from dataclasses import replace
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from session_support import ALWAYS_DIRECT, MOE, NEVER_SHORT_RUNS, World, build, declared
from test_recorded import recorded

from weight_sync.config import engine_yaml, family_for, family_yaml
from weight_sync.errors import BindError, PlanError
from weight_sync.plan.schedule import Budget, CostModel
from weight_sync.session.casts import cast_into
from weight_sync.session.inputs import Declared
from weight_sync.session.verify import Level

_SHARED = {
    "num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 16, "moe_intermediate_size": 8, "n_routed_experts": 4,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "vocab_size": 50, "num_attention_heads": 4, "dtype": "bfloat16",
}  # fmt: skip
GLM45 = _SHARED | {
    "architectures": ["Glm4MoeForCausalLM"], "num_key_value_heads": 2, "head_dim": 4, "use_qk_norm": True,
    "attention_bias": True, "num_nextn_predict_layers": 1,
}  # fmt: skip
GLM5 = _SHARED | {
    "architectures": ["GlmMoeDsaForCausalLM"], "num_key_value_heads": 4, "q_lora_rank": 6, "kv_lora_rank": 4,
    "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 4, "index_head_dim": 8, "index_n_heads": 2,
}  # fmt: skip

ALL_BFLOAT16 = np.arange(1 << 16, dtype=np.uint16)


def cast(words: np.ndarray, source: str, target: str) -> np.ndarray:
    size = {"float32": 4, "bfloat16": 2}[target]
    return cast_into(np.zeros(words.size * size, np.uint8), words, source, target)


def nearest(word: int) -> set[int]:
    """The bfloat16 words that a float32 word may become: by exact arithmetic on the two neighbours of its value."""
    sign, exponent, fraction = word >> 31 << 15, word >> 23 & 0xFF, word & 0x7FFFFF
    if exponent == 0xFF and fraction:
        return set(range(0x7F81, 0x8000)) | set(range(0xFF81, 0x10000))  # some NaN

    def value(bits: int) -> Fraction:
        """Of a float32 word without its sign; infinity is what would follow the largest number."""
        e, f = bits >> 23, bits & 0x7FFFFF
        return Fraction(f, 1 << 149) if e == 0 else (Fraction(1) + Fraction(f, 1 << 23)) * Fraction(2) ** (e - 127)

    magnitude = word & 0x7FFFFFFF
    below = magnitude >> 16
    down = value(magnitude) - value(below << 16)
    up = value(below + 1 << 16) - value(magnitude)
    best = below if down < up else below + 1 if up < down else below + (below & 1)
    return {sign | best}


@given(st.integers(0, 2**32 - 1))
@example(0x00000001)  # the smallest denormal of float32, to zero
@example(0x80008000)  # half of bfloat16's smallest denormal, a tie, to -0
@example(0x00018000)  # a tie between two denormals, to the even one
@example(0x3F808000)  # a tie, down to the even one
@example(0x3F818000)  # a tie, up to the even one
@example(0x3F808001)
@example(0x7F7FFFFF)  # the largest float32, to infinity
@example(0x7F800000)
@example(0xFF800000)
@example(0x7F800001)  # a NaN whose payload a plain cut would turn into infinity
@example(0xFFFFFFFF)
def test_float32_becomes_the_nearest_bfloat16_ties_to_even(word: int) -> None:
    (found,) = cast(np.asarray([word], np.uint32), "float32", "bfloat16").tolist()
    assert found in nearest(word)


def test_every_bfloat16_keeps_its_bits_in_float32_and_comes_back() -> None:
    wide = cast(ALL_BFLOAT16, "bfloat16", "float32")
    assert (wide == ALL_BFLOAT16.astype(np.uint32) << 16).all()
    numbers = (ALL_BFLOAT16 & 0x7FFF) <= 0x7F80
    assert (cast(wide, "float32", "bfloat16") == ALL_BFLOAT16)[numbers].all()


def test_strided_sources_are_cast_in_row_major_order() -> None:
    words = np.arange(24, dtype=np.uint16).reshape(4, 6)
    out = np.zeros(24, np.uint8)
    found = cast_into(out, words[::2, 1:4].T[:, :2], "bfloat16", "float32")
    assert (found == words[::2, 1:4].T.astype(np.uint32) << 16).all()
    assert out.tobytes() == found.tobytes()


def test_a_cast_outside_the_closed_set_is_refused() -> None:
    with pytest.raises(PlanError, match="no cast from float16 to float32; legal: bfloat16 to float32, float32 to bfloat16"):
        cast_into(np.zeros(8, np.uint8), np.zeros(2, np.uint16), "float16", "float32")


# ---- whole sessions


def sides(config: dict[str, Any], engine: str) -> tuple[Declared, Declared]:
    """Trainer of 4 ranks (tp2, pp2, ep2), one engine of 2 workers."""
    family, convention = family_yaml(family_for(config)), engine_yaml(engine)
    source = Declared(family, config, {"ranks": 4, "tp": 2, "pp": 2, "ep": 2}, None, {"vocab_multiple": 16})
    return source, Declared(family, config, {"tp": 2, "remainder": convention["remainder"]}, convention)


@pytest.mark.parametrize(
    ("config", "engine", "costs", "level"),
    [
        (GLM45, "sglang", ALWAYS_DIRECT, Level.DIGEST),
        (GLM45, "vllm", NEVER_SHORT_RUNS, Level.FULL),
        (GLM5, "sglang", NEVER_SHORT_RUNS, Level.DIGEST),
        (GLM5, "vllm", ALWAYS_DIRECT, Level.FULL),
    ],
    ids=["glm45 sglang", "glm45 vllm", "glm5 sglang", "glm5 vllm"],
)
def test_what_an_engine_keeps_in_float32_is_cast_verified_and_committed(
    config: dict[str, Any], engine: str, costs: CostModel, level: Level
) -> None:
    world = build(sides(config, engine), costs=costs, budget=Budget(source=256, target=256), level=level)
    plan = world.sync.connect().plan
    cast = {plan.catalog.name(t).split(".", 3)[3] for t in plan.tensor[plan.casts].tolist()}
    norm = "self_attn.indexer.k_norm."
    assert cast == ({"mlp.gate.weight"} if config is GLM45 else {norm + "weight", norm + "bias"})
    for version in (1, 2):
        world.commit(version)
        world.step()


def trainer_in_fp32() -> tuple[Declared, Declared]:
    """Qwen3-MoE whose trainer keeps its routers in float32."""
    source, target = declared(MOE)
    family = copy.deepcopy(dict(source.family))
    family["mcore"]["router"] |= {"dtype": "float32", "value": "cast"}
    return replace(source, family=family), target


def test_what_a_trainer_keeps_in_float32_is_rounded_for_the_engine() -> None:
    world = build(trainer_in_fp32())
    for name in world.hf:
        if name.endswith("mlp.gate.weight"):
            world.hf[name] &= np.uint16(0xBFFF)  # numbers: which NaN a NaN becomes is not defined
    for rank, buffer in enumerate(world.source):
        world._fill(world.layouts[0], rank, buffer, buffer.bytes)
    world.commit(1)
    expected = world.expected()
    for buffer in world.source:  # less than half of a bfloat16 step more: rounded off again
        for name, array in buffer.arrays.items():
            if name.endswith("router.weight"):
                array |= np.uint32(0x7FFF)
    world.sync.sync(2)
    world.check(expected)


def float32_values(world: World) -> list[np.ndarray]:
    """Fill the trainer with float32 numbers. Returns what the engines must hold: ml_dtypes' bfloat16 of them."""
    values = {name: world.noise.standard_normal(words.shape, np.float32) for name, words in world.hf.items()}
    world.hf = {name: array.view(np.uint32) for name, array in values.items()}
    for rank, buffer in enumerate(world.source):
        world._fill(world.layouts[0], rank, buffer, buffer.bytes)
    world.hf = {name: array.astype(ml_dtypes.bfloat16).view(np.uint16) for name, array in values.items()}
    return world.expected()


@pytest.mark.parametrize("costs", [ALWAYS_DIRECT, NEVER_SHORT_RUNS], ids=["short", "long"])
@pytest.mark.parametrize("trainer", ["declared", "published", "published, the engine recorded"])
def test_a_trainer_that_holds_everything_in_float32_is_rounded_to_the_engines_bfloat16(costs: CostModel, trainer: str) -> None:
    source, target = declared(MOE)
    explicit = trainer != "declared"
    world = build((replace(source, held_as="float32"), target), explicit=explicit, costs=costs, budget=Budget(512, 512))
    world.sync._spec = replace(world.sync._spec, casts=("float32",))
    if trainer.endswith("recorded"):
        recorded(world)
    for version in (1, 2):
        expected = float32_values(world)
        world.sync.sync(version)
        world.check(expected)
    assert world.sync.connect().plan.casts.all()


@pytest.mark.parametrize("trainer", ["declared", "published"])
def test_a_float32_trainer_that_declares_no_cast_is_told_the_key_before_anything_is_paused(trainer: str) -> None:
    source, target = declared(MOE)
    if trainer == "declared":
        world = build((replace(source, config={**MOE, "dtype": "float32"}), target))
    else:
        world = build((replace(source, held_as="float32"), target), explicit=True)
    with pytest.raises(PlanError, match=r"is float32 on the trainer, bfloat16 on the rollout.*trainer\.casts=\[float32\]"):
        world.sync.sync(1)
    untouched(world)


def test_what_both_sides_hold_in_float32_is_moved_as_it_is_and_not_rounded_on_the_way() -> None:
    source, target = sides(GLM45, "sglang")
    world = build((replace(source, held_as="float32"), target))
    plan = world.sync.connect().plan
    moved = {plan.catalog.name(t).split(".", 3)[-1] for t in plan.tensor[~plan.casts].tolist()}
    assert moved == {"mlp.gate.weight", "mlp.gate.e_score_correction_bias"}


def test_a_cast_that_nobody_declares_is_refused_before_anything_is_paused() -> None:
    source, target = sides(GLM45, "sglang")
    convention = copy.deepcopy(dict(target.convention or {}))
    del convention["rules"]["router_in_fp32"]["value"]
    world = build((source, replace(target, convention=convention)))
    with pytest.raises(PlanError, match=r"mlp\.gate\.weight is bfloat16 on the trainer, float32 on the rollout.*value: cast"):
        world.sync.sync(1)
    untouched(world)


@pytest.mark.parametrize("said", ["nothing", "another cast", "another place"])
def test_a_declared_cast_that_the_engines_loader_does_otherwise_is_refused_before_anything_is_paused(said: str) -> None:
    world = build(sides(GLM5, "vllm"))
    recording = (world.engines[0]._recording or {})[1]
    name = "model.layers.1.self_attn.indexer.k_norm.weight"
    if said == "nothing":
        del recording["unexplained"][name]
        words = f"{name}: declared cast from bfloat16 to float32, but the loader applies a plain copy"
    elif said == "another cast":
        recording["unexplained"][name] = "cast from bfloat16 to float16"
        words = f"{name}: declared cast from bfloat16 to float32, but the loader applies cast from bfloat16 to float16"
    else:
        next(s for s in recording["shards"] if s["tensor"] == name)["start"] = 1
        words = f"{name} -> {name}: declared [0:8] at element 0 with strides [1], recorded [0:8] at element 1"
    with pytest.raises(BindError) as caught:
        world.sync.sync(1)
    assert words in str(caught.value)
    untouched(world)


def untouched(world: World) -> None:
    """Nothing was paused, no version moved."""
    assert not {verb for _, verb in world.traps.log} & {"pause", "begin", "resume", "write"}
    assert [(engine.serving, engine.version) for engine in world.engines] == [(True, -1)]
    assert world.sync.version == -1
