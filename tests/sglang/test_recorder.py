"""The recorder on loaders written for the purpose. No engine: what real loaders do is in test_replica.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang_support import bytes_of, replay, same_bytes
from torch import nn

from weight_sync.errors import BindError
from weight_sync_integrations.recorder import Recording, record
from weight_sync_integrations.recorder_boxes import Dim, NotBoxes, boxes_of_view

Weights = Iterator[tuple[str, torch.Tensor]]


class Model(nn.Module):
    """Parameters of the given shapes, filled with 1, 2, 3, ... so that any change shows."""

    def __init__(self, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            values = torch.arange(1, 1 + torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)
            self.register_parameter(name, nn.Parameter(values, requires_grad=False))


def numbered(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def check(model: Model, tensors: dict[str, torch.Tensor], load: Callable[[Weights], object]) -> Recording:
    """Record, prove that nothing changed, then prove that the recording replayed equals the loader run for real."""
    before = {name: bytes_of(param) for name, param in model.named_parameters()}
    result = record(model, tensors, load)
    assert {name: bytes_of(param) for name, param in model.named_parameters()} == before
    replayed = {name: param.detach().clone() for name, param in model.named_parameters()}
    replay(result.shards, result.constants, tensors, replayed)
    load(iter(tensors.items()))
    for name, param in model.named_parameters():
        assert same_bytes(param, replayed[name]), name
    return result


def copy_of(view: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Model], Callable[[Weights], None]]:
    def loader(model: Model) -> Callable[[Weights], None]:
        def load(weights: Weights) -> None:
            for _, weight in weights:
                model.p.data.copy_(view(weight))

        return load

    return loader


VIEWS = {
    "narrow": ((8, 6), lambda w: w.narrow(0, 2, 4).narrow(1, 1, 3)),
    "chunk": ((8, 6), lambda w: w.chunk(4, dim=0)[3]),
    "transposed": ((5, 7), lambda w: w.t()),
    "permuted and cut": ((3, 4, 5), lambda w: w.permute(2, 0, 1)[1:4]),
    "flattened": ((3, 4, 5), lambda w: w.flatten(1)),
    "unflattened": ((12, 5), lambda w: w.view(3, 4, 5)[1]),
    "unflattened and reordered": ((12, 5), lambda w: w.view(3, 4, 5).transpose(0, 1)),
    "one index": ((6, 4), lambda w: w[3]),
    "every second row": ((9, 4), lambda w: w[1::2]),
    "rows by index": ((9, 4), lambda w: w[torch.tensor([7, 8, 0, 3])]),
    "columns selected": ((4, 9), lambda w: w.index_select(1, torch.tensor([8, 2, 3]))),
    "repeated heads": ((2, 3), lambda w: w[:, None].expand(2, 4, 3).reshape(8, 3)),
    "broadcast": ((1, 5), lambda w: w.expand(3, 5)),
    "copied transposed": ((5, 7), lambda w: w.t().contiguous()),
    "cloned as it lies": ((5, 7), lambda w: w.t().clone()[2:]),
    "joined": ((6, 4), lambda w: torch.cat([w[4:], w[:2]], dim=0)[1:]),
    "joined sideways": ((6, 4), lambda w: torch.cat([w[:, 2:], w[:, :1]], dim=-1).t()),
    "stacked": ((6, 4), lambda w: torch.stack([w[0], w[5]], dim=1)),
    "moved": ((6, 4), lambda w: w.to("cpu")[1:3]),
    "scalar": ((), lambda w: w),
}


@pytest.mark.parametrize("name", VIEWS)
def test_each_way_of_cutting_a_tensor_is_recorded_so_that_a_replay_gives_the_same_bytes(name: str) -> None:
    shape, view = VIEWS[name]
    tensors = {"w": numbered(*shape)}
    model = Model(p=tuple(view(tensors["w"]).shape))

    result = check(model, tensors, copy_of(view)(model))

    assert result.shards
    assert not result.inexpressible
    assert not result.uncovered
    assert not result.unread


@given(
    base=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    steps=st.lists(
        st.tuples(st.sampled_from(["narrow", "permute", "flatten", "split", "step", "select"]), st.integers(0, 99)), max_size=4
    ),
)
@settings(max_examples=200, deadline=None)
def test_any_chain_of_views_decomposes_into_boxes_that_hold_its_elements_in_place(
    base: list[int], steps: list[tuple[str, int]]
) -> None:
    whole = torch.arange(torch.Size(base).numel()).reshape(base)
    view = whole
    for kind, seed in steps:
        view = _step(view, kind, seed)
    target = torch.full((view.numel(),), -1)
    dims = zip(view.shape, view.stride(), torch.empty(view.shape, device="meta").stride(), strict=True)

    for box in boxes_of_view(tuple(base), view.storage_offset(), [Dim(*dim) for dim in dims], 0):
        source = whole[tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))]
        torch.as_strided(target, box.shape, box.strides, box.start).copy_(source)

    assert torch.equal(target.reshape(view.shape), view)


def _step(view: torch.Tensor, kind: str, seed: int) -> torch.Tensor:
    if view.dim() == 0:
        return view
    dim = seed % view.dim()
    size = view.shape[dim]
    if kind == "narrow":
        start = seed % size
        return view.narrow(dim, start, 1 + seed % (size - start))
    if kind == "permute":
        return view.permute(torch.randperm(view.dim(), generator=torch.Generator().manual_seed(seed)).tolist())
    if kind == "select":
        return view.select(dim, seed % size)
    if kind == "step":
        return view[(slice(None),) * dim + (slice(None, None, 2),)]
    if kind == "split" and size % 2 == 0:
        return view.unflatten(dim, (2, size // 2))
    if kind == "flatten" and view.is_contiguous():
        return view.reshape(-1)
    return view


def test_a_view_of_too_many_boxes_is_refused_instead_of_filling_memory() -> None:
    with pytest.raises(NotBoxes, match="boxes"):
        boxes_of_view((1 << 20, 2), 0, [Dim(1 << 19, 4, 1)], 0)


def test_several_tensors_that_share_one_parameter_cover_it_and_the_filled_rest_is_a_constant() -> None:
    model = Model(p=(8, 3))

    def load(weights: Weights) -> None:
        for name, weight in weights:
            first = {"q": 0, "k": 4}[name]
            model.p.data[first : first + weight.shape[0]].copy_(weight)
        model.p.data[6:].fill_(0)

    result = check(model, {"q": numbered(4, 3), "k": numbered(2, 3)}, load)

    assert not result.uncovered
    assert [(c["param"], c["start"], c["shape"], c["value"]) for c in result.constants] == [("p", 18, [2, 3], 0.0)]


def test_parameters_that_the_loader_leaves_out_and_tensors_it_ignores_are_named() -> None:
    model = Model(p=(4, 3), q=(5,))

    def load(weights: Weights) -> None:
        for name, weight in weights:
            if name == "w":
                model.p.data[:3].copy_(weight)

    result = record(model, {"w": numbered(3, 3), "extra": numbered(2)}, load)

    assert result.uncovered == {"p": 3, "q": 5}
    assert result.unread == ["extra"]


def test_writing_a_region_twice_is_counted_and_the_last_write_is_the_one_kept() -> None:
    model = Model(p=(4,))

    def load(weights: Weights) -> None:
        for _, weight in weights:
            model.p.data.copy_(weight)

    result = check(model, {"a": numbered(4), "b": numbered(4) + 1}, load)

    assert [shard["tensor"] for shard in result.shards] == ["b"]
    assert result.rewritten == {"p": 4}


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda w: w * 2, "mul"),
        (lambda w: w.to(torch.bfloat16), "cast from float32 to bfloat16"),
        (lambda w: w.to(torch.bfloat16).to(torch.float32), "cast"),
        (lambda w: torch.cat([w[:1] + 1, w[1:]]), "cat"),
    ],
)
def test_values_that_are_computed_or_cast_are_named_and_never_guessed(
    change: Callable[[torch.Tensor], torch.Tensor], word: str
) -> None:
    model = Model(p=(4, 3))

    def load(weights: Weights) -> None:
        for _, weight in weights:
            model.p.data.copy_(change(weight))

    before = bytes_of(model.p)
    result = record(model, {"w": numbered(4, 3)}, load)

    assert bytes_of(model.p) == before
    assert not result.shards
    assert [(entry["tensor"], entry["param"]) for entry in result.inexpressible] == [("w", "p")]
    assert word in result.inexpressible[0]["operation"]
    assert result.uncovered == {"p": 12}


def test_a_copy_between_dtypes_is_named_as_a_cast_and_marked_where_its_values_are_placed() -> None:
    model = Model(p=(4, 3))

    result = record(model, {"w": numbered(4, 3).double()}, copy_of(lambda w: w)(model))

    assert result.inexpressible == [{"tensor": "w", "param": "p", "operation": "cast from float64 to float32"}]
    assert [(s["tensor"], s["shape"], s["operation"]) for s in result.shards] == [("w", [4, 3], "cast from float64 to float32")]
    assert not result.uncovered


def test_a_write_that_is_neither_copy_nor_fill_is_swallowed_and_named() -> None:
    model = Model(p=(4,))

    def load(weights: Weights) -> None:
        for _, weight in weights:
            model.p.data.add_(weight)

    before = bytes_of(model.p)
    result = record(model, {"w": numbered(4)}, load)

    assert bytes_of(model.p) == before
    assert [entry["tensor"] for entry in result.inexpressible] == ["w"]


def test_flags_attributes_containers_and_rebound_tensors_are_as_before_after_a_recording() -> None:
    model = Model(p=(4,), q=(4,))
    model.loaded = ["before"]
    model.table = {"k": 1}
    derived = model.derived = torch.ones(4)
    q = model.q

    def load(weights: Weights) -> None:
        for _, weight in weights:
            model.p.data.copy_(weight)
            model.p.is_loaded = True
        model.loaded.append("after")
        model.table.clear()
        model.brand_new = 1
        model.derived = model.p * 2
        derived.zero_()
        model.q.data = torch.zeros(4)
        model.q = nn.Parameter(torch.zeros(4))

    values = {name: bytes_of(param) for name, param in model.named_parameters()}
    record(model, {"w": numbered(4)}, load)

    assert {name: bytes_of(param) for name, param in model.named_parameters()} == values
    assert model.q is q
    assert not hasattr(model.p, "is_loaded")
    assert not hasattr(model, "brand_new")
    assert (model.loaded, model.table) == (["before"], {"k": 1})
    assert model.derived is derived
    assert torch.equal(derived, torch.ones(4))


def test_a_parameter_that_the_loader_replaces_is_reported() -> None:
    model = Model(p=(4,))

    def load(weights: Weights) -> None:
        for _ in weights:
            model.p.data = torch.zeros(4)

    result = record(model, {"w": numbered(4)}, load)

    assert [(e["param"], "replaced" in e["operation"]) for e in result.inexpressible] == [("p", True)]


def test_a_loader_that_uses_a_thread_pool_is_recorded_all_the_same() -> None:
    model = Model(p=(4, 2), q=(4, 2))

    def load(weights: Weights) -> None:
        with ThreadPoolExecutor(2) as pool:
            jobs = [pool.submit(getattr(model, name).data.copy_, weight) for name, weight in weights]
            wait(jobs)
        assert all(job.exception() is None for job in jobs)

    result = check(model, {"p": numbered(4, 2), "q": numbered(4, 2)}, load)

    assert {shard["param"] for shard in result.shards} == {"p", "q"}


def test_a_copy_assembled_in_a_buffer_of_the_loader_keeps_its_origin() -> None:
    model = Model(p=(4, 3))

    def load(weights: Weights) -> None:
        buffer = torch.empty(4, 3)
        for name, weight in weights:
            buffer[{"top": slice(0, 2), "low": slice(2, 4)}[name]].copy_(weight)
        model.p.data.copy_(buffer)

    result = check(model, {"top": numbered(2, 3), "low": numbered(2, 3) + 1}, load)

    assert {shard["tensor"] for shard in result.shards} == {"top", "low"}
    assert not result.uncovered


def test_a_loader_that_fails_is_one_error_that_names_the_tensor_and_leaves_the_model_alone() -> None:
    model = Model(p=(4,))

    def load(weights: Weights) -> None:
        for _, weight in weights:
            model.p.data.copy_(weight)
            model.touched = True
            weight.item()

    before = bytes_of(model.p)
    with pytest.raises(BindError, match="HF tensor bad of 1"):
        record(model, {"bad": numbered(4)}, load)

    assert bytes_of(model.p) == before
    assert not hasattr(model, "touched")


def test_tied_parameters_are_one_memory_and_covered_by_one_write() -> None:
    model = Model(p=(4, 3))
    model.head = nn.Linear(3, 4, bias=False)
    model.head.weight = model.p

    result = check(model, {"w": numbered(4, 3)}, copy_of(lambda w: w)(model))

    assert [shard["param"] for shard in result.shards] == ["p"]
    assert not result.uncovered
