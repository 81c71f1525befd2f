"""The weights of verl_nccl.py: a function of version, name of the HF tensor and number of the element, so that the rollout's
process knows what every byte of the engine's live parameters must be without having been sent anything."""

from __future__ import annotations

import os
import zlib
from functools import cache
from typing import Any

import torch

_PIECE = 1 << 24


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@cache
def _ramp(device: str) -> torch.Tensor:
    return torch.arange(_PIECE, dtype=torch.int32, device=device)


def values(name: str, count: int, version: int, device: str) -> torch.Tensor:
    """The bits (int16) of an HF tensor's `count` bf16 elements: a hash that is the same on CPUs and GPUs. All are finite."""
    key = zlib.crc32(f"{version} {name}".encode()) - (1 << 31)
    bits = torch.empty(count, dtype=torch.int16, device=device)
    for begin in range(0, count, _PIECE):
        x = _ramp(device)[: count - begin] * -1640531535 + (key ^ begin)
        x ^= (x >> 15) & 0x1FFFF  # shifts fill with zeros
        x *= 739982445
        x ^= (x >> 12) & 0xFFFFF
        bits[begin : begin + _PIECE] = (x >> 16) & ~0x4000  # without the exponent's highest bit: no NaN
    return bits


def machine() -> dict[str, Any]:
    """What this process runs on."""
    if not torch.cuda.is_available():
        return {"device": "CPU", "torch": torch.__version__}
    import cupy
    from cupy.cuda import nccl

    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "all")
    version = {"torch": torch.__version__, "cupy": cupy.__version__, "nccl": nccl.get_version()}
    return {"device": torch.cuda.get_device_name(), "visible": visible, **version}
