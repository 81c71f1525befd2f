"""Rank coordinates and pipeline stages on both sides, and the rank map of strategies that gather."""

from __future__ import annotations

from collections import Counter
from math import lcm

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layout_naive import Engine, Mcore

from weight_sync.errors import ParallelError
from weight_sync.layout.parallel import TRAINER_ORDERS, EngineDims, TrainerDims, gather_rank_map, world_error

relaxed = settings(deadline=None, max_examples=60)
small = st.sampled_from([1, 2, 3])


@relaxed
@given(small, small, small, small, small, small)
def test_trainer_coordinates_are_megatrons_grid_for_dense_and_for_experts(tp, cp, pp, ep, etp, more):
    ranks = pp * lcm(tp * cp, etp * ep) * more
    dims = TrainerDims(ranks, tp=tp, cp=cp, pp=pp, ep=ep, etp=etp)
    job = Mcore(ranks, tp=tp, cp=cp, pp=pp, ep=ep, etp=etp)
    for rank in range(ranks):
        coords = dims.coords(rank)
        assert {axis: coords[axis] for axis in ("pp", "tp", "ep", "etp")} == job.coords(rank)
        assert all(0 <= coords[axis] < dims.sizes[axis] for axis in coords)
    # Every combination of coordinates is there, once.
    for axes in (("tp", "cp", "dp", "pp"), ("etp", "ep", "edp", "pp")):
        assert len({tuple(dims.coords(r)[a] for a in axes) for r in range(ranks)}) == ranks


@pytest.mark.parametrize("order", TRAINER_ORDERS)
def test_both_rank_orders_give_megatrons_grid(order):
    dims = TrainerDims(16, tp=2, cp=1, pp=2, ep=2, etp=1, order=order)
    job = Mcore(16, tp=2, pp=2, ep=2, pp_fastest_last=order == TRAINER_ORDERS[0])
    for rank in range(16):
        assert {axis: dims.coords(rank)[axis] for axis in ("pp", "tp", "ep", "etp")} == job.coords(rank)


@relaxed
@given(st.integers(1, 4), st.integers(1, 3), st.data())
def test_virtual_stages_hold_every_layer_once_in_interleaved_order(pp, vpp, data):
    counts = tuple(data.draw(st.integers(0, 3)) for _ in range(pp * vpp))
    dims = TrainerDims(pp, pp=pp, vpp=vpp, pipeline=counts)
    chunks = np.split(np.arange(sum(counts)), np.cumsum(counts)[:-1])
    for stage in range(pp):
        have = [list(members) for members in dims.stage_layers(sum(counts), stage)]
        assert have == [chunks[c * pp + stage].tolist() for c in range(vpp)]


@relaxed
@given(st.integers(1, 6), st.integers(0, 20), st.sampled_from(["last", "inner"]))
def test_engine_stages_split_layers_as_get_pp_indices_does(pp, more, extra):
    layers = pp + more
    dims = EngineDims(tp=1, pp=pp, remainder=extra)
    for stage in range(pp):
        (have,) = dims.stage_layers(layers, stage)
        assert list(have) == Engine(pp=pp, extra=extra).layers(layers, stage)
        if extra == "last":  # SGLang's own arithmetic
            base, left = divmod(layers, pp)
            first = stage * base + max(0, stage - (pp - left))
            assert list(have) == list(range(first, first + base + (stage >= pp - left)))


def test_engine_coordinates_cut_attention_and_expert_groups_out_of_the_tensor_ranks():
    dims = EngineDims(tp=8, pp=2, attn_dp=2, moe_ep=4, engines=2)
    assert dims.world == 32
    assert dims.coords(16 + 8 + 5) == {
        "engine": 1, "pp": 1, "tp": 5, "attn_dp": 1, "attn_tp": 1, "moe_ep": 2, "moe_tp": 1,
    }  # fmt: skip


def test_four_stages_of_eight_gather_into_two_engines_of_sixteen_as_two_replicas_for_each_source():
    trainer, rollout = TrainerDims(32, pp=4, tp=2), EngineDims(tp=16, engines=2)
    targets = gather_rank_map(trainer, rollout)
    for stage in range(4):
        members = [rank for rank in range(32) if trainer.coords(rank)["pp"] == stage]
        for i, rank in enumerate(members):
            assert targets[rank] == [i, i + 16, i + 8, i + 24]
    assert {len(t) for t in targets.values()} == {4}


@relaxed
@given(st.integers(1, 3), st.integers(1, 9), st.integers(1, 9), st.integers(1, 4))
def test_every_stage_feeds_every_engine_rank_once_with_loads_that_differ_by_one_at_most(pp, each, width, engines):
    trainer, rollout = TrainerDims(pp * each, pp=pp), EngineDims(tp=width, engines=engines)
    targets = gather_rank_map(trainer, rollout)
    assert sorted(targets) == list(range(trainer.world))
    for stage in range(pp):
        mine = [targets[r] for r in range(trainer.world) if trainer.coords(r)["pp"] == stage]
        assert Counter(t for ts in mine for t in ts) == dict.fromkeys(range(rollout.world), 1)
        loads = [len(ts) for ts in mine]
        assert max(loads) - min(loads) <= 1


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: TrainerDims(0), ["ranks=0", "at least 1"]),
        (lambda: TrainerDims(4, tp=True), ["tp=True", "integer"]),
        (lambda: TrainerDims(4, tp=2.0), ["tp=2.0", "integer"]),
        (lambda: TrainerDims(6, tp=4), ["6 ranks", "tp * cp * pp = 4 * 1 * 1 = 4", "4, 8, 12"]),
        (lambda: TrainerDims(4, ep=3), ["4 ranks", "etp * ep * pp = 1 * 3 * 1 = 3", "3, 6, 9"]),
        (lambda: TrainerDims(4, order="pp-tp"), ["'pp-tp'", *TRAINER_ORDERS]),
        (lambda: TrainerDims(4, tp=2, pp=2, ep=1, order=TRAINER_ORDERS[1]), ["tp * cp = 2", "etp * ep = 1", TRAINER_ORDERS[0]]),
        (lambda: TrainerDims(2, pp=2, pipeline=(1, 2, 3)), ["[1, 2, 3]", "3 virtual stages", "2 * 1 = 2"]),
        (lambda: TrainerDims(2, pp=2, pipeline=(5, -1)), ["[5, -1]", "0 or more"]),
        (lambda: TrainerDims(2, pp=2).stage_layers(3, 0), ["3 layers", "2 * 1 = 2", "trainer.pipeline"]),
        (lambda: TrainerDims(2, pp=2, pipeline=(1, 1)).stage_layers(3, 0), ["[1, 1]", "adds up to 2", "has 3"]),
        (lambda: TrainerDims(2).coords(2), ["rank 2", "world of 2"]),
        (lambda: EngineDims(tp=4, attn_dp=3), ["attn_dp=3", "tp=4", "[1, 2, 4]"]),
        (lambda: EngineDims(tp=6, moe_ep=4), ["moe_ep=4", "tp=6", "[1, 2, 3, 6]"]),
        (lambda: EngineDims(remainder="first"), ["'first'", "inner or last"]),
        (lambda: EngineDims(pp=2, pipeline=(1,)), ["[1]", "1 stages", "pp=2"]),
        (lambda: EngineDims(pp=2, pipeline=(4, -1)), ["[4, -1]", "0 or more"]),
        (lambda: EngineDims(pp=3).stage_layers(2, 0), ["2 layers", "pp=3", "1 to 2"]),
        (lambda: EngineDims(pp=2, pipeline=(1, 2)).stage_layers(4, 0), ["[1, 2]", "adds up to 3", "4 layers"]),
        (lambda: EngineDims(tp=2).coords(-1), ["rank -1", "world of 2"]),
    ],
)
def test_impossible_parallel_sizes_name_the_number_and_what_would_be_legal(make, words):
    with pytest.raises(ParallelError) as caught:
        make()
    for word in words:
        assert word in str(caught.value)


def test_sizes_that_do_not_multiply_to_the_world_print_the_product():
    assert "tp=2 * pp=3 = 6, but there are 8 ranks" in str(world_error("trainer", {"tp": 2, "pp": 3}, 8))
