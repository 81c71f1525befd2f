"""Finding what differs, eight bytes at a time, and which regions a rank remembers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weight_sync.session.delta_snapshot import different


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from([np.uint8, np.uint16, np.uint32, np.uint64]),
    st.integers(0, 70),
    st.integers(0, 9),
    st.integers(0, 9),
    st.lists(st.integers(0, 10**6), max_size=8),
)
def test_differences_are_found_wherever_words_begin_and_end(dtype: type, count: int, a: int, b: int, hits: list[int]) -> None:
    size = np.dtype(dtype).itemsize
    rng = np.random.default_rng(count)
    content = rng.integers(0, 256, count * size, np.uint8)
    old, new = (np.zeros(count * size + 16, np.uint8)[at : at + count * size] for at in (a, b))
    old[:], new[:] = content, content
    old, new = old.view(dtype), new.view(dtype)
    for hit in hits if count else []:
        new[hit % count] ^= dtype(1)
    assert different(old, new).tolist() == np.flatnonzero(old != new).tolist()


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32, np.uint64])
def test_equal_and_entirely_different_arrays(dtype: type) -> None:
    words = np.arange(100).astype(dtype)
    assert len(different(words, words.copy())) == 0
    assert different(words, ~words).tolist() == list(range(100))
