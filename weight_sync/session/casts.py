"""Carrying out a declared cast: live source values into staged bytes of the destination's dtype.

The arithmetic is that of numpy with ml_dtypes. To float32 every value keeps its bits; to bfloat16 values round to nearest, ties
to even, denormals included, as torch's Tensor.to() does it. NaN stays NaN; which one is not defined (torch itself gives
different ones in its vectorised and its scalar path).
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from weight_sync.errors import PlanError
from weight_sync.layout.values import CASTS, legal_casts
from weight_sync.session.arrays import on_host

_NUMPY: dict[str, Any] = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}


def cast_into(out: Any, view: Any, source: str, target: str) -> Any:
    """Convert every value of `view` and lay the results down in `out`, in row-major order.

    out: bytes, exactly as many as are needed. view: live words of dtype `source`, strided as it may be. Returns `out` as an
    array of the view's shape, of dtype `target`'s words. Raises PlanError for a cast outside the closed set.
    """
    if (source, target) not in CASTS:
        raise PlanError(f"no cast from {source} to {target}; legal: {legal_casts()}")
    if not on_host(view):
        return _cast_on_device(out, view, source, target)
    kind = np.dtype(_NUMPY[target])
    values = out.view(kind).reshape(view.shape)
    with np.errstate(over="ignore", invalid="ignore"):  # overflow to infinity and NaN are values here, not events
        np.copyto(values, view.view(_NUMPY[source]), casting="unsafe")
    return values.view(f"u{kind.itemsize}")


def _cast_on_device(out: Any, view: Any, source: str, target: str) -> Any:
    import torch  # pyright: ignore[reportMissingImports] - a view on a GPU is a torch tensor

    values = out.view(getattr(torch, target)).view(tuple(view.shape))
    values.copy_(view.view(getattr(torch, source)))
    return values.view({2: torch.int16, 4: torch.int32}[values.element_size()])
