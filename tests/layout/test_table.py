"""Layouts as values: JSON, digests, and reading one from live processes."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from layout_cases import jobs, rollout_layout, trainer_layout
from layout_naive import Engine, Mcore, Sizes

from weight_sync.errors import FamilyError
from weight_sync.layout import rowwise
from weight_sync.layout.catalog import Catalog, Pattern, fill
from weight_sync.layout.table import Layout, Param, columns_of, digest_text, layout_from_shards

relaxed = settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.too_slow])


@relaxed
@given(jobs())
def test_layouts_survive_json_with_equal_digests(job):
    sizes, trainer, rollout, multiple = job
    for layout in (trainer_layout(sizes, trainer, multiple), rollout_layout(sizes, rollout)):
        again = Layout.from_json(json.loads(json.dumps(layout.to_json())))
        assert again.digest == layout.digest
        assert again.params == layout.params
        assert again.rank_shards(0) == layout.rank_shards(0)


@relaxed
@given(jobs())
def test_a_layout_published_rank_by_rank_is_the_same_set_of_shards(job):
    sizes, _, rollout, _ = job
    layout = rollout_layout(sizes, rollout)
    world = range(layout.world)
    published = json.loads(json.dumps([layout.rank_to_json(rank) for rank in world]))
    live = layout_from_shards("rollout", layout.catalog, [layout.rank_params(rank) for rank in world], published)
    assert live.params == layout.params
    key = lambda s: (s.param, s.start, s.tensor)  # noqa: E731
    for rank in world:
        assert sorted(live.rank_shards(rank), key=key) == sorted(layout.rank_shards(rank), key=key)


def test_every_column_and_parameter_is_in_the_digest():
    layout = trainer_layout(Sizes(), Mcore(2, tp=2), 2)
    seen = {layout.digest}
    for name in ("tensor", "param", "offset", "shape", "start", "strides"):
        column = getattr(layout, name).copy()
        column[-1] += 1
        seen.add(replace(layout, **{name: column}).digest)
    for change in ({"rank": 1}, {"name": "x"}, {"shape": (1,)}, {"dtype": "float32"}, {"filling": 1}):
        seen.add(replace(layout, params=(replace(layout.params[0], **change), *layout.params[1:])).digest)
    seen.add(replace(layout, side="rollout").digest)
    seen.add(replace(layout, world=3).digest)
    assert len(seen) == 14


CATALOG = Catalog((Pattern("a", (4, 2), "float32"), Pattern("b", (3,), "float32")))
PARAM = Param(0, "p", (2, 4), "float32")
SHARD = {"tensor": "a", "offset": [0, 0], "shape": [4, 2], "param": "p", "start": 0, "strides": [1, 4]}


def read(shard: dict[str, object], params: tuple[Param, ...] = (PARAM,)) -> Layout:
    return layout_from_shards("trainer", CATALOG, [params], [[SHARD | shard]])


def test_a_transposed_live_shard_is_read_as_it_lies():
    (shard,) = read({}).rank_shards(0)
    assert shard.strides == (1, 4)


def test_empty_live_shards_are_left_out():
    assert len(read({"offset": [4, 0], "shape": [0, 2]}).tensor) == 0


@pytest.mark.parametrize(
    ("shard", "params", "words"),
    [
        ({"tensor": "c"}, (PARAM,), ["rank 0", "holds c", "does not declare"]),
        ({"offset": [1, 0]}, (PARAM,), ["[1:5, 0:2]", "of a", "[4, 2]"]),
        ({"offset": [0], "shape": [4]}, (PARAM,), ["[0:4]", "[4, 2]"]),
        ({"param": "q"}, (PARAM,), ["said to be in q", "not there"]),
        ({"start": 1}, (PARAM,), ["elements 1 to 8", "p, which has 8"]),
        ({"start": -1}, (PARAM,), ["elements -1 to 6"]),
        ({"strides": [2, 4]}, (PARAM,), ["elements 0 to 10", "p, which has 8"]),
        ({"strides": [-1, 4]}, (PARAM,), ["elements -3 to 4"]),
        ({"strides": [1]}, (PARAM,), ["1 strides"]),
        ({}, (PARAM, PARAM), ["two parameters are named p"]),
        ({}, (replace(PARAM, rank=1),), ["rank 0", "of rank 1"]),
    ],
)
def test_a_live_layout_that_cannot_be_is_refused_with_rank_and_numbers(shard, params, words):
    with pytest.raises(FamilyError) as caught:
        read(shard, params)
    for word in words:
        assert word in str(caught.value)


def test_parameters_and_shards_must_come_from_equally_many_ranks():
    with pytest.raises(FamilyError, match="parameters of 1 ranks, but shards of 2"):
        layout_from_shards("trainer", CATALOG, [(PARAM,)], [[], []])


def test_rank_params_and_rank_column_agree():
    layout = rollout_layout(Sizes(), Engine(tp=2, pp=2))
    assert [len(layout.rank_params(r)) for r in range(4)] == np.bincount(layout.param_rank, minlength=4).tolist()
    assert len(layout.rank_params(4)) == 0


def test_parameters_as_columns_say_what_the_parameters_say():
    params = [
        Param(rank, f"p{i}", shape, dtype, filling, part=part)
        for rank in range(3)
        for i, (shape, dtype, filling, part) in enumerate(
            [((2, 3), "float32", 0, ""), ((2, 3), "float32", 1, ""), ((2, 3), "uint8", 0, "values"), ((6,), "float32", 0, "")]
        )
    ]
    columns = columns_of(params)
    assert len(columns.kinds) == 4
    assert columns.rank.tolist() == [p.rank for p in params]
    for kind, p in zip(columns.kind.tolist(), params, strict=True):
        assert replace(columns.kinds[kind], rank=p.rank, name=p.name) == p
    assert columns.of_kind(lambda p: p.numel - p.filling).tolist() == [p.numel - p.filling for p in params]
    text = [f"{p.rank} {p.name} {p.shape} {p.dtype} {p.filling} {p.cast_from} {p.part}\n" for p in params]
    assert digest_text(params) == f"{len(params)}\n{''.join(text)}".encode(), "digests of saved plans depend on it"


@pytest.mark.parametrize("dims", [0, 1, 2, 3])
def test_rowwise_reductions_are_those_of_numpy_and_leave_their_argument_alone(dims):
    rows = np.random.default_rng(dims).integers(-3, 4, (50, dims))
    before, flags = rows.copy(), rows > 0
    assert np.array_equal(rowwise.product(rows), rows.prod(axis=1))
    assert np.array_equal(rowwise.total(rows), rows.sum(axis=1))
    assert np.array_equal(rowwise.every(flags), flags.all(axis=1))
    assert np.array_equal(rowwise.some(flags), flags.any(axis=1))
    assert np.array_equal(rows, before)
    assert np.array_equal(flags, before > 0)


def test_names_of_a_pattern_are_its_template_filled_in():
    for template in ("a.{l}.b.{e}.c", "{e}.{l}.{e}", "a.{l}", "a.{e}.b{e}", "a"):
        pattern = Pattern(template, (1,), "float32", (0, 12) if "{l}" in template else None, 11 if "{e}" in template else 0)
        layers, experts = pattern.layers or (0,), range(max(pattern.experts, 1))
        assert list(pattern.names()) == [fill(template, l=layer, e=e) for layer in layers for e in experts]
