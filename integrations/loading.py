"""Whether a live tensor is still what an engine's load_weights wrote: looked at between loading and post-processing, and after.

After loading, engines turn parameters into what their kernels like: packed, transposed, swapped, requantised, emptied, bound to
other tensors. A one-sided write is right only for a parameter that still holds, byte for byte, what the checkpoint gave it.
Names and shapes do not tell (FlashInfer's swap of the halves of w13 keeps both), so bytes are compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from weight_sync_integrations.fingerprint import fingerprint

if TYPE_CHECKING:
    import torch


def seen(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, int]:
    """Fingerprints by name, taken when load_weights has returned and nothing else has run."""
    return {name: fingerprint(tensor) for name, tensor in tensors}


def changed(loaded: Mapping[str, int], now: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Why tensors are no longer what the checkpoint gave them, by name. loaded: of seen(). now: after post-processing."""
    reasons = dict.fromkeys(loaded.keys() - now.keys(), "post-processing removed it: the kernel uses something made from it")
    for name, tensor in now.items():
        if name not in loaded:
            reasons[name] = "post-processing made it: no checkpoint tensor is loaded into it"
        elif fingerprint(tensor) == loaded[name]:
            continue
        elif tensor.numel() == 0:
            reasons[name] = "post-processing packed it into the kernel's private layout and left it empty"
        elif tensor.dim() == 2 and fingerprint(tensor.t()) == loaded[name]:
            reasons[name] = "post-processing transposed it"
        else:
            reasons[name] = "post-processing rearranged or requantised it: its bytes are not what load_weights wrote"
    return reasons
