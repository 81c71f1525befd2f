"""CUDA IPC: letting another process of this host reach device memory, and reaching another's.

A handle stands for one whole cudaMalloc allocation; memory that was mapped piecewise (CUDA's virtual memory management: torch's
expandable segments, memory savers) has none and is refused by name. Uses NVIDIA's cuda-bindings.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
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


def copy_later(to: int, from_: int, nbytes: int, stream: Any) -> None:
    """A copy between any two addresses in the order of a torch stream; host memory must be pinned."""
    cuda = _cuda()
    _checked(
        "queueing a few bytes",
        cuda.cuMemcpyAsync(cuda.CUdeviceptr(to), cuda.CUdeviceptr(from_), nbytes, cuda.CUstream(stream.cuda_stream)),
    )


class CopyBatches:
    """Copies that are queued again and again, in calls of some of them: addresses are turned into the driver's types once.

    Copies of one call follow what the stream was given before, and are in no order among themselves. A call of many costs what
    its bytes cost on the wire, where each copy queued by itself costs microseconds beyond (benchmarks/gpu_notes.md).
    """

    def __init__(self, to: Sequence[int], from_: Sequence[int], nbytes: Sequence[int], most: int, count: int) -> None:
        """most, count: bytes and copies of a call."""
        cuda = _cuda()
        self._calls: list[tuple[list[Any], list[Any], list[int]]] = []
        used = most
        for target, source, size in zip(to, from_, nbytes, strict=True):
            if used + size > most or len(self._calls[-1][0]) == count:
                self._calls.append(([], [], []))
                used = 0
            targets, sources, sizes = self._calls[-1]
            targets.append(cuda.CUdeviceptr(target))
            sources.append(cuda.CUdeviceptr(source))
            sizes.append(size)
            used += size
        self._attributes = cuda.CUmemcpyAttributes()
        self._attributes.srcAccessOrder = cuda.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM

    def queue(self, stream: Any) -> None:
        """In the order of a torch stream, which must not be the default one."""
        cuda = _cuda()
        there = cuda.CUstream(stream.cuda_stream)
        for targets, sources, sizes in self._calls:
            code = cuda.cuMemcpyBatchAsync(targets, sources, sizes, len(sizes), [self._attributes], [0], 1, there)
            _checked(f"queueing a batch of {len(sizes)} copies", code[:1])
