"""Which ranges of a batch go by copy engines."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weight_sync.transport import ipc_copies
from weight_sync.transport.base import Batch, Boxes, Endpoint
from weight_sync.transport.ipc_copies import long_ranges


@settings(deadline=None)
@given(
    shape=st.lists(st.sampled_from([1, 2, 3, 64]), min_size=1, max_size=3),
    widen=st.lists(st.integers(0, 1), min_size=4, max_size=4),
    side=st.booleans(),
    itemsize=st.sampled_from([1, 2, 64]),
)
def test_only_ranges_that_lie_in_one_piece_on_both_sides_are_a_copy_engines(
    shape: list[int], widen: list[int], side: bool, itemsize: int
) -> None:
    dims, strides, step = [*shape, itemsize], [], 1
    for size, more in zip(dims[::-1], [0, *widen], strict=False):
        strides.insert(0, step)
        step *= size + more
    plain = [int(np.prod(dims[i + 1 :])) for i in range(len(dims))]
    both = (np.asarray([strides]), np.asarray([plain]))
    nbytes = np.asarray([int(np.prod(dims))])
    boxes = Boxes(np.asarray([dims]), *(both if side else both[::-1]))
    batch = Batch(Endpoint("cuda_ipc", "cuda_ipc", "file@boot", 1), nbytes, nbytes, nbytes, ["w"], boxes)
    at = np.add.reduce(np.meshgrid(*(np.arange(n) * s for n, s in zip(dims, strides, strict=True)), indexing="ij")).reshape(-1)
    one_piece = bool((np.diff(at) == 1).all())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ipc_copies, "COPY_FROM", 256)
        assert long_ranges(batch).tolist() == [one_piece and int(nbytes[0]) >= 256]
