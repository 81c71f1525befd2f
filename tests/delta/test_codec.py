"""The wire format: whatever changed comes back exactly, in as few bytes as promised, and nothing else is taken."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from weight_sync.delta.codec import (
    WORDS,
    Change,
    Record,
    decode,
    encode,
    message_bytes,
    most_elements,
    write_message,
)
from weight_sync.delta.message import (
    HEADER_BYTES,
    LANES,
    RECORD_BYTES,
    XXH3,
    Kind,
    Label,
    body_digest,
    directory_end,
    records_in,
)
from weight_sync.delta.spec import LEAST_STAGING, Base, DeltaSpec
from weight_sync.errors import DeltaError

LABEL = Label("3-ab-cd", Base("3-ab-ef", 7, "0123456789abcdef" * 2), "plan", 2, 1 << 40)
QUICK = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def drawn(seed: int, numel: int, size: int, share: float) -> tuple[Any, Any]:
    """(words before, words after) of which about this share differ."""
    rng = np.random.default_rng(seed)
    old = rng.integers(0, 256, numel * size, np.uint8).view(WORDS[size])
    new = old.copy()
    hit = np.flatnonzero(rng.random(numel) < share)
    new[hit] ^= rng.integers(1, 256, len(hit)).astype(WORDS[size])
    return old, new


def records_of(old: Any, new: Any, span: int) -> list[Record]:
    found = []
    for low in range(0, len(new), span):
        positions = np.flatnonzero(old[low : low + span] != new[low : low + span])
        if len(positions):
            found.append(encode(low, new[low : low + span], positions))
    return found


def tiled(record_first: int, words: Any, positions: Any) -> Record:
    """As a GPU would encode it: tile by tile, as the format says."""
    counts, places, values = [], [], []
    for low in range(0, len(words), 256):
        high = min(low + 256, len(words))
        mine = [int(p) for p in positions if low <= p < high]
        if len(mine) >= 255:
            mine = list(range(low, high))
        counts.append(min(len(mine), 255))
        places += [p - low for p in mine]
        values += [words[p] for p in mine]
    index = np.asarray(counts + places, np.uint8)
    new = np.asarray(values, words.dtype)
    return Record(Kind.TILES, words.itemsize, record_first, len(words), len(new), index, new.view(np.uint8))


def message(records: list[tuple[int, Record]], label: Label = LABEL, kind: str = XXH3) -> Any:
    out = np.full(message_bytes(record for _, record in records) + 64, 0xEE, np.uint8)
    used = write_message(out, label, records, kind)
    assert used == len(out) - 64
    assert (out[used:] == 0xEE).all(), "nothing is written behind a message"
    return out[:used]


def apply(changes: list[Change], words: list[Any]) -> None:
    for change in changes:
        at = slice(change.first, change.first + len(change.values)) if change.positions is None else change.positions
        words[change.transfer][at] = change.values


@QUICK
@given(
    st.lists(
        st.tuples(
            st.integers(0, 2**32 - 1),
            st.integers(1, 3000),
            st.sampled_from([1, 2, 4, 8]),
            st.sampled_from([0.0, 0.0005, 0.004, 0.03, 0.2, 0.6, 1.0]),
        ),
        max_size=5,
    ),
    st.integers(1, 1200),
)
def test_what_changed_comes_back_whatever_the_words_sizes_and_densities(drawings: list[Any], span: int) -> None:
    pairs = [drawn(*one) for one in drawings]
    records = [(i, record) for i, (old, new) in enumerate(pairs) for record in records_of(old, new, span)]
    words = [old.copy() for old, _ in pairs]
    changes = decode(message(records), LABEL, [(len(new), new.itemsize) for _, new in pairs])
    apply(changes, words)
    assert all(np.array_equal(a, new) for a, (_, new) in zip(words, pairs, strict=True))
    assert len(changes) == len(records)
    for _, record in records:
        assert record.nbytes <= RECORD_BYTES + -(-record.span * record.itemsize // 8) * 8, "never larger than all elements"


@pytest.mark.parametrize(
    ("share", "kind", "most"),
    [
        (0.001, Kind.GAPS16, 4.2),
        (0.01, Kind.GAPS8, 3.2),
        (0.03, Kind.GAPS8, 3.1),
        (0.5, Kind.BITMAP, 2.3),
        (1.0, Kind.DENSE, 2.01),
    ],
)
def test_a_changed_bf16_element_costs_as_few_bytes_as_the_format_promises(share: float, kind: Kind, most: float) -> None:
    old, new = drawn(1, 1 << 18, 2, share)
    (record,) = records_of(old, new, 1 << 18)
    assert record.kind == kind
    assert record.nbytes / (old != new).sum() < most


@QUICK
@given(st.integers(0, 2**32 - 1), st.integers(1, 3000), st.sampled_from([1, 2, 4, 8]), st.sampled_from([0.01, 0.5, 0.996, 1.0]))
@pytest.mark.parametrize("kind", [XXH3, LANES])
def test_what_a_gpu_tells_tile_by_tile_comes_back(kind: str, seed: int, numel: int, size: int, share: float) -> None:
    old, new = drawn(seed, numel, size, share)
    positions = np.flatnonzero(old != new)
    if not len(positions):
        return
    raw = message([(0, tiled(0, new, positions))], kind=kind)
    words = [old]
    apply(decode(raw, LABEL, [(numel, size)], kind), words)
    assert np.array_equal(words[0], new)
    raw[-1 - len(raw) // 3] ^= 1
    with pytest.raises(DeltaError, match="not those that were sent"):
        decode(raw, LABEL, [(numel, size)], kind)


@pytest.mark.parametrize("numel", [1, 254, 255, 256, 257, 511, 512])
@pytest.mark.parametrize("unchanged", [0, 1, 2])
def test_tiles_of_which_all_or_nearly_all_changed(numel: int, unchanged: int) -> None:
    old, new = np.zeros(numel, np.uint16), np.arange(1, numel + 1).astype(np.uint16)
    new[:unchanged] = old[:unchanged]
    positions = np.flatnonzero(new)
    if not len(positions):
        return
    words = [old]
    apply(decode(message([(0, tiled(0, new, positions))]), LABEL, [(numel, 2)]), words)
    assert np.array_equal(words[0], new)


@pytest.mark.parametrize("gap", [0, 1, 253, 254, 255, 256, 509, 510, 65534, 65535, 65536, 131070, 200000])
@pytest.mark.parametrize("kind", [Kind.GAPS8, Kind.GAPS16])
def test_gaps_around_the_largest_number_of_a_byte_or_two(gap: int, kind: Kind) -> None:
    from weight_sync.delta import codec

    positions = np.asarray([gap, 2 * gap + 1])
    index = codec._gap_index(np.asarray([gap, gap]), codec._GAPS[kind])
    record = Record(kind, 2, 0, 400_002, 2, index, np.asarray([5, 6], "<u2").view(np.uint8))
    (change,) = decode(message([(0, record)]), LABEL, [(400_002, 2)])
    assert change.positions is not None
    assert change.positions.tolist() == positions.tolist()
    assert change.values.tolist() == [5, 6]


def test_an_unchanged_part_has_no_record_and_an_empty_message_changes_nothing() -> None:
    with pytest.raises(DeltaError, match="nothing changed"):
        encode(0, np.zeros(4, np.uint16), np.empty(0, np.int64))
    assert decode(message([]), LABEL, []) == []


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("staging", [LEAST_STAGING, 4096, 64 << 20])
def test_any_record_of_as_many_elements_as_promised_fits_a_message(staging: int, size: int) -> None:
    limit = DeltaSpec(staging=staging).message
    assert 2 * limit <= staging
    span = min(1 << 16, most_elements(limit, size))
    assert span >= 1
    words = np.arange(span).astype(WORDS[size])
    assert message_bytes([encode(0, words, np.arange(span))]) <= limit


# -- refused -----------------------------------------------------------------------------------------------------------

SIZES = [(3000, 2), (70, 4), (500, 1)]


def good() -> Any:
    records: list[tuple[int, Record]] = []
    for i, (numel, size) in enumerate(SIZES):
        old, new = drawn(i, numel, size, (0.01, 0.6, 1.0)[i])
        records += [(i, record) for record in records_of(old, new, 1000)]
    return message(records)


@QUICK
@given(st.integers(0, 10**9), st.integers(1, 255))
def test_any_byte_that_is_another_one_is_refused(at: int, flip: int) -> None:
    raw = good().copy()
    raw[at % len(raw)] ^= flip
    with pytest.raises(DeltaError):
        decode(raw, LABEL, SIZES)


@pytest.mark.parametrize("nbytes", [0, 1, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 8])
def test_a_message_that_is_cut_off_is_refused(nbytes: int) -> None:
    with pytest.raises(DeltaError, match=r"bytes, a header alone has 144|another (size|number of records)|ends before its"):
        decode(good()[:nbytes], LABEL, SIZES)
    with pytest.raises(DeltaError, match="another size"):
        decode(np.append(good(), np.zeros(8, np.uint8)), LABEL, SIZES)


@pytest.mark.parametrize(
    ("expects", "says"),
    [
        (replace(LABEL, session="3-ab-00"), "another session"),
        (replace(LABEL, base=replace(LABEL.base, session="x")), "another base session"),
        (replace(LABEL, base=replace(LABEL.base, digest="x")), "another base digest"),
        (replace(LABEL, base=replace(LABEL.base, version=6)), "another base version"),
        (replace(LABEL, plan="other"), "another plan"),
        (replace(LABEL, target=3), "another target"),
        (replace(LABEL, source=1), "another source rank"),
    ],
)
def test_a_message_for_somebody_else_is_refused_by_what_differs(expects: Label, says: str) -> None:
    with pytest.raises(DeltaError, match=says):
        decode(good(), expects, SIZES)


def sealed(raw: Any) -> Any:
    """The same bytes with digests that fit them: what a sender with a mistake would write."""
    raw = raw.copy()
    end = min(directory_end(records_in(raw, LABEL)), len(raw))
    raw[HEADER_BYTES - 32 : HEADER_BYTES - 16] = np.frombuffer(body_digest(XXH3, raw[end:]), np.uint8)
    raw[HEADER_BYTES - 16 : HEADER_BYTES] = 0
    raw[HEADER_BYTES - 16 : HEADER_BYTES] = np.frombuffer(xxhash.xxh3_128_digest(raw[:end].data), np.uint8)
    return raw


def _record(**fields: Any) -> Callable[[], Any]:
    """A message of one gap record (elements 3 and 10 of 16) with other fields."""

    def make() -> Any:
        new = np.arange(16, dtype="<u2")
        base = Record(Kind.GAPS8, 2, 0, 16, 2, np.asarray([3, 6], np.uint8), new[[3, 10]].view(np.uint8))
        return message([(fields.get("transfer", 0), replace(base, **{k: v for k, v in fields.items() if k != "transfer"}))])

    return make


def _poke(at: int, code: str, value: int) -> Callable[[], Any]:
    def make() -> Any:
        raw = _record()().copy()
        raw[at : at + struct.calcsize(code)] = np.frombuffer(struct.pack(f"<{code}", value), np.uint8)
        return sealed(raw)

    return make


def _two(first: int, transfers: tuple[int, int] = (0, 0)) -> Callable[[], Any]:
    def make() -> Any:
        one = Record(Kind.DENSE, 2, 4, 4, 4, np.empty(0, np.uint8), np.zeros(8, np.uint8))
        return message([(transfers[0], one), (transfers[1], replace(one, first=first))])

    return make


FIRST = HEADER_BYTES


def _tiles(index: list[int], values: int, span: int = 400) -> Callable[[], Any]:
    """A message of one record of tiles, of `span` elements."""

    def make() -> Any:
        held = Record(Kind.TILES, 2, 0, span, values, np.asarray(index, np.uint8), np.zeros(2 * values, np.uint8))
        return message([(0, held)])

    return make


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (_tiles([2, 1, 3, 200, 143], 3), None),
        (_tiles([2, 1, 3, 3, 143], 3), "not in order"),
        (_tiles([2, 1, 4, 3, 143], 3), "not in order"),
        (_tiles([2, 1, 3, 200, 144], 3), "a tile that it does not have"),
        (_tiles([2, 2, 3, 200, 143], 3), "tiles of 4 elements, not 3"),
        (_tiles([3, 1, 3, 200, 143], 3), "tiles of 4 elements, not 3"),
        (_tiles([0, 145, *range(145)], 145), "or of more than they have"),
        (_tiles([0, 255, *range(144)], 144), None),
        (_tiles([0, 255, *range(143)], 143), "tiles of 144 elements, not 143"),
        (_tiles([255, 0, *range(255), 255], 256), None),
        (_tiles([2, 1, 3, 200], 3), "4 bytes for 2 tiles and 3 values"),
        (_tiles([2, 1, 3, 200, 143, 0], 3), "6 bytes for 2 tiles and 3 values"),
    ],
)
def test_tiles_that_are_not_as_the_format_says_are_refused_even_with_a_digest_that_fits(make: Any, says: str | None) -> None:
    if says is None:
        assert decode(make(), LABEL, [(400, 2)])
        return
    with pytest.raises(DeltaError, match=says):
        decode(make(), LABEL, [(400, 2)])


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (_record(transfer=2), "transfer 2 are not in the plan"),
        (_record(first=8), r"elements \[8, 24\) of transfer 0 are not in the plan"),
        (_record(itemsize=4, values=np.zeros(8, np.uint8)), "elements of 4 bytes; transfer 0 has other ones"),
        (_record(index=np.asarray([3, 13], np.uint8)), "gaps lead to element 17 of 16"),
        (_record(index=np.asarray([3, 255], np.uint8)), "gaps lead to 1 elements, not 2"),
        (_record(index=np.asarray([3, 6, 1], np.uint8)), "gaps lead to 3 elements, not 2"),
        (_record(index=np.asarray([3, 1, 255], np.uint8)), "gaps lead to 2 elements, not 2"),
        (_record(index=np.empty(0, np.uint8)), "gaps lead to 0 elements"),
        (_record(kind=Kind.GAPS16, index=np.asarray([3, 0, 6], np.uint8)), "3 bytes of gaps of 2"),
        (_record(kind=Kind.BITMAP, index=np.asarray([8, 4], np.uint8), span=16, changed=2), None),
        (_record(kind=Kind.BITMAP, index=np.asarray([8, 5], np.uint8)), "a bitmap of 3 elements"),
        (_record(kind=Kind.BITMAP, index=np.asarray([8], np.uint8)), "a bitmap of 1 bytes for 16 elements"),
        (_record(kind=Kind.BITMAP, index=np.asarray([8, 4], np.uint8), span=10), r"a bitmap of 2 elements up to \[10\]"),
        (_record(kind=Kind.DENSE), "dense, but 2 values and 2 bytes of index for 16 elements"),
        (_record(changed=0, values=np.empty(0, np.uint8)), "0 of 16 elements"),
        (_record(changed=3), "gaps lead to 2 elements, not 3"),
        (_record(changed=17), "17 of 16 elements"),
        (_record(changed=9, span=9), "leave the message"),
        (_record(span=0, changed=0), "0 of 0 elements"),
        (_poke(FIRST + 4, "B", 5), "unknown kind 5"),
        (_poke(FIRST + 6, "H", 1), "reserved bytes in use"),
        (_poke(FIRST + 28, "I", 1), "reserved bytes in use"),
        (_poke(FIRST + 24, "I", 1 << 20), "leave the message"),
        (_poke(FIRST + RECORD_BYTES + 4, "B", 9), "bytes between its parts are not zero"),
        (_poke(FIRST + RECORD_BYTES + 12, "B", 9), "bytes between its parts are not zero"),
        (_poke(12, "I", 2), "the message ends before its 2 records"),
        (_poke(12, "I", 3), "the message ends before its 3 records"),
        (_poke(12, "I", 0), "bytes behind its last record"),
        (_poke(FIRST + 8, "Q", 2**63 - 1), "are not in the plan"),
        (_poke(FIRST + 8, "Q", 2**64 - 1), "are not in the plan"),
        (_poke(8, "H", 1), "another format"),
        (_poke(10, "H", 1), "another kind of digest"),
        (_poke(0, "B", 0x57), "another magic"),
        (_two(6), "overlaps what came before"),
        (_two(0), "comes late"),
        (_two(8), None),
        (_two(2), "overlaps what came before"),
        (_two(8, (1, 0)), "transfer 0 from element 8 overlaps what came before, or comes late"),
        (_two(0, (0, 1)), None),
    ],
)
def test_what_is_malformed_or_out_of_range_is_refused_even_with_a_digest_that_fits(make: Any, says: str | None) -> None:
    raw, sizes = make(), [(16, 2), (16, 2)]
    if says is None:
        assert decode(raw, LABEL, sizes)
        return
    with pytest.raises(DeltaError, match=says):
        decode(raw, LABEL, sizes)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=6))
def test_a_sender_with_any_mistake_is_refused_or_stays_inside_the_transfers(pokes: list[tuple[int, int]]) -> None:
    raw = good().copy()
    for at, value in pokes:
        raw[HEADER_BYTES + at % (len(raw) - HEADER_BYTES)] = value
    try:
        changes = decode(sealed(raw), LABEL, SIZES)
    except DeltaError:
        return
    for change in changes:
        numel, size = SIZES[change.transfer]
        assert change.values.itemsize == size
        last = change.first + len(change.values) - 1 if change.positions is None else int(change.positions[-1])
        assert 0 <= change.first <= last < numel
        if change.positions is not None:
            assert (np.diff(change.positions) > 0).all()
            assert len(change.positions) == len(change.values)
