"""Box algebra, against sets of index tuples."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weight_sync.layout.box import Box, atoms, row_major

relaxed = settings(deadline=None, max_examples=100)


def boxes(ndim: int, smallest: int = 0) -> st.SearchStrategy[Box]:
    return st.builds(
        Box,
        st.tuples(*[st.integers(0, 4)] * ndim),
        st.tuples(*[st.integers(smallest, 4)] * ndim),
    )


def indices(box: Box) -> set[tuple[int, ...]]:
    return set(product(*(range(o, o + s) for o, s in zip(box.offset, box.shape, strict=True))))


pairs = st.integers(0, 3).flatmap(lambda n: st.tuples(boxes(n), boxes(n)))
groups = st.integers(1, 3).flatmap(lambda n: st.lists(boxes(n, 1), max_size=5))


@relaxed
@given(pairs)
def test_an_intersection_holds_exactly_the_common_elements(pair):
    a, b = pair
    common = a.intersect(b)
    assert (set() if common is None else indices(common)) == indices(a) & indices(b)
    assert b.intersect(a) == common


@relaxed
@given(pairs)
def test_containment_volume_and_end_agree_with_the_elements(pair):
    a, b = pair
    assert a.contains(b) == (indices(b) <= indices(a))
    assert a.volume == len(indices(a))
    assert a.end == tuple(o + s for o, s in zip(a.offset, a.shape, strict=True))


@relaxed
@given(groups)
def test_atoms_are_disjoint_and_each_box_is_a_union_of_them(group):
    cells = atoms(group)
    assert sum(cell.volume for cell in cells) == len(set().union(*map(indices, cells)))
    assert cells == sorted(cells)
    for box in group:
        inside = [indices(cell) for cell in cells if box.contains(cell)]
        assert set().union(*inside) == indices(box)
    assert set().union(*map(indices, cells)) == set().union(*map(indices, group))


@relaxed
@given(st.lists(st.integers(1, 4), max_size=4))
def test_row_major_strides_are_numpys(shape):
    strides = np.zeros(shape, np.int8).strides
    assert all(a == b for a, b, size in zip(row_major(shape), strides, shape, strict=True) if size > 1)


@pytest.mark.parametrize(("offset", "shape"), [((0,), (1, 1)), ((-1,), (1,)), ((0,), (-1,))])
def test_a_box_of_impossible_numbers_is_refused(offset, shape):
    with pytest.raises(ValueError, match=r"offset .* shape"):
        Box(offset, shape)


def test_boxes_print_as_slices():
    assert str(Box((1, 0), (2, 5))) == "[1:3, 0:5]"
