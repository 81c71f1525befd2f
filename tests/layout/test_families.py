"""Declared layouts of the shipped families against what Megatron-Core and SGLang hold, element by element."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from layout_cases import (
    assemble,
    declared_fillings,
    engine,
    engine_dims,
    fillings,
    jobs,
    model,
    read_back,
    rollout_layout,
    same,
    trainer_layout,
)
from layout_naive import Engine, Mcore, Sizes, engine_params, hf_model, mcore_params

from weight_sync.layout.resolve import dropped_names, resolve

relaxed = settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])


@relaxed
@given(jobs())
def test_every_trainer_parameter_is_what_megatron_would_hold_and_gives_the_hf_tensors_back(job):
    sizes, trainer, _, multiple = job
    hf = hf_model(sizes)
    want = mcore_params(sizes, trainer, hf, multiple)
    layout = trainer_layout(sizes, trainer, multiple)
    same(assemble(layout, hf), want)
    assert declared_fillings(layout) == fillings(want)
    for name, array in read_back(layout, want, hf).items():
        assert (array == hf[name]).all(), name


@relaxed
@given(jobs())
def test_every_rollout_parameter_is_what_sglang_would_hold_and_gives_the_hf_tensors_back(job):
    sizes, _, rollout, _ = job
    hf = hf_model(sizes)
    want = engine_params(sizes, rollout, hf)
    layout = rollout_layout(sizes, rollout)
    same(assemble(layout, hf), want)
    assert declared_fillings(layout) == fillings(want)
    for name, array in read_back(layout, want, hf).items():
        assert (array == hf[name]).all(), name


@relaxed
@given(jobs())
def test_the_catalog_names_every_hf_tensor_with_its_shape_once(job):
    sizes = job[0]
    catalog = model(sizes).catalog
    hf = hf_model(sizes)
    assert catalog.ids.keys() == hf.keys()
    assert len(catalog) == len(hf)
    for name, tensor in catalog.ids.items():
        assert catalog.name(tensor) == name
        assert catalog.pattern_of(tensor).shape == hf[name].shape
        assert tuple(catalog.shapes[tensor, : hf[name].ndim]) == hf[name].shape


@pytest.mark.parametrize("vocab", [1, 63, 64, 65, 128, 129])
def test_ranks_that_hold_only_padding_have_the_parameter_but_no_shard_of_it(vocab):
    sizes = Sizes(vocab=vocab, heads=8, kv_heads=2, ffn=16)
    layout = rollout_layout(sizes, Engine(tp=8))
    rows = -(-vocab // 64) * 64 // 8
    for rank in range(8):
        head = next(p for p in layout.rank_params(rank) if p.name == "lm_head.weight")
        here = max(0, min(vocab - rank * rows, rows))
        assert head.filling == (rows - here) * sizes.hidden
        assert sum(s.param == "lm_head.weight" for s in layout.rank_shards(rank)) == (here > 0)


def test_the_trainer_cut_of_qkv_may_fall_inside_a_kv_group():
    sizes = Sizes(heads=2, kv_heads=1, head_dim=2, ffn=8)  # rows q0 q0 q1 q1 k k v v over four ranks
    layout = trainer_layout(sizes, Mcore(4, tp=4), 4)
    held = [
        {s.tensor.split(".")[-2]: s.box.shape[0] for s in layout.rank_shards(rank) if s.param.endswith("linear_qkv.weight")}
        for rank in range(4)
    ]
    assert held == [{"q_proj": 2}, {"q_proj": 2}, {"k_proj": 2}, {"v_proj": 2}]


def test_kv_heads_are_held_by_neighbouring_ranks_when_there_are_more_ranks_than_heads():
    layout = rollout_layout(Sizes(heads=8, kv_heads=2, ffn=8), Engine(tp=8))
    first = [
        next(s.box.offset[0] for s in layout.rank_shards(r) if s.tensor.endswith("0.self_attn.k_proj.weight")) for r in range(8)
    ]
    assert first == [0, 0, 0, 0, 2, 2, 2, 2]


def test_a_model_without_dense_layers_and_one_without_sparse_layers_both_resolve():
    for mlp_only in ((), (0, 1)):
        sizes = Sizes(experts=4, expert_ffn=4, mlp_only=mlp_only)
        hf = hf_model(sizes)
        same(assemble(rollout_layout(sizes, Engine(tp=2, moe_ep=2)), hf), engine_params(sizes, Engine(tp=2, moe_ep=2), hf))


def test_a_convention_default_gives_way_to_the_size_of_the_model():
    # sglang.yaml says experts: 0 for families without; a family with experts must not lose them to it.
    names = {p.name for p in rollout_layout(Sizes(experts=2, expert_ffn=4), Engine(pp=2)).rank_params(0)}
    assert "lm_head.weight" in names
    assert dropped_names(model(Sizes()), engine(), engine_dims(Engine()), "rollout") == ()
    assert resolve(model(Sizes()), engine(), engine_dims(Engine()), "rollout").world == 1
