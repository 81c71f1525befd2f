"""The casts of a sync are those of torch, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from weight_sync.session.casts import cast_into

BLOCK = 1 << 20


def torch_words(words: np.ndarray, source: torch.dtype, target: torch.dtype) -> np.ndarray:
    cast = torch.from_numpy(words).view(source).to(target)
    return cast.view(torch.int32 if target is torch.float32 else torch.int16).numpy().view(f"u{target.itemsize}")


def test_every_bfloat16_becomes_torchs_float32() -> None:
    words = np.arange(1 << 16, dtype=np.uint16)
    ours = cast_into(np.zeros(4 * words.size, np.uint8), words, "bfloat16", "float32")
    assert (ours == torch_words(words, torch.bfloat16, torch.float32)).all()


@pytest.mark.parametrize("low", [0, 0x007F_0000, 0x3F80_0000, 0x7F78_0000, 0x8000_0000, 0xFF78_0000], ids=hex)
def test_a_million_neighbouring_float32_become_torchs_bfloat16(low: int) -> None:
    """Denormals, the smallest normals, ones, the largest up to infinity and NaN, of both signs. Every tie is among them."""
    words = (np.arange(BLOCK, dtype=np.uint64) + low).astype(np.uint32)
    ours = cast_into(np.zeros(2 * BLOCK, np.uint8), words, "float32", "bfloat16")
    theirs = torch_words(words, torch.float32, torch.bfloat16)
    nan = (words & 0x7FFF_FFFF) > 0x7F80_0000
    assert (ours[~nan] == theirs[~nan]).all()
    assert ((ours[nan] & 0x7FFF) > 0x7F80).all(), "NaN stays NaN; torch's own bits of it differ by code path"


def test_random_float32_words_become_torchs_bfloat16() -> None:
    words = np.random.default_rng(0).integers(0, 1 << 32, BLOCK, np.uint32)
    ours = cast_into(np.zeros(2 * BLOCK, np.uint8), words, "float32", "bfloat16")
    number = (words & 0x7FFF_FFFF) <= 0x7F80_0000
    assert (ours[number] == torch_words(words, torch.float32, torch.bfloat16)[number]).all()
