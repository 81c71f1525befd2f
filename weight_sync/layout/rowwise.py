"""Sums, products and conjunctions over the dims of each row.

Columns of a layout or plan are [rows, dims] with two or three dims and millions of rows. numpy reduces such a short last axis
row by row, at many times the cost of what is done here: one pass over all rows for each dim.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_Ints = NDArray[np.int64]
_Bools = NDArray[np.bool_]


def product(rows: _Ints) -> _Ints:
    """[rows]: the product over dims; 1 for no dims."""
    result = np.ones(len(rows), np.int64) if not rows.shape[1] else rows[:, 0].copy()
    for d in range(1, rows.shape[1]):
        result *= rows[:, d]
    return result


def total(rows: _Ints) -> _Ints:
    """[rows]: the sum over dims; 0 for no dims."""
    result = np.zeros(len(rows), np.int64) if not rows.shape[1] else rows[:, 0].copy()
    for d in range(1, rows.shape[1]):
        result += rows[:, d]
    return result


def every(rows: _Bools) -> _Bools:
    """[rows]: whether all dims hold; True for no dims."""
    result = np.ones(len(rows), np.bool_) if not rows.shape[1] else rows[:, 0].copy()
    for d in range(1, rows.shape[1]):
        result &= rows[:, d]
    return result


def some(rows: _Bools) -> _Bools:
    """[rows]: whether any dim holds; False for no dims."""
    result = np.zeros(len(rows), np.bool_) if not rows.shape[1] else rows[:, 0].copy()
    for d in range(1, rows.shape[1]):
        result |= rows[:, d]
    return result
