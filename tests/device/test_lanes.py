"""The digest for GPUs, by its numpy form, against the definition written out word by word."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from weight_sync.device.lanes import GOLDEN, MIX_1, MIX_2, ODD, Lanes

FULL = 2**64 - 1


def mix(x: int) -> int:
    x ^= x >> 33
    x = x * MIX_1 & FULL
    x ^= x >> 33
    x = x * MIX_2 & FULL
    return x ^ (x >> 33)


def by_definition(data: bytes) -> int:
    padded = data + bytes(-len(data) % 8)
    words = [int.from_bytes(padded[i : i + 8], "little") for i in range(0, len(padded), 8)]
    total = sum(mix((word + (i + 1) * GOLDEN) & FULL) for i, word in enumerate(words))
    return mix((total + len(data) * ODD) & FULL)


def lanes(*parts: bytes) -> int:
    digest = Lanes()
    for part in parts:
        digest.update(part)
    return digest.intdigest()


def test_mix_is_the_finaliser_of_murmurhash3() -> None:
    # Appleby's fmix64 of 1, as other implementations print it.
    assert mix(1) == 0xB456BCFC34C2CB2C


@given(st.lists(st.binary(max_size=40), max_size=6))
def test_the_digest_is_its_definition_however_the_bytes_are_fed(parts: list[bytes]) -> None:
    whole = b"".join(parts)
    assert lanes(*parts) == lanes(whole) == by_definition(whole)


@given(st.binary(min_size=1, max_size=200), st.data())
def test_a_changed_byte_changes_the_digest(data: bytes, draw: st.DataObject) -> None:
    at = draw.draw(st.integers(0, len(data) - 1))
    flip = draw.draw(st.integers(1, 255))
    changed = bytearray(data)
    changed[at] ^= flip
    assert lanes(bytes(changed)) != lanes(data)


@given(st.binary(min_size=16, max_size=200), st.data())
def test_two_words_that_change_places_change_the_digest(data: bytes, draw: st.DataObject) -> None:
    words = np.frombuffer(data[: len(data) // 8 * 8], "<u8").copy()
    i, j = (draw.draw(st.integers(0, len(words) - 1)) for _ in range(2))
    swapped = words.copy()
    swapped[[i, j]] = swapped[[j, i]]
    assert (lanes(swapped.tobytes()) == lanes(words.tobytes())) == bool(words[i] == words[j])


def test_zeros_of_another_length_have_another_digest() -> None:
    assert len({lanes(bytes(n)) for n in range(64)}) == 64


def test_bytes_that_start_between_two_words_of_memory_are_read_right() -> None:
    memory = np.random.default_rng(0).integers(0, 256, 5000, dtype=np.uint8)
    for offset in range(9):
        assert lanes(memory[offset : offset + 4000].data) == by_definition(memory[offset : offset + 4000].tobytes())
