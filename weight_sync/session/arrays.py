"""The few operations on live bytes that host memory (numpy arrays) and a GPU's memory (torch tensors) do not share.

Everything else in this package slices, reshapes and assigns, which both understand. Views are of unsigned words on the host and
of signed ones on a GPU (torch has no arithmetic on unsigned words); only their bits matter.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

PIECE = 64 << 20
"""Bytes brought from a GPU to the host at a time."""


def on_host(view: Any) -> bool:
    return isinstance(view, np.ndarray)


def address(view: Any) -> int:
    """Of the first element."""
    return int(view.ctypes.data) if on_host(view) else int(view.data_ptr())


def to_host(view: Any) -> Any:
    """The same values as a numpy array; a copy unless they are there already."""
    return view if on_host(view) else view.cpu().numpy()


def current(device: Any) -> AbstractContextManager[Any]:
    """This device for launches: kernels go to the current one, wherever their tensors are."""
    import torch  # pyright: ignore[reportMissingImports] - only where there is a GPU

    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def soon(array: Any, device: Any) -> Any:
    """A numpy array as a tensor on a device, before whatever is asked of that device next; the host does not wait for it."""
    import torch  # pyright: ignore[reportMissingImports] - only where there is a GPU

    here = torch.from_numpy(array)
    return here.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else here


def columns_for(rows: Any) -> Any:
    """int64 [rows, n] with a column more where n is odd: each row begins at a multiple of 16 bytes.

    Triton compiles a kernel for whether its pointers are such, so once more in the middle of a sync where they are not.
    """
    return np.pad(rows, ((0, 0), (0, rows.shape[1] % 2)))


def equal(a: Any, b: Any) -> bool:
    if on_host(a):
        return bool(np.array_equal(a, b))
    import torch  # pyright: ignore[reportMissingImports] - a view on a GPU is a torch tensor

    return bool(torch.equal(a, b))


def invert(view: Any) -> None:
    """Every bit, in place."""
    if on_host(view):
        np.invert(view, out=view)
    else:
        view.bitwise_not_()
