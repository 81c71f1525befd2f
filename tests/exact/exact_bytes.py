"""Live torch tensors as bytes: scramble what a loader fills, and compare two models. Used in engine environments."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from tests.exact.exact_session import GARBAGE


def scramble(live: Mapping[str, torch.Tensor], constants: Iterable[Mapping[str, Any]]) -> None:
    """Overwrite every byte, then put back the regions that the engine's own loader fills with a constant (vocabulary padding).

    Such a region is filled when a real engine loads its first checkpoint and is never written by a sync.
    """
    for tensor in live.values():
        as_bytes(tensor).fill_(GARBAGE)
    for entry in constants:
        param = live[entry["param"]]
        region = torch.as_strided(param, entry["shape"], entry["strides"], param.storage_offset() + entry["start"])
        region.fill_(entry["value"])


def spoil(derived: Iterable[torch.Tensor]) -> None:
    """Overwrite tensors of any strides with the same byte."""
    for tensor in derived:
        words = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.itemsize]
        pattern = int.from_bytes(bytes([GARBAGE]) * tensor.itemsize, "little", signed=words != torch.uint8)
        tensor.view(words).fill_(pattern)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The live memory of a contiguous tensor."""
    assert tensor.is_contiguous(), f"shape {tuple(tensor.shape)}, stride {tensor.stride()}"
    return tensor.detach().reshape(-1).view(torch.uint8)


def differing(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor], where: str) -> list[str]:
    """One line for each tensor that is missing, extra, of other shape or dtype, or not equal byte for byte."""
    lines = [f"{where} {name}: only in one of the two models" for name in sorted(found.keys() ^ wanted.keys())]
    for name in found.keys() & wanted.keys():
        a, b = found[name], wanted[name]
        if a.stride() != b.stride():
            lines.append(f"{where} {name}: strides {a.stride()}, should be {b.stride()}")
            continue
        a, b = a.contiguous(), b.contiguous()
        if a.shape != b.shape or a.dtype != b.dtype:
            lines.append(f"{where} {name}: {a.dtype} {tuple(a.shape)}, should be {b.dtype} {tuple(b.shape)}")
            continue
        wrong = (as_bytes(a) != as_bytes(b)).nonzero()
        if len(wrong):
            lines.append(f"{where} {name}: {len(wrong)} of {a.nbytes} bytes differ, the first is byte {int(wrong[0])}")
    return lines
