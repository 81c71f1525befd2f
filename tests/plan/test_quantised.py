"""Plans of quantised weights, against oracles that go through every element."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product
from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from layout_cases import elements

from weight_sync.errors import FamilyError, PlanError
from weight_sync.layout.catalog import Catalog, Pattern
from weight_sync.layout.emitted import Emission, Part, quantised
from weight_sync.layout.table import Layout, Param, layout_from_shards
from weight_sync.plan.complete import know_magnitudes
from weight_sync.plan.extend import drop_engine
from weight_sync.plan.plan import Plan
from weight_sync.plan.planner import make_plan
from weight_sync.plan.proof import prove_exact_once
from weight_sync.plan.schedule import Budget, Method, make_schedule
from weight_sync.plan.straddle import KEPT_FROM, refuse, regions_of, straddles_of
from weight_sync.plan.tiling import covered

WEIGHT = "t.weight"
relaxed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def emission(block: tuple[int, int], packed: bool) -> Emission:
    values = Part("values", "_packed" if packed else "", "uint8" if packed else "float8_e4m3fn", (1, 2) if packed else (1, 1))
    return Emission((values, Part("scales", "_scale", "float32", block)), block, '{"scheme": "test"}')


@st.composite
def cut(draw: st.DrawFn, size: int, step: int = 1) -> list[tuple[int, int]]:
    """A dim in (offset, size) ranges whose edges are multiples of `step`."""
    inner = draw(st.lists(st.integers(0, size // step), max_size=2))
    marks = sorted({0, size, *(mark * step for mark in inner if mark * step < size)})
    return [(a, b - a) for a, b in pairwise(marks)]


@st.composite
def quantised_jobs(draw: st.DrawFn) -> tuple[Layout, Layout, tuple[int, int]]:
    """One weight, cut at random on the trainer and at edges of its groups on the rollout, and a plain tensor beside it."""
    packed = draw(st.booleans())
    block = draw(st.sampled_from([(2, 4), (1, 4), (4, 2), (1, 0), (0, 0), (3, 4), (5, 6)]))
    shape = (draw(st.integers(1, 12)), draw(st.integers(1, 6)) * 2)
    catalog = Catalog((Pattern(WEIGHT, shape, "bfloat16"), Pattern("plain", (3,), "bfloat16")))
    catalog = quantised(catalog, emission(block, packed), lambda name: name == WEIGHT)
    group = (block[0] or shape[0], block[1] or shape[1])
    source = _trainer(draw, catalog, shape, 2 if packed else 1)
    return source, _rollout(draw, catalog, shape, group, block), group


def _trainer(draw: st.DrawFn, catalog: Catalog, shape: tuple[int, int], step: int) -> Layout:
    world = draw(st.integers(1, 3))
    params: list[list[Param]] = [[] for _ in range(world)]
    shards: list[list[dict[str, Any]]] = [[] for _ in range(world)]
    for copy in range(draw(st.integers(1, 2))):
        for row, column in product(draw(cut(shape[0])), draw(cut(shape[1], step))):
            rank = draw(st.integers(0, world - 1))
            name = f"w{copy}_{len(params[rank])}"
            params[rank].append(Param(rank, name, (row[1], column[1]), "bfloat16"))
            shards[rank].append(
                {"tensor": WEIGHT, "offset": [row[0], column[0]], "shape": [row[1], column[1]], "param": name, "start": 0,
                 "strides": [column[1], 1]}
            )  # fmt: skip
    params[0].append(Param(0, "plain", (3,), "bfloat16"))
    shards[0].append({"tensor": "plain", "offset": [0], "shape": [3], "param": "plain", "start": 0, "strides": [1]})
    return layout_from_shards("trainer", catalog, params, shards)


def _rollout(draw: st.DrawFn, catalog: Catalog, shape: tuple[int, int], group: Any, block: tuple[int, int]) -> Layout:
    step = [g if b else 1 if d == 0 else 2 for d, (g, b) in enumerate(zip(group, block, strict=True))]
    if catalog.by_template.get(WEIGHT + "_packed") is not None and step[1] % 2:
        step[1] *= 2
    world = draw(st.integers(1, 3))
    params: list[list[Param]] = [[] for _ in range(world)]
    shards: list[list[dict[str, Any]]] = [[] for _ in range(world)]
    made = [p for p in catalog.patterns if p.made is not None]
    for row, column in product(draw(cut(shape[0], step[0])), draw(cut(shape[1], step[1]))):
        rank = draw(st.integers(0, world - 1))
        for p in made:
            assert p.made is not None
            b = p.made.block
            low = (row[0] // b[0], column[0] // b[1])
            size = (-(-(row[0] + row[1]) // b[0]) - low[0], -(-(column[0] + column[1]) // b[1]) - low[1])
            name = f"{p.made.part}{len(params[rank])}"
            params[rank].append(Param(rank, name, size, p.made.dtype, part=p.made.part))
            shards[rank].append(
                {"tensor": p.template, "offset": list(low), "shape": list(size), "param": name, "start": 0,
                 "strides": [size[1], 1]}
            )  # fmt: skip
    params[0].append(Param(0, "plain", (3,), "bfloat16"))
    shards[0].append({"tensor": "plain", "offset": [0], "shape": [3], "param": "plain", "start": 0, "strides": [1]})
    return layout_from_shards("rollout", catalog, params, shards)


def weight_ids(plan: Plan, source: Layout) -> list[np.ndarray]:
    """Every source parameter with the number of the weight's element in each place."""
    columns = plan.catalog.shapes[plan.catalog.ids[WEIGHT]][1]
    held = [np.full(p.numel, -1, np.int64) for p in source.params]
    for i in range(len(source.tensor)):
        if plan.catalog.name(int(source.tensor[i])) == WEIGHT:
            (a, b), (m, n) = source.offset[i, :2], source.shape[i, :2]
            ids = np.arange(a, a + m)[:, None] * columns + np.arange(b, b + n)[None, :]
            at = elements(source.start[i], source.strides[i], source.shape[i])
            held[source.param[i]][at] = ids.reshape(at.shape)
    return held


@relaxed
@given(quantised_jobs())
def test_each_made_element_is_written_once_and_reads_the_first_element_of_its_block(job):
    source, target, _ = job
    plan = make_plan(source, target)
    prove_exact_once(plan, source=source, target=target)
    held = weight_ids(plan, source)
    columns = int(plan.catalog.shapes[plan.catalog.ids[WEIGHT]][1])
    written = [np.zeros(p.numel, np.int64) for p in plan.target_params]
    for i in range(len(plan)):
        written[plan.target[i]][elements(plan.target_start[i], plan.target_strides[i], plan.shape[i])] += 1
        if not plan.made[i]:
            continue
        block = plan.catalog.block[plan.tensor[i]]
        rows, cols = (np.arange(plan.offset[i, d], plan.offset[i, d] + plan.shape[i, d]) * block[d] for d in range(2))
        want = rows[:, None] * columns + cols[None, :]
        got = held[plan.source[i]][elements(plan.source_start[i], plan.source_strides[i], plan.shape[i])]
        assert np.array_equal(got.reshape(want.shape), want)
    assert all((w == 1).all() for w in written)


@relaxed
@given(quantised_jobs())
def test_scales_come_from_a_rank_that_sends_values_of_their_block(job):
    source, target, group = job
    plan = make_plan(source, target)
    senders: dict[tuple[int, int], set[int]] = {}
    for row in np.flatnonzero(plan.made).tolist():
        block = plan.catalog.block[plan.tensor[row]]
        part = plan.target_params[int(plan.target[row])].part
        low, high = plan.offset[row] * block, (plan.offset[row] + plan.shape[row]) * block
        ranges = (range(a // g, -(-b // g)) for a, b, g in zip(low[:2], high[:2], group, strict=True))
        cells = set(product(*ranges))
        for cell in cells:
            if part == "values":
                senders.setdefault(cell, set()).add(int(plan.source[row]))
    for row in np.flatnonzero(plan.made).tolist():
        if plan.target_params[int(plan.target[row])].part == "scales":
            for i, j in product(*(range(plan.offset[row, d], plan.offset[row, d] + plan.shape[row, d]) for d in range(2))):
                assert int(plan.source[row]) in senders[i, j]


@relaxed
@given(quantised_jobs(), st.booleans())
def test_straddling_groups_are_those_that_some_rank_sends_a_part_of(job, whole):
    source, target, group = job
    plan = make_plan(source, target)
    found = straddles_of(plan, whole)
    shape = plan.catalog.shapes[plan.catalog.ids[WEIGHT]][:2].tolist()
    base = plan.catalog.ids[WEIGHT]
    index = {tuple(cell): n for n, cell in enumerate(found.cells.tolist())}
    want: set[tuple[int, ...]] = {(base, -1, -1)} if whole else set()
    for row in np.flatnonzero(plan.made & plan.catalog.leads[plan.tensor]).tolist():
        block = plan.catalog.block[plan.tensor[row]]
        inside = np.zeros(shape, np.bool_)
        low = plan.offset[row, :2] * block[:2]
        high = np.minimum((plan.offset[row] + plan.shape[row])[:2] * block[:2], shape)
        inside[low[0] : high[0], low[1] : high[1]] = True
        for i, j in product(*(range(-(-n // g)) for n, g in zip(shape, group, strict=True))):
            held = inside[i * group[0] : (i + 1) * group[0], j * group[1] : (j + 1) * group[1]]
            if held.any() and not held.all():
                want.add((base, i, j))
                assert index[base, i, j] in found.of_rank[plan.source_rank[row]]
    assert set(index) == want
    if want - {(base, -1, -1)}:
        with pytest.raises(PlanError, match=r"share one scale.*t\.weight"):
            refuse(plan, found)
    else:
        refuse(plan, found)


@relaxed
@given(quantised_jobs(), st.integers(8, 400))
def test_pieces_of_small_groups_never_cut_a_group_that_a_rank_holds_whole(job, budget):
    source, target, group = job
    plan = make_plan(source, target)
    schedule = make_schedule(plan, budget=Budget(budget, budget))
    assert (schedule.method[plan.made] != Method.DIRECT).all()
    covered: dict[int, int] = {}
    for piece in schedule.pieces:
        covered[piece.row] = covered.get(piece.row, 0) + prod(piece.shape)
        if not plan.made[piece.row] or prod(group) >= KEPT_FROM:
            continue
        step = [max(1, int(g // b)) for g, b in zip(group, plan.catalog.block[plan.tensor[piece.row]], strict=False)]
        for d in range(2):
            first = int(plan.offset[piece.row, d]) + piece.at[d]
            last = first + piece.shape[d]
            assert first % step[d] == 0 or piece.at[d] == 0
            assert last % step[d] == 0 or piece.at[d] + piece.shape[d] == plan.shape[piece.row, d]
    assert all(covered[row] == prod(plan.shape[row].tolist()) for row in covered)


@relaxed
@given(quantised_jobs(), st.integers(8, 400))
def test_pieces_of_a_transfer_are_runs_of_its_bytes_one_after_another(job, budget):
    source, target, _ = job
    plan = make_plan(source, target)
    schedule = make_schedule(plan, budget=Budget(budget, budget))
    order: dict[int, list[int]] = {}
    for piece in schedule.pieces:
        places = np.arange(prod(plan.shape[piece.row].tolist())).reshape(plan.shape[piece.row])
        cut = tuple(slice(a, a + n) for a, n in zip(piece.at, piece.shape, strict=True))
        order.setdefault(piece.row, []).extend(places[cut].ravel().tolist())
    assert all(places == sorted(places) for places in order.values())


@relaxed
@given(quantised_jobs())
def test_a_plan_without_some_scales_is_no_plan(job):
    source, target, _ = job
    plan = make_plan(source, target)
    for part in ("values", "scales"):
        rows = [r for r in range(len(plan)) if plan.target_params[int(plan.target[r])].part != part]
        names = ("tensor", "offset", "shape", "source", "source_start", "source_strides", "target", "target_start")
        keep = {name: getattr(plan, name)[rows] for name in (*names, "target_strides")}
        params = [i for i, p in enumerate(plan.target_params) if p.part != part]
        place = np.full(len(plan.target_params), -1)
        place[params] = np.arange(len(params))
        keep["target"] = place[keep["target"]]
        lacking = replace(plan, target_params=tuple(plan.target_params[i] for i in params), **keep)
        with pytest.raises(PlanError, match=r"incomplete|no transfer uses"):
            prove_exact_once(lacking)


@relaxed
@given(quantised_jobs())
def test_a_quantised_plan_survives_json(job):
    source, target, _ = job
    plan = make_plan(source, target)
    assert Plan.from_json(plan.to_json()).digest == plan.digest
    assert Layout.from_json(target.to_json()).digest == target.digest


def test_regions_of_a_rank_are_distinct_boxes_of_the_weight():
    catalog = quantised(
        Catalog((Pattern(WEIGHT, (4, 8), "bfloat16"),)), emission((2, 4), False), lambda name: True
    )  # fmt: skip
    shard = {"tensor": WEIGHT, "offset": [0, 0], "shape": [4, 8], "param": "w", "start": 0, "strides": [8, 1]}
    source = layout_from_shards("trainer", catalog, [[Param(0, "w", (4, 8), "bfloat16")]], [[shard]])
    params, shards = [], []
    for rank in range(2):  # two replicas of the same cut
        params.append(
            [Param(rank, "v", (4, 8), "float8_e4m3fn", part="values"), Param(rank, "s", (2, 2), "float32", part="scales")]
        )
        whole = {"tensor": WEIGHT, "offset": [0, 0], "shape": [4, 8], "param": "v", "start": 0, "strides": [8, 1]}
        scale = {"tensor": WEIGHT + "_scale", "offset": [0, 0], "shape": [2, 2], "param": "s", "start": 0, "strides": [2, 1]}
        shards.append([whole, scale])
    plan = make_plan(source, layout_from_shards("rollout", catalog, params, shards))
    regions = regions_of(plan, plan.rows_from(0))
    assert len(regions) == 1
    assert regions.high.tolist() == [[4, 8]]
    assert not regions.open(0).any()


def test_a_scheme_that_leaves_everything_is_refused():
    with pytest.raises(FamilyError, match=r"weight_sync\.quant\.scheme=none"):
        quantised(Catalog((Pattern(WEIGHT, (4, 8), "bfloat16"),)), emission((2, 4), False), lambda name: False)


def test_experts_of_a_layer_that_differ_are_refused():
    catalog = Catalog((Pattern("m.{l}.e.{e}.weight", (4, 8), "bfloat16", (0,), 2),))
    with pytest.raises(FamilyError, match=r"m\.0\.e\.1\.weight is quantised, m\.0\.e\.0\.weight is not"):
        quantised(catalog, emission((2, 4), False), lambda name: "e.1" in name)


VALUES = Part("values", "", "float8_e4m3fn", (1, 1))


def one_weight(parts: tuple[Part, ...], group: tuple[int, int], shape: tuple[int, int]) -> Catalog:
    return quantised(
        Catalog((Pattern(WEIGHT, shape, "bfloat16"),)), Emission(parts, group, '{"scheme": "test"}'), lambda n: True
    )


def laid(catalog: Catalog, side: str, ranks: list[dict[str, tuple[str, list[int], list[int]]]]) -> Layout:
    """ranks: parameter -> (what is put behind the weight's name, offset, shape), each parameter holding one box."""
    params: list[list[Param]] = []
    shards: list[list[dict[str, Any]]] = []
    for rank, held in enumerate(ranks):
        params.append([])
        shards.append([])
        for name, (suffix, offset, shape) in held.items():
            pattern = catalog.patterns[catalog.by_template[WEIGHT + suffix]]
            made = pattern.made if side == "rollout" else None
            dtype, part = ("bfloat16", "") if made is None else (made.dtype, made.part)
            params[-1].append(Param(rank, name, tuple(shape), dtype, part=part))
            shards[-1].append(
                {"tensor": pattern.template, "offset": offset, "shape": shape, "param": name, "start": 0,
                 "strides": [shape[1], 1]}
            )  # fmt: skip
    return layout_from_shards(side, catalog, params, shards)


def test_scales_of_other_groups_than_the_values_are_no_plan():
    catalog = one_weight((VALUES, Part("scales", "_scale", "float32", (2, 8))), (2, 8), (4, 8))
    source = laid(catalog, "trainer", [{"w": ("", [0, 0], [4, 8])}])
    crossed = [{"v": ("", [2 * r, 0], [2, 8]), "s": ("_scale", [1 - r, 0], [1, 1])} for r in range(2)]
    target = laid(catalog, "rollout", crossed)
    with pytest.raises(PlanError, match=r"without the scales of their groups: t\.weight on rollout rank 0"):
        prove_exact_once(make_plan(source, target), source=source, target=target)


def test_a_scale_over_whole_rows_comes_from_who_sends_some_of_these_rows():
    catalog = one_weight((VALUES, Part("scales", "_scale", "float32", (1, 0))), (1, 0), (4, 8))
    source = laid(catalog, "trainer", [{"w": ("", [0, 0], [4, 8])}] * 2)  # two replicas share the work
    cuts = [(0, 0), (2, 0), (0, 4), (2, 4)]
    target = laid(catalog, "rollout", [{"v": ("", [i, j], [2, 4]), "s": ("_scale", [i, 0], [2, 1])} for i, j in cuts])
    plan = make_plan(source, target)
    prove_exact_once(plan, source=source, target=target)
    rows_of: dict[int, set[int]] = {0: set(), 1: set()}
    for row in range(len(plan)):
        if plan.target_params[int(plan.target[row])].part == "values":
            rows_of[int(plan.source[row])] |= set(range(plan.offset[row, 0], plan.offset[row, 0] + plan.shape[row, 0]))
    assert rows_of[0] != rows_of[1], "each replica sends other rows, or nothing is tested"
    scales = [row for row in range(len(plan)) if plan.target_params[int(plan.target[row])].part == "scales"]
    other = np.asarray(plan.source)
    for row in scales:
        assert set(range(plan.offset[row, 0], plan.offset[row, 0] + plan.shape[row, 0])) <= rows_of[int(plan.source[row])]
        other = np.where(np.arange(len(plan)) == row, 1 - plan.source, other)
    with pytest.raises(PlanError, match="scales would come from a rank that sends no values of their groups"):
        prove_exact_once(replace(plan, source=other), source=source, target=target)


def test_an_engine_that_leaves_takes_no_scales_sender_with_it():
    catalog = one_weight((VALUES, Part("scales", "_scale", "float32", (1, 0))), (1, 0), (4, 8))
    halves = [{"w": ("", [0, j], [4, 4])} for j in (0, 4)]
    source = laid(catalog, "trainer", halves * 3)  # three replicas, cut by columns as the engines are
    engine = [{"v": ("", [0, j], [4, 4]), "s": ("_scale", [0, 0], [4, 1])} for j in (0, 4)]
    plan = make_plan(source, laid(catalog, "rollout", engine * 3))
    for place in range(3):
        know_magnitudes(drop_engine(plan, place, 2))


def test_a_trainer_cut_through_packed_values_is_refused_with_the_numbers():
    parts = (Part("values", "_packed", "uint8", (1, 2)), Part("scales", "_scale", "float32", (1, 10)))
    catalog = one_weight(parts, (1, 10), (4, 10))
    source = laid(catalog, "trainer", [{"w": ("", [0, j], [4, 5])} for j in (0, 5)])
    target = laid(catalog, "rollout", [{"v": ("_packed", [0, 0], [4, 5]), "s": ("_scale", [0, 0], [4, 1])}])
    with pytest.raises(
        PlanError, match=r"packed into one element: t\.weight_packed: rank 0 holds \[0, 0\] to \[4, 5\].*\[1, 2\]"
    ):
        make_plan(source, target)


def test_values_whose_last_element_another_rank_holds_in_part_are_no_plan():
    """The trainer's parameter has room behind its box, so that reading past it would be read as weights."""
    parts = (Part("values", "_packed", "uint8", (1, 2)), Part("scales", "_scale", "float32", (1, 10)))
    catalog = one_weight(parts, (1, 10), (4, 10))
    source = laid(catalog, "trainer", [{"w": ("", [0, j], [4, n])} for j, n in ((0, 6), (6, 4))])
    target = laid(catalog, "rollout", [{"v": ("_packed", [0, 0], [4, 5]), "s": ("_scale", [0, 0], [4, 1])}])
    plan = make_plan(source, target)
    prove_exact_once(plan, source=source, target=target)
    short = replace(source, shape=np.where(source.offset == 0, np.minimum(source.shape, 5), source.shape))
    with pytest.raises(PlanError, match="reads elements that the trainer layout does not have there"):
        prove_exact_once(plan, source=short, target=target)


def test_groups_that_are_cut_and_held_whole_elsewhere_are_no_plan():
    catalog = one_weight((VALUES, Part("scales", "_scale", "float32", (1, 0))), (1, 0), (4, 8))
    source = laid(catalog, "trainer", [{"w": ("", [0, 0], [4, 8])}])
    scale = ("_scale", [0, 0], [4, 1])
    target = laid(catalog, "rollout", [{"v": ("", [0, 0], [4, 8]), "s": scale}, {"v": ("", [0, 0], [4, 4]), "s": scale}])
    with pytest.raises(PlanError, match=r"cut in different ways.*t\.weight"):
        prove_exact_once(make_plan(source, target), source=source, target=target)


@relaxed
@given(st.data())
def test_covered_agrees_with_marking_every_element(data):
    def boxes(n: int) -> tuple[Any, Any, Any]:
        pairs = st.tuples(st.integers(0, 1), *[st.tuples(st.integers(0, 5), st.integers(1, 6)) for _ in range(2)])
        drawn = [(k, (a, c), (a + b, c + d)) for k, (a, b), (c, d) in data.draw(st.lists(pairs, min_size=1, max_size=n))]
        return tuple(np.asarray(column, np.int64) for column in zip(*drawn, strict=True))

    mine, theirs = boxes(4), boxes(6)
    marks = np.zeros((2, 12, 12), np.bool_)
    for key, low, high in zip(*theirs, strict=True):
        marks[key, low[0] : high[0], low[1] : high[1]] = True
    want = [bool(marks[k, a[0] : b[0], a[1] : b[1]].all()) for k, a, b in zip(*mine, strict=True)]
    assert covered(mine, theirs).tolist() == want
