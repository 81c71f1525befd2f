"""Every kind of rule against numpy: what the parameter is made of, and that reading it backwards gives the tensors back."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layout_cases import assemble, declared_fillings, fillings, read_back
from layout_naive import Array, Ids, Params, padded, part

from weight_sync.errors import FamilyError
from weight_sync.layout.family import apply, load_family, mcore_convention
from weight_sync.layout.parallel import TrainerDims
from weight_sync.layout.resolve import resolve
from weight_sync.layout.table import Layout

relaxed = settings(deadline=None, max_examples=40)
few = st.integers(1, 3)
ranks = st.sampled_from([1, 2, 3, 4])


def declare(tensors: dict[str, Any], rules: dict[str, Any], dims: TrainerDims, **sizes: int) -> Layout:
    """The layout that some tensors and rules give on a trainer. sizes become both symbols and HF config."""
    data = {
        "name": "test",
        "architectures": ["Test"],
        "config": {key: key for key in sizes},
        "tensors": {name: value if isinstance(value, dict) else {"shape": value} for name, value in tensors.items()},
        "mcore": rules,
    }
    family = load_family("test", lambda _: data)
    model = apply(family, {"architectures": ["Test"], "dtype": "float32", **sizes})
    return resolve(model, mcore_convention(family), dims, "trainer")


def check(layout: Layout, ids: Ids, want: Params) -> None:
    """The shards build `want`, declare its padding, and find every HF tensor in it again."""
    have = assemble(layout, ids.tensors)
    for rank, params in enumerate(want):
        assert have[rank].keys() == params.keys(), f"rank {rank}"
        for name, array in params.items():
            assert have[rank][name].shape == array.shape, f"rank {rank} {name}"
            assert (have[rank][name] == array).all(), f"rank {rank} {name}"
    assert declared_fillings(layout) == fillings(want)
    for name, array in read_back(layout, want, ids.tensors).items():
        assert (array == ids.tensors[name]).all(), name


def tensor(**shapes: tuple[int, ...]) -> Ids:
    ids = Ids()
    for name, shape in shapes.items():
        ids.add(name, *shape)
    return ids


@relaxed
@given(few, few, few, ranks, ranks, st.permutations([0, 1, 2]))
def test_rename_cuts_any_dim_over_any_axis(a, b, c, tp, cp, dims):
    sizes = [a, b, c]
    sizes[dims[0]] *= tp
    sizes[dims[1]] *= cp
    ids = tensor(x=tuple(sizes))
    rule = {"rule": "rename", "hf": "x", "param": "p", "place": {"tp": f"split {dims[0]}", "cp": f"split {dims[1]}"}}
    layout = declare({"x": sizes}, {"r": rule}, TrainerDims(tp * cp, tp=tp, cp=cp))
    x = ids.tensors["x"]
    check(layout, ids, [{"p": part(part(x, dims[0], tp, r % tp), dims[1], cp, r // tp)} for r in range(tp * cp)])


@relaxed
@given(few, ranks, ranks, few)
def test_two_axes_may_cut_one_dim_one_after_the_other(a, tp, cp, b):
    ids = tensor(x=(a * tp * cp, b))
    rule = {"rule": "rename", "hf": "x", "param": "p", "place": {"tp": "split 0", "cp": "split 0"}}
    layout = declare({"x": [a * tp * cp, b]}, {"r": rule}, TrainerDims(tp * cp, tp=tp, cp=cp))
    x = ids.tensors["x"]
    check(layout, ids, [{"p": part(part(x, 0, tp, r % tp), 0, cp, r // tp)} for r in range(tp * cp)])


@relaxed
@given(few, ranks)
def test_the_bias_of_a_row_parallel_weight_is_whole_everywhere(a, tp):
    ids = tensor(x=(a,))
    rule = {"rule": "rename", "hf": "x", "param": "p", "place": {"tp": "split 1"}}
    check(declare({"x": [a]}, {"r": rule}, TrainerDims(tp, tp=tp)), ids, [{"p": ids.tensors["x"]}] * tp)


def test_a_scalar_is_a_tensor_too():
    ids = tensor(x=(), y=(2, 2))
    rules = {key: {"rule": "rename", "hf": key, "param": f"p.{key}"} for key in "xy"}
    want = [{f"p.{key}": ids.tensors[key] for key in "xy"}]
    check(declare({"x": [], "y": [2, 2]}, rules, TrainerDims(1)), ids, want)


@relaxed
@given(few, few, ranks, st.sampled_from([0, 1]))
def test_transpose_cuts_the_hf_tensor_and_then_turns_it(a, b, tp, dim):
    shape = [a, b]
    shape[dim] *= tp
    ids = tensor(x=tuple(shape))
    rule = {"rule": "transpose", "hf": "x", "param": "p", "place": {"tp": f"split {dim}"}}
    layout = declare({"x": shape}, {"r": rule}, TrainerDims(tp, tp=tp))
    check(layout, ids, [{"p": part(ids.tensors["x"], dim, tp, r).T} for r in range(tp)])


@relaxed
@given(st.lists(few, min_size=1, max_size=3), few, ranks, st.sampled_from([0, 1]), st.sampled_from([0, 1]))
def test_concat_joins_the_cut_parts_along_either_dim(along, other, tp, dim, split):
    shapes = []
    for a in along:
        shape = [0, 0]
        shape[dim], shape[1 - dim] = a, other
        shape[split] *= tp
        shapes.append(tuple(shape))
    ids = tensor(**{f"x{i}": shape for i, shape in enumerate(shapes)})
    rule = {"rule": "concat", "parts": list(ids.tensors), "dim": dim, "param": "p", "place": {"tp": f"split {split}"}}
    layout = declare({f"x{i}": list(s) for i, s in enumerate(shapes)}, {"r": rule}, TrainerDims(tp, tp=tp))
    want = [{"p": np.concatenate([part(x, split, tp, r) for x in ids.tensors.values()], axis=dim)} for r in range(tp)]
    check(layout, ids, want)


@relaxed
@given(st.sampled_from([(1, 4), (2, 4), (4, 4), (4, 2), (6, 3), (3, 6)]), few, few, few)
def test_units_are_cut_whole_and_replicated_when_there_are_fewer_than_ranks(case, width, other, plain):
    units, tp = case
    ids = tensor(q=(tp * plain, other), k=(units * width, other))
    rule = {
        "rule": "concat",
        "parts": ["q", {"hf": "k", "units": "units"}],
        "param": "p",
        "place": {"tp": "split 0"},
    }
    layout = declare({"q": [tp * plain, other], "k": [units * width, other]}, {"r": rule}, TrainerDims(tp, tp=tp), units=units)
    k = np.repeat(ids.tensors["k"].reshape(units, width, other), max(1, tp // units), axis=0)
    want = [{"p": np.concatenate([part(ids.tensors["q"], 0, tp, r), part(k, 0, tp, r).reshape(-1, other)])} for r in range(tp)]
    check(layout, ids, want)


@relaxed
@given(few, few, few, few, ranks, st.booleans(), st.booleans())
def test_qkv_lays_each_groups_queries_key_and_value_together_and_cuts_anywhere(groups, per, head, hidden, tp, bias, cut_rows):
    rows = [groups * per * head, groups * head, groups * head]
    if cut_rows and sum(rows) % tp:
        tp = 1
    if not cut_rows:
        hidden *= tp
    tail = [] if bias else [hidden]
    ids = tensor(**{x: (n, *tail) for x, n in zip("qkv", rows, strict=True)})
    place = {"tp": "split 0" if cut_rows else "split 1"}
    rule = {"rule": "qkv", "q": "q", "k": "k", "v": "v", "groups": "groups", "head_dim": "head", "param": "p", "place": place}
    layout = declare(
        {x: [n, *tail] for x, n in zip("qkv", rows, strict=True)}, {"r": rule}, TrainerDims(tp, tp=tp), groups=groups, head=head
    )
    lanes = [ids.tensors[x].reshape(groups, -1, *tail) for x in "qkv"]
    whole = np.concatenate(lanes, axis=1).reshape(-1, *tail)
    if cut_rows:
        check(layout, ids, [{"p": part(whole, 0, tp, r)} for r in range(tp)])
    else:
        check(layout, ids, [{"p": whole if bias else part(whole, 1, tp, r)} for r in range(tp)])


def experts_of(count: int, ep: int, rank: int) -> list[int]:
    return np.split(np.arange(count), ep)[rank].tolist()


@relaxed
@given(few, few, few, st.sampled_from([1, 2, 3]), st.sampled_from([1, 2]), st.booleans(), st.sampled_from([0, 1]), few)
def test_stack_lays_experts_behind_each_other_plain_or_transposed(each, a, b, ep, etp, flip, split, layers):
    shape = [a, b]
    shape[split] *= etp
    ids = Ids()
    names = ["m.{l}.e.{e}.gate", "m.{l}.e.{e}.up"]
    for name in names:
        for layer in range(layers):
            for e in range(each * ep):
                ids.add(name.replace("{l}", str(layer)).replace("{e}", str(e)), *shape)
    rule = {
        "rule": "stack",
        "parts": names,
        "transpose": flip,
        "param": "p.{n}",
        "place": {"ep": "own e", "etp": f"split {split}"},
    }
    dims = TrainerDims(ep * etp, ep=ep, etp=etp)
    layout = declare(dict.fromkeys(names, shape), {"r": rule}, dims, layers=layers, experts=each * ep)
    want: Params = []
    for rank in range(ep * etp):
        mine: dict[str, Array] = {}
        for layer in range(layers):
            stack = []
            for e in experts_of(each * ep, ep, rank // etp):
                halves = [part(ids.tensors[f"m.{layer}.e.{e}.{x}"], split, etp, rank % etp) for x in ("gate", "up")]
                joined = np.concatenate(halves)
                stack.append(joined.T if flip else joined)
            mine[f"p.{layer}"] = np.stack(stack)
        want.append(mine)
    check(layout, ids, want)


@relaxed
@given(few, few, few, st.sampled_from([1, 2, 3]), st.sampled_from([1, 2]), st.sampled_from([1, 2]), st.booleans())
def test_unstack_gives_each_expert_slice_a_parameter_of_its_own(each, a, b, ep, etp, split, local):
    shape = [each * ep, a, b]
    shape[split] *= etp
    ids = Ids()
    for layer in range(2):
        ids.add(f"m.{layer}.w", *shape)
    rule = {
        "rule": "unstack",
        "hf": "m.{l}.w",
        "experts": "experts",
        "param": "p.{l}.{i}" if local else "p.{l}.{e}",
        "place": {"ep": "own e", "etp": f"split {split}"},
    }
    dims = TrainerDims(ep * etp, ep=ep, etp=etp)
    layout = declare({"m.{l}.w": shape}, {"r": rule}, dims, layers=2, experts=each * ep)
    want: Params = [
        {
            f"p.{layer}.{i if local else e}": part(ids.tensors[f"m.{layer}.w"][e], split - 1, etp, rank % etp)
            for layer in range(2)
            for i, e in enumerate(experts_of(each * ep, ep, rank // etp))
        }
        for rank in range(ep * etp)
    ]
    check(layout, ids, want)


@relaxed
@given(st.integers(1, 12), few, ranks, few, st.sampled_from([1, 2]))
def test_pad_and_a_padded_tie_fill_up_before_they_cut(rows, columns, tp, multiple, pp):
    multiple *= tp
    ids = tensor(x=(rows, columns))
    place = {"tp": "split 0", "pp": "own first"}
    rules = {
        "first": {"rule": "pad", "hf": "x", "param": "embedding", "multiple": multiple, "place": place},
        "copy": {"rule": "tie", "hf": "x", "param": "head", "multiple": "m", "place": place | {"pp": "own last"}},
    }
    layout = declare({"x": [rows, columns]}, rules, TrainerDims(tp * pp, tp=tp, pp=pp), m=multiple)
    pieces = [part(padded(ids.tensors["x"], multiple), 0, tp, r) for r in range(tp)]
    want: Params = []
    for rank in range(tp * pp):
        mine = {"embedding": pieces[rank % tp]} if rank < tp else {}
        if rank // tp == pp - 1:
            mine["head"] = pieces[rank % tp]
        want.append(mine)
    check(layout, ids, want)


@pytest.mark.parametrize(
    ("placement", "pp", "vpp", "want"),
    [
        ("replicate", 2, 1, [["p"], ["p"]]),
        ("own first", 3, 1, [["p"], [], []]),
        ("own last", 3, 1, [[], [], ["p"]]),
        ("own ends", 3, 1, [["p"], [], ["p"]]),
        ("own ends", 1, 1, [["p"]]),
        ("own first", 2, 2, [["vp0.p"], []]),
        ("own last", 2, 2, [[], ["vp1.p"]]),
        ("own ends", 2, 3, [["vp0.p"], ["vp2.p"]]),
    ],
)
def test_stages_hold_parameters_without_layers_as_placed(placement, pp, vpp, want):
    ids = tensor(x=(2,))
    rule = {"rule": "rename", "hf": "x", "param": "p", "place": {"pp": placement}}
    layout = declare({"x": [2]}, {"r": rule}, TrainerDims(pp, pp=pp, vpp=vpp), layers=pp * vpp)
    check(layout, ids, [dict.fromkeys(names, ids.tensors["x"]) for names in want])


def test_layer_indices_restart_on_every_stage_and_chunk():
    ids = Ids()
    for layer in range(7):
        ids.add(f"m.{layer}.w", 1)
    rule = {"rule": "rename", "hf": "m.{l}.w", "param": "p.{n}"}
    layout = declare({"m.{l}.w": [1]}, {"r": rule}, TrainerDims(2, pp=2, vpp=2, pipeline=(1, 2, 3, 1)), layers=7)
    w = [ids.tensors[f"m.{layer}.w"] for layer in range(7)]
    check(
        layout,
        ids,
        [
            {"vp0.p.0": w[0], "vp1.p.0": w[3], "vp1.p.1": w[4], "vp1.p.2": w[5]},
            {"vp0.p.0": w[1], "vp0.p.1": w[2], "vp1.p.0": w[6]},
        ],
    )


def test_a_dropped_tensor_is_in_no_shard_and_a_rule_dtype_is_the_parameters():
    rules = {
        "keep": {"rule": "rename", "hf": "x", "param": "p", "dtype": "float64"},
        "gone": {"rule": "drop", "hf": "y", "reason": "not trained"},
    }
    layout = declare({"x": [2], "y": [2]}, rules, TrainerDims(1))
    assert [s.tensor for s in layout.rank_shards(0)] == ["x"]
    assert layout.params[0].dtype == "float64"


def test_two_rules_that_make_one_parameter_on_the_last_stage_alone_are_refused():
    """Names are compared once for all ranks with the same parameters; the first stage's tell nothing of the last one's."""
    rules = {
        "layers": {"rule": "rename", "hf": "m.{l}.w", "param": "p.{n}"},
        "end": {"rule": "rename", "hf": "x", "param": "p.1", "place": {"pp": "own last"}},
    }
    with pytest.raises(FamilyError, match=r"trainer rank 2: two rules make the parameter p\.1: layers and end"):
        declare({"m.{l}.w": [1], "x": [1]}, rules, TrainerDims(4, pp=2, pipeline=(1, 2)), layers=3)


@pytest.mark.parametrize("collecting", [True, False])
def test_garbage_is_collected_after_a_layout_as_before_it_even_where_it_is_refused(collecting):
    was = gc.isenabled()
    (gc.enable if collecting else gc.disable)()
    try:
        test_two_rules_that_make_one_parameter_on_the_last_stage_alone_are_refused()
        assert gc.isenabled() == collecting
    finally:
        (gc.enable if was else gc.disable)()
