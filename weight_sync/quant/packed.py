"""UE8M0 scales as DeepGEMM keeps them live: four exponents in an int32, column by column, padded for its tensor loads.

Format: DeepGEMM's get_mn_major_tma_aligned_packed_ue8m0_tensor. A checkpoint's scales are powers of two in float32, one for a
block; live is one for each row of W (every row of a block has the same), four neighbours along K in one int32, the first in
the lowest byte; the tensor [rows, ceil(K / 4)] has its rows next to each other and each column begins on 16 bytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from weight_sync.errors import PlanError

ALIGNED = 16
"""Bytes that a column begins on: TMA's alignment."""


def packed_shape(rows: int, scale_cols: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """(shape, stride) in int32 words of the live tensor for W of that many rows and scale columns."""
    words = ALIGNED // 4
    return (rows, -(-scale_cols // 4)), (1, -(-rows // words) * words)


def pack_ue8m0(scales: NDArray[np.float32], rows: int, block_rows: int) -> NDArray[np.int32]:
    """The live words of a W of `rows` rows, as a flat buffer [ceil(cols / 4) * aligned rows]; padding is zero.

    scales: float32 [ceil(rows / block_rows), cols], powers of two. Raises PlanError for others, whose bits would be lost.
    """
    bits = np.ascontiguousarray(scales, np.float32).view(np.uint32)
    if len(scales) != -(-rows // block_rows):
        raise PlanError(f"{len(scales)} rows of scales for {rows} rows in blocks of {block_rows}")
    if (bits & np.uint32(0x807FFFFF)).any():
        raise PlanError("scales that are no positive powers of two cannot be kept as UE8M0")
    (_, columns), (_, aligned) = packed_shape(rows, scales.shape[1])
    exponents = np.zeros((aligned, columns * 4), np.uint8)
    exponents[:rows, : scales.shape[1]] = np.repeat((bits >> np.uint32(23)).astype(np.uint8), block_rows, axis=0)[:rows]
    return np.ascontiguousarray(exponents.view("<i4").T).reshape(-1)


def unpack_ue8m0(words: Any, rows: int, scale_cols: int, block_rows: int) -> NDArray[np.float32]:
    """The checkpoint's scales from live words. Raises PlanError where rows of one block differ, which no packing gives."""
    (_, columns), (_, aligned) = packed_shape(rows, scale_cols)
    flat = np.ascontiguousarray(np.asarray(words).reshape(columns, aligned).T).astype("<i4")
    exponents = flat.view(np.uint8)[:rows, :scale_cols]
    first = exponents[::block_rows]
    if not np.array_equal(np.repeat(first, block_rows, axis=0)[:rows], exponents):
        raise PlanError(f"UE8M0 scales differ within a block of {block_rows} rows")
    return (first.astype(np.uint32) << np.uint32(23)).view(np.float32)
