"""Family and engine files: what merges, what is refused, and what the errors say."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from layout_cases import engine, family, shipped
from layout_naive import Sizes

from weight_sync.errors import FamilyError
from weight_sync.layout.family import apply, load_convention, load_family, mcore_convention, merged
from weight_sync.layout.parallel import EngineDims, TrainerDims
from weight_sync.layout.resolve import dropped_names, resolve

BASE: dict[str, Any] = {
    "name": "base",
    "architectures": ["Base"],
    "config": {"hidden": "hidden_size", "layers": "num_layers", "experts": "num_experts", "tied": "tied"},
    "defaults": {"tied": 0, "experts": 2},
    "layer_sets": {"late": {"first": 1}},
    "tensors": {
        "embed": {"shape": ["hidden", 2]},
        "m.{l}.norm": {"shape": ["hidden"]},
        "m.{l}.e.{e}.w": {"shape": ["hidden", "hidden"], "layers": "late"},
    },
    "mcore": {
        "embed": {"rule": "rename", "hf": "embed", "param": "embed", "place": {"pp": "own first"}},
        "norm": {"rule": "rename", "hf": "m.{l}.norm", "param": "m.{n}.norm"},
        "w": {"rule": "rename", "hf": "m.{l}.e.{e}.w", "param": "m.{n}.w{i}", "place": {"ep": "own e", "etp": "split 0"}},
    },
}
CONFIG: dict[str, Any] = {"architectures": ["Base"], "hidden_size": 4, "num_layers": 2, "num_experts": 2, "dtype": "bfloat16"}


def loader(**known: Mapping[str, Any]) -> Callable[[str], Mapping[str, Any]]:
    def load(name: str) -> Mapping[str, Any]:
        if name not in known:
            raise FamilyError(f"unknown family {name!r}; known: {', '.join(sorted(known))}")
        return known[name]

    return load


def changed(**paths: Any) -> dict[str, Any]:
    """BASE with entries set (a/b/c=value) or, for None, taken away."""
    data = copy.deepcopy(BASE)
    for path, value in paths.items():
        *steps, last = path.split("/")
        at = data
        for step in steps:
            at = at.setdefault(step, {})
        if value is None:
            at.pop(last)
        else:
            at[last] = value
    return data


def build(data: Mapping[str, Any], dims: TrainerDims | None = None, config: Mapping[str, Any] = CONFIG) -> Any:
    parsed = load_family("base", loader(base=data))
    return resolve(apply(parsed, config), mcore_convention(parsed), dims or TrainerDims(1), "trainer")


def says(error: pytest.ExceptionInfo[Exception], words: list[str]) -> None:
    for word in words:
        assert word in str(error.value), f"{word!r} is not in: {error.value}"


def test_the_base_of_these_tests_is_itself_legal():
    assert len(build(BASE, TrainerDims(4, ep=2, etp=2)).params) == 4 * 4


# ---- extends


def test_a_child_adds_replaces_and_removes_by_key():
    child = {
        "extends": ["base"],
        "name": "child",
        "tensors": {"embed": None, "extra": {"shape": [1]}},
        "mcore": {
            "embed": None,
            "norm": {"rule": "rename", "hf": "m.{l}.norm", "param": "other.{n}"},
            "extra": {"rule": "drop", "hf": "extra", "reason": "a test"},
        },
    }
    parsed = load_family("child", loader(base=BASE, child=child))
    assert parsed.name == "child"
    assert set(parsed.tensors) == {"m.{l}.norm", "m.{l}.e.{e}.w", "extra"}
    assert parsed.mcore["norm"].param == "other.{n}"
    assert parsed.mcore["w"] == load_family("base", loader(base=BASE)).mcore["w"]


def test_later_parents_win_over_earlier_ones_and_diamonds_are_no_cycle():
    files = {
        "root": {"a": {"x": 1, "y": 1}},
        "left": {"extends": ["root"], "a": {"x": 2}},
        "right": {"extends": ["root"], "a": {"y": 3}},
        "both": {"extends": ["left", "right"], "b": 4},
    }
    assert merged("both", loader(**files)) == {"a": {"x": 1, "y": 3}, "b": 4}


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"a": {"extends": ["a"]}}, ["a -> a", "extend itself"]),
        ({"a": {"extends": ["b"]}, "b": {"extends": ["c"]}, "c": {"extends": ["a"]}}, ["a -> b -> c -> a"]),
        ({"a": {"extends": "b"}}, ["a: extends", "'b'"]),
        ({"a": {"extends": [1]}}, ["a: extends", "[1]"]),
        ({"a": {"extends": ["nobody"]}}, ["unknown family 'nobody'", "known: a"]),
        ({"a": []}, ["a", "must hold a mapping"]),
    ],
)
def test_a_wrong_extends_is_one_error(files, words):
    with pytest.raises(FamilyError) as caught:
        merged("a", loader(**files))
    says(caught, words)


def test_an_unknown_family_is_the_loaders_error_with_the_known_names():
    with pytest.raises(FamilyError) as caught:
        load_family("qwen4", lambda n: shipped("family", n))
    says(caught, ["'qwen4'", "qwen3", "qwen3_moe"])


# ---- the schema


@pytest.mark.parametrize(
    ("paths", "words"),
    [
        ({"tensor": {}}, ["family base", "tensor:", "Extra inputs"]),
        ({"mcore/norm/layer": "late"}, ["mcore.norm.rename.layer", "Extra inputs"]),
        ({"layer_sets/late/until_": 3}, ["layer_sets.late.until_"]),
        ({"architectures": None}, ["architectures", "required"]),
        ({"mcore/norm/rule": "renam"}, ["mcore.norm", "'rename'", "'qkv'"]),
        ({"mcore/norm/param": 3}, ["mcore.norm.rename.param", "valid string", "got 3"]),
        (
            {"mcore/norm/place": {"tp": "spilt 0"}},
            ["family base", "mcore.norm", "place.tp", "'spilt 0'", "'split DIM'", "'own ends'"],
        ),
        ({"mcore/norm/place": {"tp": "own x"}}, ["mcore.norm", "'own x'"]),
        ({"mcore/norm/place": ["tp"]}, ["mcore.norm", "place"]),
        ({"mcore/gone": {"rule": "drop", "hf": "embed", "reason": ""}}, ["mcore.gone.drop.reason", "at least 1 character"]),
        ({"mcore/gone": {"rule": "drop", "hf": "embed"}}, ["mcore.gone.drop.reason", "required"]),
        ({"tensors/embed": {"shape": [1.5]}}, ["tensors.embed.shape"]),
    ],
)
def test_unknown_keys_and_wrong_types_name_the_place_in_the_file(paths, words):
    with pytest.raises(FamilyError) as caught:
        load_family("base", loader(base=changed(**paths)))
    says(caught, words)


def test_an_unknown_key_of_an_engine_file_is_refused_too():
    data = dict(shipped("engine", "_fused")) | {"rulse": {}}
    with pytest.raises(FamilyError) as caught:
        load_convention("x", lambda _: data)
    says(caught, ["engine x", "rulse"])


# ---- a family and a model


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"architectures": ["Other"]}, ["family base", "for Base", "['Other']"]),
        ({"architectures": None}, ["for Base", "[]"]),
        ({"hidden_size": None}, ["hidden_size=None", "hidden needs an integer"]),
        ({"hidden_size": "4"}, ["hidden_size='4'"]),
        ({"hidden_size": 4.0}, ["hidden_size=4.0"]),
        ({"hidden_size": 0}, ["tensors.embed", "['hidden', 2] is [0, 2]", "at least 1"]),
        ({"hidden_size": -4}, ["[-4, 2]"]),
        ({"num_layers": 0}, ["layers=0", "at least 1"]),
        ({"num_experts": 0}, ["experts=0", "at least 1"]),
        ({"dtype": "float17"}, ["'float17'", "bfloat16"]),
        ({"dtype": "auto"}, ["'auto'"]),
    ],
)
def test_a_config_that_does_not_fit_names_the_key_and_its_value(config, words):
    with pytest.raises(FamilyError) as caught:
        build(BASE, config=CONFIG | config)
    says(caught, words)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("decoder_sparse_step", 0, ["layer_sets.", "decoder_sparse_step=0", "at least 1"]),
        ("decoder_sparse_step", "2", ["decoder_sparse_step='2'"]),
        ("mlp_only_layers", 3, ["mlp_only_layers", "list of layers", "got 3"]),
        ("mlp_only_layers", ["0"], ["mlp_only_layers", "['0']"]),
    ],
)
def test_layer_sets_refuse_config_values_that_are_no_step_or_no_list(key, value, words):
    config = Sizes(experts=2, expert_ffn=2).config() | {key: value}
    with pytest.raises(FamilyError) as caught:
        apply(family("qwen3_moe"), config)
    says(caught, ["family qwen3_moe", *words])


@pytest.mark.parametrize(
    ("paths", "words"),
    [
        ({"tensors/m.{l}.norm/layers": "early"}, ["tensors.m.{l}.norm", "early is not a layer set", "late, all"]),
        ({"tensors/x.{n}": {"shape": [1]}}, ["tensors.x.{n}", "not n"]),
        ({"tensors/m.1.norm": {"shape": ["hidden"]}}, ["same HF name", "m.1.norm"]),
        ({"tensors/embed/shape": ["hidden", "width"]}, ["tensors.embed", "unknown name 'width'", "hidden"]),
        ({"tensors/embed/dtype": "int3"}, ["tensors.embed", "'int3'"]),
        ({"mcore": {}}, ["family base", "no mcore rules"]),
        ({"tensors": {}}, ["family base", "no tensors"]),
        ({"refuse": {"layers > 1": "a reason"}}, ["family base is refused", "layers > 1", "a reason"]),
    ],
)
def test_tensors_that_cannot_be_are_refused_by_name(paths, words):
    with pytest.raises(FamilyError) as caught:
        build(changed(**paths))
    says(caught, words)


# ---- rules and a model

NORM = "m.{l}.norm"


@pytest.mark.parametrize(
    ("paths", "words"),
    [
        # What the issue lists: matches nothing, matched by nothing, matched twice.
        (
            {"mcore/x": {"rule": "rename", "hf": "m.{l}.nrom", "param": "x.{n}"}},
            ["rule x", "matches nothing", "m.{l}.nrom", NORM],
        ),
        (
            {"mcore/x": {"rule": "concat", "parts": [NORM, "m.{l}.bias"], "param": "x.{n}"}},
            ["rule x", "matches only some", "m.{l}.bias"],
        ),
        ({"mcore/norm": None}, ["family base, mcore", "no rule for m.{l}.norm", "drop rule with the reason"]),
        ({"mcore/norm/layers": "late"}, ["no rule for m.{l}.norm in layers 0"]),
        ({"mcore/norm/when": "tied"}, ["no rule for m.{l}.norm"]),
        ({"mcore/x": {"rule": "rename", "hf": NORM, "param": "x.{n}"}}, ["m.{l}.norm is placed by two rules, norm and x"]),
        ({"mcore/x": {"rule": "drop", "hf": NORM, "reason": "r"}}, ["m.{l}.norm is placed by two rules, norm and x"]),
        ({"mcore/x": {"rule": "tie", "hf": NORM, "param": "m.{n}.norm"}}, ["trainer rank 0", "m.0.norm", "norm and x"]),
        # Names.
        ({"mcore/norm/param": "m.norm"}, ["rule norm", "neither {l} nor {n}", "every layer"]),
        ({"mcore/norm/param": "m.{n}.{i}"}, ["rule norm", "{i}", "no experts"]),
        ({"mcore/norm/param": "m.{layer}"}, ["rule norm", "unknown placeholder layer"]),
        ({"mcore/embed/param": "embed.{n}"}, ["rule embed", "{n}", "no layers"]),
        ({"mcore/w/param": "m.{n}.w"}, ["rule w", "neither {e} nor {i}", "every expert"]),
        (
            {"mcore/w": {"rule": "stack", "parts": ["m.{l}.e.{e}.w"], "param": "m.{n}.w{e}"}},
            ["rule w", "{e}", "stacked in it"],
        ),
        # Placements.
        ({"mcore/norm/place": {"attn_tp": "split 0"}}, ["rule norm", "no axis 'attn_tp'", "ep, etp, pp, tp"]),
        ({"mcore/norm/place": {"vpp": "split 0"}}, ["rule norm", "no axis 'vpp'"]),
        ({"mcore/norm/place": {"tp": "own e"}}, ["rule norm", "place.tp", "no experts"]),
        ({"mcore/norm/place": {"tp": "own first"}}, ["rule norm", "place.tp", "for pp only"]),
        ({"mcore/norm/place": {"pp": "split 0"}}, ["rule norm", "place.pp", "stages hold tensors whole"]),
        ({"mcore/norm/place": {"pp": "own first"}}, ["rule norm", "must own layers over pp"]),
        ({"mcore/norm/place": {"tp": "split 1 by tp"}}, []),
        ({"mcore/embed/place": {"pp": "own l"}}, ["rule embed", "own l", "needs {l}"]),
        ({"mcore/embed/place": {"tp": "split 2"}}, ["rule embed", "2 dims", "splits dim 2"]),
        ({"mcore/w/place": {"ep": "own e", "tp": "own e"}}, ["rule w", "ep and tp", "only one axis"]),
        # Each kind of rule.
        ({"mcore/norm/dtype": "float17"}, ["rule norm", "'float17'"]),
        ({"mcore/norm/value": "cast"}, ["rule norm", "cast needs a dtype"]),
        ({"mcore/norm/value": "cast", "mcore/norm/dtype": "float16"}, ["rule norm", "bfloat16", "cast to float16; legal: bf"]),
        ({"mcore/norm/value": "minus_one"}, ["mcore.norm", "minus_one is not carried out", "weight - 1", "legal: cast"]),
        ({"mcore/norm/value": "gated_qkv"}, ["mcore.norm", "gated_qkv is not carried out"]),
        ({"mcore/norm/value": "sqrt"}, ["mcore.norm", "unknown value function 'sqrt'", "legal: cast"]),
        ({"mcore/embed/layers": "late"}, ["rule embed", "'late'", "no {l}"]),
        ({"mcore/norm/layers": "early"}, ["rule norm", "early is not a layer set", "late, all"]),
        ({"mcore/norm": {"rule": "stack", "parts": [NORM], "param": "x.{n}"}}, ["rule norm", "only tensors with {e}"]),
        ({"mcore/norm": {"rule": "transpose", "hf": NORM, "param": "x.{n}"}}, ["rule norm", "only matrices", "[4]"]),
        ({"mcore/norm": {"rule": "concat", "parts": [NORM, "embed"], "param": "x.{n}"}}, ["rule norm", "differ in layers"]),
        ({"mcore/norm": {"rule": "pad", "hf": NORM, "param": "x.{n}", "multiple": "tied"}}, ["rule norm", "multiple of 0"]),
        (
            {"mcore/norm": {"rule": "unstack", "hf": NORM, "param": "x.{n}.{e}", "experts": "hidden + 1"}},
            ["rule norm", "[4]", "hidden + 1 = 5"],
        ),
        (
            {"mcore/norm": {"rule": "qkv", "q": NORM, "k": NORM, "v": NORM, "param": "x.{n}", "groups": "1", "head_dim": "4"}},
            ["placed by two rules, norm and norm"],
        ),
    ],
)
def test_a_rule_that_cannot_hold_is_one_error_naming_family_rule_and_tensor(paths, words):
    if not words:  # a vector is whole on every rank where its weight is cut along dim 1
        build(changed(**paths))
        return
    with pytest.raises(FamilyError) as caught:
        build(changed(**paths))
    says(caught, words)


def test_parts_that_do_not_join_print_their_boxes():
    data = changed(**{"tensors/b": {"shape": [3, 3]}, "mcore/embed": {"rule": "concat", "parts": ["embed", "b"], "param": "x"}})
    with pytest.raises(FamilyError) as caught:
        build(data)
    says(caught, ["rule embed", "embed [0:4, 0:2]", "b [0:3, 0:3]", "along dim 0"])
    with pytest.raises(FamilyError) as caught:
        build(
            changed(
                **{
                    "tensors/b": {"shape": [4, 2]},
                    "mcore/embed": {"rule": "concat", "parts": ["embed", "b"], "param": "x", "dim": 2},
                }
            )
        )
    says(caught, ["rule embed", "along dim 2", "2 dims"])


def test_qkv_shapes_that_do_not_fit_the_groups_are_printed():
    sizes = Sizes(heads=4, kv_heads=2)
    parsed = family("qwen3")
    wrong = parsed.model_copy(
        update={"mcore": dict(parsed.mcore) | {"qkv": parsed.mcore["qkv"].model_copy(update={"groups": "3"})}}
    )
    with pytest.raises(FamilyError) as caught:
        resolve(apply(wrong, sizes.config()), mcore_convention(wrong), TrainerDims(1), "trainer", vocab_multiple=1)
    says(caught, ["rule qkv", "q (8, 8)", "k (4, 8)", "3 KV groups of head_dim 2"])


def test_a_size_of_the_model_may_not_hide_a_parallel_axis():
    data = changed(**{"config/tp": "hidden_size"})
    with pytest.raises(FamilyError) as caught:
        build(data)
    says(caught, ["family base", "tp is a size of the model and a parallel axis of the trainer"])


def test_a_symbol_that_nobody_gave_is_named():
    parsed = family("qwen3")
    with pytest.raises(FamilyError) as caught:
        resolve(apply(parsed, Sizes().config()), mcore_convention(parsed), TrainerDims(1), "trainer")
    says(caught, ["rule embedding", "unknown name 'vocab_multiple'"])


def test_the_engine_axis_cannot_be_cut():
    data = {
        "name": "x",
        "rules": {"r": {"rule": "rename", "hf": "model.norm.weight", "param": "p", "place": {"engine": "split 0"}}},
    }
    from weight_sync.layout.family import engine_convention

    rules = dict(engine().rules) | engine_convention(load_convention("x", lambda _: data)).rules
    del rules["final_norm"]
    convention = engine_convention(load_convention("x", lambda _: data))
    object.__setattr__(convention, "rules", rules)
    object.__setattr__(convention, "defaults", engine().defaults)
    with pytest.raises(FamilyError) as caught:
        resolve(apply(family("qwen3"), Sizes().config()), convention, EngineDims(engines=2), "rollout")
    says(caught, ["rule r", "every engine holds the whole model"])


def test_dropped_names_are_every_instance_of_the_template():
    data = changed(**{"mcore/w": {"rule": "drop", "hf": "m.{l}.e.{e}.w", "reason": "a test"}})
    parsed = load_family("base", loader(base=data))
    names = dropped_names(apply(parsed, CONFIG), mcore_convention(parsed), TrainerDims(1), "trainer")
    assert names == ("m.1.e.0.w", "m.1.e.1.w")
