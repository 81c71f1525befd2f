"""CUDA IPC: letting another process of this host reach device memory, and reaching another's.

A handle stands for one whole cudaMalloc allocation; memory that was mapped piecewise (CUDA's virtual memory management: torch's
expandable segments, memory savers) has none and is refused by name. Uses NVIDIA's cuda-bindings.
"""

from __future__ import annotations

import ctypes
from typing import Any

from weight_sync.errors import BindError

_HANDLE_BYTES = 64
"""CU_IPC_HANDLE_SIZE. Read and written where they lie: cuda-bindings 13.0 has them as `reserved` too, 13.5 has not."""


def _cuda() -> Any:
    try:
        from cuda.bindings import driver  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise BindError(f"CUDA IPC needs NVIDIA's cuda-bindings package in this environment: {error}") from error
    return driver


def _checked(what: str, result: tuple[Any, ...]) -> Any:
    code, *values = result
    if int(code) != 0:
        raise BindError(f"{what}: {code.name} ({int(code)})")
    return values[0] if len(values) == 1 else values


def export(address: int) -> tuple[int, int, str]:
    """(base address, bytes, handle in hex) of the allocation that holds `address`. BindError where it cannot be shared."""
    cuda = _cuda()
    base, nbytes = _checked(f"no allocation at {address:#x}", cuda.cuMemGetAddressRange(cuda.CUdeviceptr(address)))
    handle = _checked(
        f"the allocation at {int(base):#x} ({int(nbytes)} bytes) cannot be shared by CUDA IPC; memory from virtual memory "
        "management (expandable segments, a memory saver) cannot",
        cuda.cuIpcGetMemHandle(base),
    )
    return int(base), int(nbytes), ctypes.string_at(int(handle.getPtr()), _HANDLE_BYTES).hex()


def open_handle(handle: str) -> int:
    """Address at which the allocation is mapped in this process. Each open needs one close_handle."""
    cuda = _cuda()
    mine = cuda.CUipcMemHandle()
    raw = bytes.fromhex(handle)
    if len(raw) != _HANDLE_BYTES:
        raise BindError(f"a peer's CUDA IPC handle has {len(raw)} bytes instead of {_HANDLE_BYTES}")
    ctypes.memmove(int(mine.getPtr()), raw, _HANDLE_BYTES)
    flags = cuda.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS.value
    return int(_checked("opening a peer's CUDA IPC handle", cuda.cuIpcOpenMemHandle(mine, flags)))


def close_handle(address: int) -> None:
    cuda = _cuda()
    _checked("closing a peer's CUDA IPC handle", cuda.cuIpcCloseMemHandle(cuda.CUdeviceptr(address)))


def copy(to: int, from_: int, nbytes: int, device: Any) -> None:
    """Blocking copy between any two addresses (host, device, a peer's mapped memory); for a few bytes."""
    import torch  # pyright: ignore[reportMissingImports]

    cuda = _cuda()
    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()
        _checked("copying a few bytes", cuda.cuMemcpy(cuda.CUdeviceptr(to), cuda.CUdeviceptr(from_), nbytes))
        torch.cuda.synchronize(device)
