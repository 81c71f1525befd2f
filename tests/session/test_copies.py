"""Copies of bytes in host memory and what differs from them; tests/trainer/test_device_copies.py has those of torch tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from weight_sync.session import copies
from weight_sync.session.copies import Differing, differing, duplicates
from weight_sync.session.memory import Memory
from weight_sync.session.snapshot import Snapshot

SIZES = [0, 1, 63, 64, 65, 128, 1000]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of 64 bytes, and more than one thread on any machine."""
    monkeypatch.setattr(copies, "_SHARE", 64)
    monkeypatch.setattr(copies, "THREADS", 3)


def arrays(seed: int = 0) -> list[np.ndarray[Any, Any]]:
    noise = np.random.default_rng(seed)
    return [noise.integers(0, 256, size, np.uint8) for size in SIZES]


def test_a_copy_is_equal_and_shares_no_memory() -> None:
    live = arrays()
    made = duplicates(live)
    assert all(np.array_equal(a, b) for a, b in zip(live, made, strict=True))
    assert not any(np.shares_memory(a, b) for a, b in zip(live, made, strict=True))
    assert differing(made, live) == [Differing()] * len(SIZES)


def test_one_byte_is_found_wherever_it_is() -> None:
    base = arrays()[-1]
    live = [base.copy() for _ in base]
    for i, array in enumerate(live):
        array[i] ^= 1 << i % 8
    assert differing([base] * len(live), live) == [Differing(1, i) for i in range(len(live))]


@pytest.mark.parametrize("seed", range(5))
def test_bytes_in_several_pieces_are_counted_exactly_and_the_first_is_the_first(seed: int) -> None:
    noise = np.random.default_rng(seed)
    live, made = arrays(seed), duplicates(arrays(seed))
    where = [np.flatnonzero(noise.random(size) < 0.02) for size in SIZES]
    for array, at in zip(live, where, strict=True):
        array[at] += 1
    want = [Differing(len(at), int(at[0])) if len(at) else Differing() for at in where]
    assert differing(made, live) == want


def test_a_copy_of_another_length_is_never_called_equal() -> None:
    for wrong in (np.zeros(1, np.uint8), np.zeros(99, np.uint8)):
        with pytest.raises(ValueError, match=f"{len(wrong)} bytes to be compared with a copy of 100"):
            differing([np.zeros(100, np.uint8)], [wrong])
    with pytest.raises(ValueError):
        differing([np.zeros(100, np.uint8)], [])


def test_the_digests_of_a_snapshot_are_of_every_copy_however_many_threads_there_are() -> None:
    taken = Snapshot(Memory({f"w{i}": np.full(9, i, np.int16) for i in range(8)}, "rollout rank 0"))
    assert len(set(taken._digests.values())) == len(taken._copies) == 8
