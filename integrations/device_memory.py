"""Is device memory plain (cudaMalloc) or mapped virtual memory (memory savers, sleep mode, expandable segments)?

Mapped memory cannot be shared by legacy CUDA IPC handles nor registered as a whole by RDMA drivers, and after a release and
resume the same address stands for other physical pages, which an address-based epoch does not see. So it is recognised by
asking the driver about the address itself (cuPointerGetAttribute), whichever allocator made it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import TYPE_CHECKING

from weight_sync.errors import BindError

if TYPE_CHECKING:
    import torch

_IS_LEGACY_IPC_CAPABLE = 10
"""CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE in cuda.h: false for cuMemMap and for stream-ordered pools."""


def virtual_memory(tensors: Iterable[torch.Tensor]) -> str | None:
    """Why these tensors cannot be registered, or None when all are plain memory. CPU tensors are plain."""
    addresses = sorted({t.untyped_storage().data_ptr() for t in tensors if t.is_cuda})
    mapped = [address for address in addresses if not plain(address)]
    if not mapped:
        return None
    return (
        f"{len(mapped)} of {len(addresses)} weight allocations are mapped virtual memory (first at {mapped[0]:#x}), which a "
        "transport cannot register: a memory saver, sleep mode or PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True made them. "
        "Start without it"
    )


def plain(address: int) -> bool:
    """Whether a device address was made by cudaMalloc. Raises BindError when the driver does not know the address."""
    answer = ctypes.c_uint(0)
    code = ctypes.CDLL("libcuda.so.1").cuPointerGetAttribute(
        ctypes.byref(answer), ctypes.c_int(_IS_LEGACY_IPC_CAPABLE), ctypes.c_ulonglong(address)
    )
    if code:
        raise BindError(f"cuPointerGetAttribute does not know device address {address:#x}: CUDA error {code}")
    return bool(answer.value)
