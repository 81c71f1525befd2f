"""A position-dependent 64-bit fingerprint of a tensor's bytes, computed where the tensor is. Tells "untouched" from "touched".

Not the digest of a sync (weight_sync.session.memory): that one is compared between processes, this one within one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_CHUNK = 1 << 22  # 64-bit words at once: bounds the temporary memory to 64 MiB


def fingerprint(tensor: torch.Tensor) -> int:
    """A 64-bit sum over bytes that depends on each word's position, and on shape and dtype. Runs where the tensor is."""
    import torch

    shape = hash((tuple(tensor.shape), str(tensor.dtype)))
    if tensor.is_meta or tensor.numel() == 0:
        return shape
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    whole = data.numel() // 8 * 8
    if data.storage_offset() % 8 or data.data_ptr() % 8:
        data = data.clone()
    words, rest = data[:whole].view(torch.int64), data[whole:].to(torch.int64)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, words.numel(), _CHUNK):
        part = words[start : start + _CHUNK]
        total += (part * _weights(start, part)).sum()
    total += (rest * _weights(words.numel(), rest)).sum()
    return hash((int(total), shape))


def _weights(start: int, part: torch.Tensor) -> torch.Tensor:
    import torch

    # Odd multipliers, different for every position; products and sums wrap around at 64 bits.
    positions = torch.arange(start, start + part.numel(), dtype=torch.int64, device=part.device)
    return positions * -7046029254386353131 * 2 + 1  # 2**64 / golden ratio, as a signed number
