"""Helpers that several SGLang tests use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch


def replay(
    shards: Sequence[Mapping[str, Any]],
    constants: Sequence[Mapping[str, Any]],
    source: Mapping[str, torch.Tensor],
    target: Mapping[str, torch.Tensor],
) -> None:
    """Carry out a recording: copy each box of a source tensor to its place in a target parameter."""
    for entry in constants:
        _region(target, entry).fill_(entry["value"])
    for shard in shards:
        box = tuple(slice(o, o + n) for o, n in zip(shard["offset"], shard["shape"], strict=True))
        _region(target, shard).copy_(source[shard["tensor"]][box])


def _region(target: Mapping[str, torch.Tensor], entry: Mapping[str, Any]) -> torch.Tensor:
    param = target[entry["param"]]
    return torch.as_strided(param, entry["shape"], entry["strides"], param.storage_offset() + entry["start"])


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes()


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal shape, dtype and bits; NaNs of equal bits are equal."""
    return a.shape == b.shape and a.dtype == b.dtype and bytes_of(a) == bytes_of(b)
