"""The layout of engine workers that get whole HF tensors beside their weights, for the engine's own loader to place."""

from __future__ import annotations

import numpy as np

from weight_sync.layout.table import Layout, Param


def whole(layout: Layout) -> Layout:
    """Every HF tensor of which a rank of `layout` holds any box, whole and row-major, as a parameter of the tensor's own name.

    dtypes are those of the checkpoint: a cast that the engine's loader makes is the loader's.
    """
    catalog = layout.catalog
    pairs = np.unique(np.stack([layout.rank, layout.tensor], axis=1), axis=0)
    tensor = pairs[:, 1]
    shape = catalog.shapes[tensor]
    strides = np.ones_like(shape)
    strides[:, :-1] = np.cumprod(shape[:, :0:-1], axis=1)[:, ::-1]
    params: list[Param] = []
    for r, t in pairs.tolist():
        pattern = catalog.pattern_of(t)
        part = pattern.made.part if pattern.made is not None and catalog.is_made[t] else ""
        params.append(Param(r, catalog.name(t), pattern.shape, catalog.dtype_of(t), part=part))
    dims = np.asarray([len(catalog.pattern_of(t).shape) for t in tensor.tolist()], np.int64)
    strides[np.arange(catalog.ndim)[None, :] >= dims[:, None]] = 0
    return Layout(
        layout.side,
        layout.world,
        catalog,
        tuple(params),
        tensor,
        np.arange(len(pairs), dtype=np.int64),
        np.zeros_like(shape),
        shape.copy(),
        np.zeros(len(pairs), np.int64),
        strides,
    )
