"""Whether thousands of tensors still lie where they lay.

Looked at several times in each sync, mostly while engines are paused, so it must not cost what describing them costs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from operator import attrgetter, eq, methodcaller
from typing import Any

import numpy as np


class Places:
    """Address of the first element, shape, strides and dtype of tensors: all that decides which byte is which element.

    There may be ten thousand: column by column that is a third faster than tensor by tensor. Torch has a comparison of shapes,
    strides and dtypes in C++, which torch.compile guards its code with; it is three times as fast again and asks for more than
    we do (also devices, classes, whether gradients are wanted). So what it finds equal is equal, and what it does not is
    compared here.
    """

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        values = list(tensors.values())
        self._names = list(tensors)
        self._at, *rest = (list(column) for column in _columns(values))
        self._rest = rest
        self._guard = _guard(values, *rest[:2])
        self._lie = _lie(values, self._at)

    def same(self, tensors: Mapping[str, Any]) -> bool:
        """Whether these have the same names, in this order, and lie in the same places."""
        if list(tensors) != self._names:
            return False
        values = list(tensors.values())
        if self._guarded(values):
            return self._lie(values)
        at, *rest = _columns(values)
        return all(all(map(eq, now, then)) for now, then in zip((at, *rest), (self._at, *self._rest), strict=True))

    def _guarded(self, values: Sequence[Any]) -> bool:
        try:
            return self._guard is not None and bool(self._guard.check(*values))
        except TypeError:  # no longer torch's tensors
            return False


def _guard(values: Collection[Any], shapes: Collection[Any], strides: Collection[Any]) -> Any:
    """torch's comparison for these tensors; None where they are not torch's, or this torch has it not, or not as known."""
    if not values or any(isinstance(t, np.ndarray) for t in values):
        return None
    try:
        from torch._C._dynamo.guards import TensorGuards  # pyright: ignore[reportMissingImports]

        guard = TensorGuards(
            *values, dynamic_dims_sizes=[list(shape) for shape in shapes], dynamic_dims_strides=[list(s) for s in strides]
        )
        return guard if guard.check(*values) else None
    except (ImportError, TypeError, ValueError, RuntimeError):  # it is no public part of torch
        return None


def _lie(values: list[Any], at: list[int]) -> Callable[[list[Any]], bool]:
    """Whether tensors begin at these addresses: by torch's comparison for CUDA graphs, where this torch has it as known."""

    def one_by_one(now: list[Any]) -> bool:
        return all(map(eq, map(methodcaller("data_ptr"), now), at))

    try:
        from torch._C import _tensors_data_ptrs_at_indices_equal as equal  # pyright: ignore

        all_, other = list(range(len(at))), [at[0] + 1, *at[1:]]
        if equal(values, at, all_) is not True or equal(values, other, all_) is not False:
            return one_by_one
    except (ImportError, TypeError, RuntimeError, IndexError):
        return one_by_one
    return lambda now: bool(equal(now, at, all_))


def _columns(tensors: Collection[Any]) -> tuple[Iterable[Any], ...]:
    if any(isinstance(t, np.ndarray) for t in tensors):
        return map(_address, tensors), map(attrgetter("shape"), tensors), map(_strides, tensors), map(_dtype, tensors)
    return (
        map(methodcaller("data_ptr"), tensors),
        map(attrgetter("shape"), tensors),
        map(methodcaller("stride"), tensors),
        map(attrgetter("dtype"), tensors),
    )


def _address(tensor: Any) -> int:
    return tensor.__array_interface__["data"][0] if isinstance(tensor, np.ndarray) else tensor.data_ptr()


def _strides(tensor: Any) -> tuple[int, ...]:
    return tensor.strides if isinstance(tensor, np.ndarray) else tensor.stride()


def _dtype(tensor: Any) -> Any:
    return getattr(tensor, "dtype_label", tensor.dtype)
