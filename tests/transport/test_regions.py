"""Registered ranges and the cutting of writes, against the obvious slow way."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weight_sync.errors import BindError, TransportError
from weight_sync.ids import Deadline
from weight_sync.transport.base import Batch, Endpoint, Region
from weight_sync.transport.regions import RegionTable, check_deadline, failed_range, split

ranges = st.lists(st.tuples(st.integers(1, 400), st.integers(1, 60)), max_size=8)


@given(ranges, ranges)
def test_a_range_is_held_when_one_region_holds_all_of_it(
    registered: list[tuple[int, int]], asked: list[tuple[int, int]]
) -> None:
    table, kept = RegionTable(), []
    for address, nbytes in registered:
        if all(address + nbytes <= a or a + n <= address for a, n in kept):
            table.add([Region(address, nbytes)])
            kept.append((address, nbytes))
        else:
            with pytest.raises(BindError, match="overlap"):
                table.add([Region(address, nbytes)])
    assert sorted((r.address, r.nbytes) for r in table.regions) == sorted(kept)
    addresses, sizes = (np.array([pair[i] for pair in asked], np.int64) for i in (0, 1))
    slow = [not any(a <= address and address + nbytes <= a + n for a, n in kept) for address, nbytes in asked]
    assert table.outside(addresses, sizes).tolist() == slow
    assert table.first_outside(addresses, sizes) == (slow.index(True) if True in slow else None)


def test_a_refused_registration_leaves_the_table_as_it_was() -> None:
    table = RegionTable()
    table.add([Region(100, 10)])
    with pytest.raises(BindError):
        table.add([Region(200, 10), Region(105, 1)])
    assert table.regions == [Region(100, 10)]


@given(ranges)
def test_published_ranges_that_overlap_count_as_one(pairs: list[tuple[int, int]]) -> None:
    covered = {byte for address, nbytes in pairs for byte in range(address, address + nbytes)}
    table = RegionTable.published(pairs)
    assert {byte for r in table.regions for byte in range(r.address, r.address + r.nbytes)} == covered


def test_a_region_published_in_parts_is_one_and_others_that_touch_are_not() -> None:
    # 250 bytes in parts of 100, and two regions that touch each other.
    listed = [(1000, 100), (1100, 100), (1200, 50), (2000, 30), (2030, 30)]
    assert RegionTable.published(listed, in_parts=True).regions == [Region(1000, 250), Region(2000, 30), Region(2030, 30)]
    assert len(RegionTable.published(listed)) == 5


@given(st.lists(st.integers(1, 50), min_size=1, max_size=20), st.integers(1, 20))
def test_cutting_keeps_every_byte_in_order_and_no_piece_is_longer(sizes: list[int], piece: int) -> None:
    nbytes = np.array(sizes, np.int64)
    source, destination = np.arange(len(sizes)) * 100, np.arange(len(sizes)) * 1000 + 7
    parts = split(source, destination, nbytes, piece)
    moved = [(int(s) + k, int(d) + k, int(p)) for s, d, n, p in zip(*parts, strict=True) for k in range(int(n))]
    assert moved == [(i * 100 + k, i * 1000 + 7 + k, i) for i, size in enumerate(sizes) for k in range(size)]
    assert parts[2].min() >= 1
    assert parts[2].max() <= piece


def test_the_error_of_one_write_says_which_and_survives_pickling() -> None:
    endpoint = Endpoint("mooncake", "tcp", "10.0.0.1:15000", 3)
    ones = np.array([64, 128], np.int64)
    error = failed_range(Batch(endpoint, ones, ones, ones, ["a", "lm_head.weight"]), 1, "it failed", -1)
    for seen in (error, pickle.loads(pickle.dumps(error))):
        assert (seen.tensor, seen.byte_range, seen.code) == ("lm_head.weight", (128, 256), -1)
        assert "mooncake/tcp 10.0.0.1:15000" in str(seen)


def test_a_passed_deadline_is_the_contracts_error() -> None:
    with pytest.raises(TransportError, match="within the deadline of 0 s"):
        check_deadline("here", Deadline.after(0.0), "probe")
    assert check_deadline("here", Deadline.after(9.0), "probe") > 8
