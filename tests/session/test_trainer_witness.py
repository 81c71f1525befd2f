"""weight_sync.verify.trainer_witness: a trainer that holds other HF elements than declared is found by its own export, before
anything is paused. Digests and the engines' witness agree in all these cases.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from session_support import MOE, World, build, declared
from test_quantised import SCHEMES, quantised

from weight_sync.errors import BindError, SessionError
from weight_sync.session import exported
from weight_sync.session.failure import FailurePolicy
from weight_sync.session.inprocess import typed
from weight_sync.session.inputs import Declared, layout_of
from weight_sync.session.silent import SilentObserver

Tensors = dict[str, Any]
Damage = Callable[[Declared], Declared]


def hf_tensors(world: World) -> Tensors:
    """What the trainer would save now: what its parameters were filled from."""
    return {name: typed(words, "bfloat16") for name, words in world.hf.items()}


class Exports:
    """The export of all ranks. tensors: what it yields. fails: by rank, after how many tensors it raises. held: the trainer
    must stand still meanwhile."""

    def __init__(self, world: World, tensors: Callable[[], Tensors]) -> None:
        self.world, self.tensors = world, tensors
        self.fails: dict[int, int] = {}
        self.held = True
        self.begun: list[int] = []
        self.ended: list[int] = []

    def of(self, rank: int) -> Iterator[tuple[str, Any]]:
        self.begun.append(rank)
        for count, item in enumerate(self.tensors().items()):
            assert self.world.sources[rank].quiet or not self.held, "a step could change what is compared"
            if count == self.fails.get(rank):
                raise RuntimeError("no memory for the gather")
            yield item
        self.ended.append(rank)


def watched(world: World, tensors: Callable[[], Tensors] | None = None) -> Exports:
    """Switch the witness on, with an export for every rank."""
    world.sync._spec = replace(world.sync._spec, trainer_witness=True)
    exports = Exports(world, tensors or (lambda: hf_tensors(world)))
    for agent in world.source_agents:
        agent._export = lambda rank=agent.rank: exports.of(rank)
    return exports


def refused(world: World, *words: str) -> str:
    """The sync is refused before anything was paused or written. Returns the error with its notes."""
    with pytest.raises(BindError) as caught:
        world.sync.sync(1)
    verbs = {verb for _, verb in world.traps.log}
    assert not verbs & {"quiesce", "pause", "begin", "write", "bind", "resume"}
    assert [(engine.serving, engine.version) for engine in world.engines] == [(True, -1)] * len(world.engines)
    assert world.sync.version == -1
    assert not any(source.quiet for source in world.sources), "the trainer was not released"
    text = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    for word in words:
        assert word in text, text
    return text


def wrongly_declared(world: World, damage: Damage) -> None:
    """The live trainer stays what it is, and is declared otherwise."""
    assert world.sync._spec.trainer is not None
    wrong = damage(world.sync._spec.trainer)
    assert layout_of(wrong, "trainer").digest != world.layouts[0].digest, "no damage"
    world.sync._spec = replace(world.sync._spec, trainer=wrong)


def with_rule(label: str, **changes: Any) -> Damage:
    def damage(side: Declared) -> Declared:
        family = copy.deepcopy(dict(side.family))
        family["mcore"][label] |= changes
        return replace(side, family=family)

    return damage


def up_before_gate(side: Declared) -> Declared:
    return with_rule("experts_in", parts=list(reversed(side.family["mcore"]["experts_in"]["parts"])))(side)


LAYER = "model.layers.{l}.self_attn."
NORM = "model.layers.{l}.input_layernorm.weight", "model.layers.{l}.post_attention_layernorm.weight"
WRONG: dict[str, tuple[Damage, str]] = {
    "up before gate": (up_before_gate, "model.layers.0.mlp.experts.0.gate_proj.weight in decoder.layers.0.mlp.experts."),
    "keys and values exchanged": (
        with_rule("qkv", k=LAYER + "v_proj.weight", v=LAYER + "k_proj.weight"),
        "model.layers.0.self_attn.k_proj.weight in decoder.layers.0.self_attention.linear_qkv.weight",
    ),
    "keys before queries": (
        with_rule("qkv", q=LAYER + "k_proj.weight", k=LAYER + "q_proj.weight"),
        "model.layers.1.self_attn.q_proj.weight in decoder.layers.1.self_attention.linear_qkv.weight",
    ),
    "two norms exchanged": (
        lambda side: with_rule("sparse_norm", hf=NORM[0])(with_rule("attention_norm", hf=NORM[1])(side)),
        "model.layers.0.input_layernorm.weight in decoder.layers.0.pre_mlp_layernorm.weight: 24 of 24 elements differ",
    ),
    "query norm taken for key norm": (
        lambda side: with_rule("q_norm", hf=LAYER + "k_norm.weight")(with_rule("k_norm", hf=LAYER + "q_norm.weight")(side)),
        "model.layers.0.self_attn.k_norm.weight in decoder.layers.0.self_attention.q_layernorm.weight",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_declaration_is_committed_without_the_witness_and_refused_with_it(case: str) -> None:
    damage, words = WRONG[case]
    world = build()
    wrongly_declared(world, damage)
    world.sync.sync(1)  # every digest agrees, the engines' witness too
    with pytest.raises(AssertionError, match="bytes differ"):
        world.check(world.expected())

    world = build()
    wrongly_declared(world, damage)
    exports = watched(world)
    text = refused(
        world, words, "trainer rank 0: the declared layout is not what the trainer's own export holds", "trainer rank 1"
    )
    assert "elements differ, first at [" in text
    assert "exported" in text
    assert sorted(exports.ended) == [0, 1], "a rank that finds a difference goes on to the end, where the others wait"


def test_a_refusal_by_the_witness_is_not_tried_again_for_the_export_would_say_the_same() -> None:
    world = build(failure=FailurePolicy(attempts=3))
    wrongly_declared(world, WRONG["two norms exchanged"][0])
    exports = watched(world)
    refused(world, "the declared layout is not what the trainer's own export holds")
    assert sorted(exports.ended) == [0, 1]


@pytest.mark.parametrize("explicit", [False, True], ids=["declared", "published"])
def test_a_right_declaration_passes_and_is_compared_element_by_element(explicit: bool) -> None:
    world = build(explicit=explicit)
    exports = watched(world)
    world.commit(1)
    assert sorted(exports.ended) == [0, 1]
    assert all(agent._witnessed == world.layouts[0].digest for agent in world.source_agents)


def test_the_witness_is_heard_once_for_a_layout_and_again_after_a_rank_was_restarted() -> None:
    world = build()
    exports = watched(world)
    for version in (1, 2):
        world.commit(version)
        world.step()
        world.sync._connection = None  # connect again, as after a failure
    assert sorted(exports.ended) == [0, 1]
    world.restart_trainer(1)
    world.source_agents[1]._export = lambda: exports.of(1)
    world.commit(3)
    assert sorted(exports.ended) == [0, 0, 1, 1]


@pytest.mark.parametrize("name", ["fp8 blocks", "int4 groups", "nvfp4"])
def test_weights_that_are_quantised_on_their_way_are_compared_as_the_trainer_holds_them(name: str) -> None:
    world = build(quantised(SCHEMES[name], rollout={"tp": 1}))
    exports = watched(world)
    world.commit(1)
    assert sorted(exports.ended) == [0, 1]
    other = build(quantised(SCHEMES[name], rollout={"tp": 1}))
    wrongly_declared(other, up_before_gate)
    watched(other)
    refused(other, "mlp.experts.0.gate_proj.weight in decoder.layers.0.mlp.experts.linear_fc1.weight0: ")


def test_what_was_compared_is_said_once() -> None:
    said: list[str] = []

    class Heard(SilentObserver):
        def say(self, text: str) -> None:
            said.append(text)

    world = build(observer=Heard())
    watched(world)
    elements = sum(int(np.prod(s.box.shape)) for rank in (0, 1) for s in world.layouts[0].rank_shards(rank))
    for version in (1, 2):
        world.commit(version)
    assert said == [f"the trainer's own export agrees with its layout: {elements} elements compared on 2 ranks"]


def test_nothing_is_exported_by_default() -> None:
    world = build()
    exports = watched(world)
    world.sync._spec = replace(world.sync._spec, trainer_witness=False)
    world.commit(1)
    assert exports.begun == []
    assert "witness" not in {verb for _, verb in world.traps.log}


def test_shards_published_at_a_wrong_offset_are_refused() -> None:
    world = build(explicit=True)
    first, second = (source.shards for source in world.sources)
    name = "model.layers.1.self_attn.o_proj.weight"
    one, other = (next(s for s in shards if s["tensor"] == name) for shards in (first, second))
    one["offset"], other["offset"] = other["offset"], one["offset"]
    watched(world)
    refused(world, "trainer rank 0", f"{name} in {name}: 288 of 288 elements differ, first at [12, 0] (element 0 of")


def test_a_parameter_that_is_published_transposed_is_refused() -> None:
    world = build(declared(trainer={"ranks": 1}), explicit=True)
    name = "model.layers.0.self_attn.o_proj.weight"
    shard = next(s for s in world.sources[0].shards or [] if s["tensor"] == name)
    shard["strides"] = shard["strides"][::-1]
    watched(world)
    words = np.asarray(world.hf[name])
    first = np.argwhere(words != words.T)[0].tolist()
    values = words.view(ml_dtypes.bfloat16)
    there, sent = (f"{values[tuple(i)]} ({int(words[tuple(i)]):#06x})" for i in (first[::-1], first))
    refused(world, f"{(words != words.T).sum()} of 576 elements differ, first at {first}", f"{there} there and {sent} exported")


def test_a_tensor_that_is_not_exported_was_never_compared_and_is_refused() -> None:
    world = build()
    missing = "model.layers.1.mlp.gate.weight"
    watched(world, lambda: {n: t for n, t in hf_tensors(world).items() if n != missing})
    refused(world, f"{missing}: declared to be in decoder.layers.1.mlp.router.weight, but never exported", "trainer rank 1")


@pytest.mark.parametrize("trainer", [{"ranks": 2, "tp": 2, "ep": 2}, {"ranks": 2, "pp": 2}], ids=["tp2", "pp2"])
def test_a_tensor_that_the_plan_does_not_have_is_refused(trainer: dict[str, int]) -> None:
    """With pp2 no rank holds all tensors of that shape, and none may think that another one knows it."""
    world = build(declared(trainer=trainer))
    extra = typed(np.arange(24, dtype=np.uint16), "bfloat16")
    watched(world, lambda: hf_tensors(world) | {"model.layers.0.self_attn.o_proj.bias": extra})
    text = refused(world, "model.layers.0.self_attn.o_proj.bias [24]: exported, but the plan has no such tensor")
    assert text.count("o_proj.bias") == 2, "not on both ranks"


def test_a_second_name_for_values_that_the_plan_has_is_no_other_tensor() -> None:
    """The head of a tied model, which some exporters write."""
    config = MOE | {"tie_word_embeddings": True}
    world = build(declared(config))
    watched(world, lambda: hf_tensors(world) | {"lm_head.weight": hf_tensors(world)["model.embed_tokens.weight"]})
    world.commit(1)
    other = build(declared(config))
    head = typed(other.hf["model.embed_tokens.weight"].copy(), "bfloat16")
    head[49, 23] ^= 1  # of the rows that rank 1 holds
    watched(other, lambda: hf_tensors(other) | {"lm_head.weight": head})
    assert "trainer rank 0" not in refused(other, "trainer rank 1", "lm_head.weight [50, 24]: exported, but")


def test_a_tensor_of_another_shape_or_dtype_is_refused() -> None:
    world = build()
    name = "model.layers.0.self_attn.o_proj.weight"
    shape = {name: typed(world.hf[name][:, :23], "bfloat16")}
    kind = {"model.norm.weight": typed(world.hf["model.norm.weight"], "float16")}
    watched(world, lambda: hf_tensors(world) | shape | kind)
    refused(
        world,
        f"{name}: exported with shape [24, 23], declared [24, 24]",
        "model.norm.weight in decoder.final_layernorm.weight: exported as float16, which is not what is held or sent: bfloat16",
    )


def float32_trainer(explicit: bool) -> tuple[World, Mapping[str, np.ndarray]]:
    source, target = declared()
    world = build((replace(source, held_as="float32"), target), explicit=explicit)
    world.sync._spec = replace(world.sync._spec, casts=("float32",))
    values = {name: world.noise.standard_normal(words.shape, np.float32) for name, words in world.hf.items()}
    world.hf = {name: array.view(np.uint32) for name, array in values.items()}
    for rank, buffer in enumerate(world.source):
        world._fill(world.layouts[0], rank, buffer, buffer.bytes)
    world.hf = {name: array.astype(ml_dtypes.bfloat16).view(np.uint16) for name, array in values.items()}
    return world, values


@pytest.mark.parametrize("explicit", [False, True], ids=["declared", "published"])
@pytest.mark.parametrize("as_", ["float32", "bfloat16"])
def test_declared_casts_are_applied_before_the_comparison(as_: str, explicit: bool) -> None:
    world, values = float32_trainer(explicit)

    def tensors() -> Tensors:
        if as_ == "bfloat16":
            return hf_tensors(world)
        return {name: typed(array.view(np.uint32), "float32") for name, array in values.items()}

    watched(world, tensors)
    expected = world.expected()
    world.sync.sync(1)
    world.check(expected)


def test_a_difference_below_the_rounding_of_a_cast_is_found_in_an_export_of_the_parameters_own_dtype() -> None:
    world, values = float32_trainer(False)
    name = "model.norm.weight"
    moved = {n: typed(array.view(np.uint32).copy(), "float32") for n, array in values.items()}
    moved[name][3] ^= 1
    watched(world, lambda: moved)
    refused(world, f"{name} in decoder.final_layernorm.weight: 1 of 24 elements differ, first at [3]")


def test_an_export_that_raises_on_one_rank_is_refused_with_what_was_found_and_where_it_stood() -> None:
    world = build()
    exports = watched(world)
    exports.fails = {1: 3}
    third = list(world.hf)[2]
    refused(
        world, f"trainer rank 1: the trainer's own export failed after {third}, its tensor number 3: RuntimeError: no memory"
    )
    assert exports.ended == [0]
    exports.fails = {}
    world.commit(1)


def test_an_export_that_raises_at_once_is_refused() -> None:
    world = build()
    watched(world).fails = {0: 0, 1: 0}
    refused(world, "trainer rank 0: the trainer's own export failed before its first tensor", "trainer rank 1")


def test_a_rank_that_cannot_compare_still_takes_part_in_the_export() -> None:
    world = build()
    exports = watched(world)
    exports.held = False

    def busy() -> None:
        raise SessionError("trainer rank 1: quiesce() during a sync")

    world.sources[1].__class__ = type("Busy", (type(world.sources[1]),), {"__slots__": (), "quiesce": lambda self: busy()})
    with pytest.raises(SessionError, match="trainer rank 1: quiesce"):
        world.sync.sync(1)
    assert sorted(exports.ended) == [0, 1]
    assert not any(verb == "pause" for _, verb in world.traps.log)


def test_a_source_without_an_export_is_refused_by_name_before_anything_is_planned() -> None:
    world = build()
    watched(world)
    world.source_agents[1]._export = None
    refused(
        world, "weight_sync.verify.trainer_witness", "trainer ranks 1 (ArraySource) have none", "pass export= to SourceAgent"
    )
    assert not {verb for _, verb in world.traps.log} & {"plan", "witness"}


def test_large_tensors_are_compared_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exported, "PIECE", 100)
    world = build()
    watched(world)
    world.commit(1)
    other = build()
    tensors = hf_tensors(other)
    name = "lm_head.weight"
    tensors[name] = typed(np.asarray(tensors[name]).copy(), "bfloat16")
    tensors[name][40, 7] ^= 1
    tensors[name][44, 2] ^= 1
    watched(other, lambda: tensors)
    refused(other, f"{name} in output_layer.weight: 2 of ", "first at [40, 7]")
