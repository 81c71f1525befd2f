"""What torch compares in C++ for us must never call something unmoved that moved, and what it has no opinion of is compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weight_sync.session.places import Places

BASE = torch.zeros(4096)
CHANGES: dict[str, Callable[[torch.Tensor], Any]] = {
    "the same object": lambda t: t,
    "another object over the same elements": lambda t: t.detach(),
    "a view of all of it": lambda t: t.view(t.shape),
    "gradients wanted": lambda t: t.detach().requires_grad_(),
    "a parameter": lambda t: torch.nn.Parameter(t.detach(), requires_grad=False),
    "moved": lambda t: t.clone(memory_format=torch.preserve_format),
    "one element later": lambda t: t.as_strided(t.shape, t.stride(), t.storage_offset() + 1),
    "another shape": lambda t: t.as_strided((1, *t.shape), (1, *t.stride())),
    "other strides": lambda t: t.as_strided(t.shape, [s + 1 for s in t.stride()], t.storage_offset()),
    "another dtype": lambda t: t.view(torch.int32),
    "an array": lambda t: t.detach().numpy(),
}
UNMOVED = {
    "the same object",
    "another object over the same elements",
    "a view of all of it",
    "gradients wanted",
    "a parameter",
}


def tensors(shapes: list[list[int]]) -> dict[str, torch.Tensor]:
    found, at = {}, 0
    for i, shape in enumerate(shapes):
        found[f"w{i}"] = BASE[at : at + int(np.prod(shape))].view(shape)
        at += 64
    return found


@pytest.mark.parametrize("guarded", [True, False], ids=["by torch", "by columns"])
@settings(deadline=None, max_examples=150)
@given(
    shapes=st.lists(st.lists(st.integers(2, 5), min_size=1, max_size=2), min_size=1, max_size=6),
    data=st.data(),
)
def test_only_what_lies_where_it_lay_is_called_unmoved(guarded: bool, shapes: list[list[int]], data: st.DataObject) -> None:
    before = tensors(shapes)
    places = Places(before)
    assert places._guard is not None, "this torch has no TensorGuards, or not as known: everything is compared by columns"
    if not guarded:
        places._guard = None
    assert places.same(dict(before))
    name, change = data.draw(st.sampled_from(sorted(before))), data.draw(st.sampled_from(sorted(CHANGES)))
    assert places.same(before | {name: CHANGES[change](before[name])}) == (change in UNMOVED)


def test_names_and_their_order_count_too() -> None:
    before = tensors([[2, 3], [4]])
    places = Places(before)
    assert not places.same({"w0": before["w0"]})
    assert not places.same({"w1": before["w1"], "w0": before["w0"]})
    assert not places.same({**before, "w2": before["w0"]})
    assert not places.same({"w0": before["w1"], "w1": before["w0"]})


def test_no_tensors_are_unmoved() -> None:
    assert Places({}).same({})
