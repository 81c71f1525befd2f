"""Who sends: deterministic, same host first, then fewest bytes; and what the planner refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from layout_cases import jobs, rollout_layout, trainer_layout
from layout_naive import Engine, Mcore, Sizes
from plan_support import scattered

from weight_sync.errors import PlanError
from weight_sync.layout.box import Box
from weight_sync.layout.catalog import Catalog, Pattern
from weight_sync.layout.table import Layout, Param, layout_from_shards
from weight_sync.plan import boxes
from weight_sync.plan.plan import COLUMNS, Plan
from weight_sync.plan.planner import by_rank, make_plan

relaxed = settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.too_slow])


def hosts(world: int, each: int) -> list[str]:
    return [f"h{rank // each}" for rank in range(world)]


def holders(source: Layout, plan: Plan, row: int) -> list[int]:
    """Ranks that hold a transfer's box, found the slow way."""
    box = Box(tuple(plan.offset[row].tolist()), tuple(plan.shape[row].tolist()))
    found = set()
    for r in np.flatnonzero(source.tensor == plan.tensor[row]).tolist():
        if Box(tuple(source.offset[r].tolist()), tuple(source.shape[r].tolist())).contains(box):
            found.add(int(source.rank[r]))
    return sorted(found)


# ---- the same plan everywhere


SCRIPT = """
import sys
sys.path.insert(0, {layout!r})
from layout_cases import rollout_layout, trainer_layout
from layout_naive import Engine, Mcore, Sizes
from weight_sync.plan.planner import make_plan
sizes = Sizes(layers=4, heads=4, kv_heads=2, ffn=8, vocab=100, experts=4, expert_ffn=4, step=2)
source, target = trainer_layout(sizes, Mcore(8, tp=2, pp=2, ep=4), 8), rollout_layout(sizes, Engine(tp=4, moe_ep=2))
print(source.digest, target.digest, make_plan(source, target, list("aabbccdd"), list("abcd")).digest)
"""


def test_other_interpreters_with_other_hash_seeds_make_the_same_plan():
    layout = str(Path(__file__).parent.parent / "layout")
    said = set()
    for seed in ("1", "2", "random"):
        env = {"PYTHONHASHSEED": seed, "PATH": "/usr/bin:/bin"}
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT.format(layout=layout)],
            env=env,
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        said.add(done.stdout)
    assert len(said) == 1
    assert len(said.pop().split()) == 3


@relaxed
@given(jobs())
def test_plans_survive_json_and_are_made_alike_twice(job):
    sizes, trainer, rollout, multiple = job
    first, second = (make_plan(trainer_layout(sizes, trainer, multiple), rollout_layout(sizes, rollout)) for _ in "ab")
    assert first.digest == second.digest
    again = Plan.from_json(json.loads(json.dumps(first.to_json())))
    assert again.digest == first.digest
    assert all(np.array_equal(getattr(again, name), getattr(first, name)) for name in COLUMNS)
    assert (again.source_params, again.target_params) == (first.source_params, first.target_params)


@relaxed
@given(scattered())
def test_a_collision_of_the_hash_changes_nothing(case):
    _, source, target = case
    want = make_plan(source, target)
    before = boxes._MULTIPLIERS
    boxes._MULTIPLIERS = [0] * len(before)  # every row gets the same key
    try:
        assert make_plan(source, target).digest == want.digest
    finally:
        boxes._MULTIPLIERS = before


def test_every_column_host_and_parameter_is_in_the_digest():
    plan = make_plan(trainer_layout(Sizes(), Mcore(2, tp=2), 2), rollout_layout(Sizes(), Engine()))
    seen = {plan.digest}
    for name in COLUMNS:
        column = getattr(plan, name).copy()
        column[-1] += 1
        seen.add(replace(plan, **{name: column}).digest)
    for change in (
        {"source_world": 3},
        {"target_world": 3},
        {"source_hosts": ("a", "b")},
        {"target_hosts": ("a",)},
        {"source_params": plan.source_params[1:]},
        {"target_params": (replace(plan.target_params[0], filling=1), *plan.target_params[1:])},
        {"target_params": (replace(plan.target_params[0], cast_from="float32"), *plan.target_params[1:])},
        {"source_params": plan.source_params[:-1], "target_params": (plan.source_params[-1], *plan.target_params)},
        {"catalog": Catalog(plan.catalog.patterns[:-1])},
    ):
        seen.add(replace(plan, **change).digest)
    assert len(seen) == 1 + len(COLUMNS) + 9


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data["transfers"]["tensor"].__setitem__(0, 3),
        lambda data: data["transfers"].pop("shape"),
        lambda data: data["transfers"]["offset"].pop(),
        lambda data: data["source"].pop("params"),
        lambda data: data["target"]["params"][0].pop(),
        lambda data: data.update(digest="0"),
        lambda data: data.pop("digest"),
        lambda data: data.update(format="weight_sync.plan/1"),
        lambda data: data["catalog"]["patterns"][0].update(shape=[1, 2]),
        lambda data: data["catalog"]["patterns"][0].pop("dtype"),
    ],
)
def test_a_damaged_file_is_one_plan_error(damage):
    plan = make_plan(trainer_layout(Sizes(), Mcore(), 1), rollout_layout(Sizes(), Engine()))
    data = json.loads(json.dumps(plan.to_json()))
    assert Plan.from_json(data).digest == plan.digest
    damage(data)
    with pytest.raises(PlanError, match=r"saved plan"):
        Plan.from_json(data)


# ---- who sends


@relaxed
@given(jobs(), st.integers(1, 3), st.integers(1, 3))
def test_a_holder_on_the_destinations_host_is_used_whenever_there_is_one(job, each, other):
    sizes, trainer, rollout, multiple = job
    source, target = trainer_layout(sizes, trainer, multiple), rollout_layout(sizes, rollout)
    near, far = hosts(source.world, each), hosts(target.world, other)
    plan = make_plan(source, target, near, far)
    for row in range(0, len(plan), max(1, len(plan) // 40)):
        who = holders(source, plan, row)
        rank = int(plan.source_rank[row])
        assert rank in who
        host = far[plan.target_rank[row]]
        if any(near[r] == host for r in who):
            assert near[rank] == host


@relaxed
@given(scattered(), st.booleans())
def test_the_choice_is_the_one_that_the_rule_names(case, known):
    """Boxes with one holder first, the rest from the largest to the smallest: fewest bytes so far, then the lowest rank."""
    _, source, target = case
    near, far = (hosts(source.world, 2), hosts(target.world, 2)) if known else ((), ())
    plan = make_plan(source, target, near, far)
    held = boxes.holders(source, boxes.distinct_boxes(source))
    # The transfers in the order in which the planner meets them: by destination shard, then by source box.
    order = []
    for s in range(len(target.tensor)):
        for b in range(len(held.boxes.tensor)):
            if held.boxes.tensor[b] == target.tensor[s]:
                want = Box(tuple(target.offset[s].tolist()), tuple(target.shape[s].tolist()))
                common = held.boxes.box(b).intersect(want)
                if common is not None:
                    order.append((s, b, common))
    load = dict.fromkeys(range(source.world), 0)
    chosen: dict[tuple[int, Box], int] = {}

    def candidates(s: int, b: int) -> list[int]:
        who = [int(source.rank[r]) for r in held.rows[held.first[b] : held.first[b + 1]]]
        local = [r for r in who if known and near[r] == far[target.rank[s]]]
        return local or who

    def several(b: int) -> bool:
        return held.first[b + 1] - held.first[b] > 1

    for s, b, common in [o for o in order if not several(o[1])] + sorted(
        [o for o in order if several(o[1])], key=lambda o: -o[2].volume
    ):
        rank = min(candidates(s, b), key=lambda r: (load[r], r))
        load[rank] += common.volume * 4
        chosen[int(target.param[s]), common] = rank
    for row in range(len(plan)):
        box = Box(tuple(plan.offset[row].tolist()), tuple(plan.shape[row].tolist()))
        assert plan.source_rank[row] == chosen[int(plan.target[row]), box]


def whole_tensors(sizes: list[int], held: list[set[int]], world: int, side_: str) -> Layout:
    """A layout in which tensor i of sizes[i] elements is held whole by the ranks held[i]."""
    catalog = Catalog(tuple(Pattern(f"t{i}", (n,), "uint8") for i, n in enumerate(sizes)))
    params = [[Param(r, f"t{i}", (n,), "uint8") for i, n in enumerate(sizes) if r in held[i]] for r in range(world)]
    shards = [
        [{"tensor": p.name, "offset": [0], "shape": list(p.shape), "param": p.name, "start": 0, "strides": [1]} for p in mine]
        for mine in params
    ]
    return layout_from_shards(side_, catalog, params, shards)


@relaxed
@given(st.data(), st.integers(2, 5))
def test_loads_of_ranks_that_share_only_some_boxes_are_weighed_against_each_other(data, world):
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=3, max_size=12))
    held = [data.draw(st.sets(st.integers(0, world - 1), min_size=1)) for _ in sizes]
    source = whole_tensors(sizes, held, world, "trainer")
    plan = make_plan(source, whole_tensors(sizes, [{0}] * len(sizes), 1, "rollout"))
    load = [0] * world
    want = {}
    alone = [i for i in range(len(sizes)) if len(held[i]) == 1]
    for i in alone + sorted((i for i in range(len(sizes)) if len(held[i]) > 1), key=lambda i: (-sizes[i], i)):
        want[i] = min(held[i], key=lambda r: (load[r], r))
        load[want[i]] += sizes[i]
    assert dict(zip(plan.tensor.tolist(), plan.source_rank.tolist(), strict=True)) == want


@relaxed
@given(st.integers(1, 6), st.integers(1, 4), st.sampled_from([1, 2, 4]), st.integers(1, 3))
def test_replicas_of_a_trainer_share_the_bytes_to_within_one_transfer(dp, tp, engine_tp, engines):
    sizes = Sizes(layers=3, heads=4 * tp, kv_heads=4 * tp, ffn=4 * tp, vocab=60)
    source = trainer_layout(sizes, Mcore(dp * tp, tp=tp), tp)
    plan = make_plan(source, rollout_layout(sizes, Engine(tp=engine_tp, engines=engines)))
    sent = np.bincount(plan.source_rank, weights=plan.nbytes, minlength=source.world)
    shared = {rank: set() for rank in range(tp)}
    for rank in range(source.world):  # ranks of one tp index hold the same boxes
        shared[rank % tp].add(sent[rank])
    largest = plan.nbytes.max()
    # What every rank holds (norms) evens out between the groups, so a group's spread is at most one transfer.
    for group in shared.values():
        assert max(group) - min(group) <= largest
    if dp * engines > 1:
        assert (sent > 0).sum() >= min(dp * tp, 2)


def test_all_replicas_send_when_there_is_enough_to_send():
    sizes = Sizes(layers=4)
    source = trainer_layout(sizes, Mcore(8, tp=2), 2)
    plan = make_plan(source, rollout_layout(sizes, Engine(tp=2, engines=2)))
    sent = np.bincount(plan.source_rank, weights=plan.nbytes, minlength=8)
    assert (sent > 0).all()
    assert sent.max() <= 1.2 * sent.mean()


def test_without_hosts_nobody_is_near():
    sizes = Sizes()
    source, target = trainer_layout(sizes, Mcore(4), 1), rollout_layout(sizes, Engine())
    assert make_plan(source, target).digest == make_plan(source, target, ["", "", "", ""], [""]).digest


def test_columns_are_sorted_by_source_rank_destination_parameter_and_start():
    sizes = Sizes(layers=3, experts=4, expert_ffn=4)
    plan = make_plan(trainer_layout(sizes, Mcore(4, tp=2, ep=2), 2), rollout_layout(sizes, Engine(tp=2, engines=2)))
    keys = list(
        zip(plan.source_rank.tolist(), plan.target_rank.tolist(), plan.target.tolist(), plan.target_start.tolist(), strict=True)
    )
    assert keys == sorted(keys)
    assert sorted(np.concatenate([plan.rows_from(r) for r in range(4)]).tolist()) == list(range(len(plan)))
    assert sorted(np.concatenate([plan.rows_to(r) for r in range(4)]).tolist()) == list(range(len(plan)))


# ---- what is refused


def refused(words: list[str], source: Layout, target: Layout, *on: list[str]) -> None:
    with pytest.raises(PlanError) as caught:
        make_plan(source, target, *on)
    for word in words:
        assert word in str(caught.value), f"{word!r} is not in: {caught.value}"


def side(name: str, dtype: str = "float32", rows: int = 4, catalog: Catalog | None = None) -> Layout:
    """One rank, one tensor t [4, 2], of which `rows` rows are held."""
    catalog = catalog or Catalog((Pattern("t", (4, 2), "float32"),))
    shard = {"tensor": "t", "offset": [0, 0], "shape": [rows, 2], "param": "p", "start": 0, "strides": [2, 1]}
    return layout_from_shards(name, catalog, [[Param(0, "p", (rows, 2), dtype)]], [[shard]])


def test_elements_that_no_trainer_rank_holds_are_named_with_box_and_rank():
    refused(["t [0:4, 0:2]", "rollout rank 0", "6 of 8 elements"], side("trainer", rows=3), side("rollout"))


def test_two_models_are_told_apart_by_the_tensors_only_one_has():
    other = Catalog((Pattern("t", (4, 2), "float32"), Pattern("u", (1,), "float32")))
    refused(["only the rollout has ['u']"], side("trainer"), side("rollout", catalog=other))
    other = Catalog((Pattern("t", (8, 2), "float32"),))
    refused(["t is [4, 2] on the trainer, [8, 2] on the rollout"], side("trainer"), side("rollout", catalog=other))


def test_dtypes_that_differ_name_both_sides():
    refused(["t is bfloat16 on the trainer, float32 on the rollout"], side("trainer", "bfloat16"), side("rollout"))


def test_a_tensor_that_one_side_holds_in_two_dtypes_is_refused_even_if_the_last_copy_agrees():
    shard = {"tensor": "t", "offset": [0, 0], "shape": [4, 2], "param": "p", "start": 0, "strides": [2, 1]}
    params = [[Param(0, "p", (4, 2), "bfloat16"), Param(0, "q", (4, 2), "float32")]]
    catalog = Catalog((Pattern("t", (4, 2), "float32"),))
    target = layout_from_shards("rollout", catalog, params, [[shard, shard | {"param": "q"}]])
    refused(["t is float32 on the trainer, bfloat16 and float32 on the rollout"], side("trainer"), target)


def test_hosts_must_be_given_for_every_rank():
    refused(["trainer hosts: 2 given for 1 ranks"], side("trainer"), side("rollout"), ["a", "b"], ["a"])
    refused(["rollout hosts: 2 given for 1 ranks"], side("trainer"), side("rollout"), ["a"], ["a", "b"])


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 3)), max_size=30), st.booleans())
def test_transfers_are_sorted_by_rank_parameter_and_start_whether_or_not_the_layout_was(rows, before):
    rank, param, start = np.asarray(sorted(rows, key=lambda r: r[1:]) if before else rows, np.int64).reshape(-1, 3).T
    for world in (4, 1 << 17):
        assert by_rank(rank, param, start, world).tolist() == np.lexsort((start, param, rank)).tolist()
