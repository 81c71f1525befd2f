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


_BATCHES_SINCE = 12080
"""Version of CUDA (12.8) whose cuMemcpyBatchAsync is called: newer drivers keep it beside their own."""


class CopyBatches:
    """Copies that are queued again and again, in calls of some of them, whose arrays are made once.

    Copies of one call follow what the stream was given before, and are in no order among themselves. A call of many costs what
    its bytes cost on the wire, where each copy queued by itself costs microseconds beyond. cuda-bindings has the same call over
    lists, which it turns into arrays each time: 1.6 us of the host for each copy (benchmarks/gpu_notes.md).
    """

    def __init__(self, to: Sequence[int], from_: Sequence[int], nbytes: Sequence[int], most: int, count: int) -> None:
        """most, count: bytes and copies of a call. Raises BindError where the driver has no batches of copies."""
        cuda = _cuda()
        self._call = _batch_call(cuda)
        self._attributes = cuda.CUmemcpyAttributes()
        self._attributes.srcAccessOrder = cuda.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
        self._first = ctypes.c_size_t(0)  # of the copies that these attributes are for
        self._failed = ctypes.c_size_t(0)
        self._calls: list[tuple[Any, Any, Any, int]] = []
        for group in _groups(nbytes, most, count):
            targets, sources = ((ctypes.c_uint64 * len(group))(*(side[i] for i in group)) for side in (to, from_))
            sizes = (ctypes.c_size_t * len(group))(*(nbytes[i] for i in group))
            self._calls.append((targets, sources, sizes, len(group)))

    def queue(self, stream: Any) -> None:
        """In the order of a torch stream, which must not be the default one."""
        attributes, first, failed = int(self._attributes.getPtr()), ctypes.byref(self._first), ctypes.byref(self._failed)
        for targets, sources, sizes, count in self._calls:
            code = self._call(targets, sources, sizes, count, attributes, first, 1, failed, stream.cuda_stream)
            if code:
                raise BindError(f"queueing a batch of {count} copies: {_name(code)} ({code})")


def _name(code: int) -> str:
    try:
        return str(_cuda().CUresult(code).name)
    except ValueError:  # newer than these bindings
        return "CUDA error"


def _batch_call(cuda: Any) -> Any:
    """cuMemcpyBatchAsync as a function of C: arrays of targets, sources and sizes, their length, attributes, to which copies
    each belongs, how many there are, where to say which copy failed, stream."""
    # Bindings of CUDA 11 answer with two values, later ones with three.
    code, address, *said = cuda.cuGetProcAddress(b"cuMemcpyBatchAsync", _BATCHES_SINCE, 0)
    if int(code) != 0 or not int(address or 0):
        raise BindError(f"the driver has no batches of copies, which came with CUDA 12.8 ({_name(int(code))} {said})")
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    kind = ctypes.CFUNCTYPE(ctypes.c_int, pointer, pointer, pointer, size, pointer, pointer, size, pointer, pointer)
    return kind(int(address))


def _groups(nbytes: Sequence[int], most: int, count: int) -> list[list[int]]:
    """Numbers of the copies of each call, in order."""
    groups: list[list[int]] = []
    used = most
    for i, size in enumerate(nbytes):
        if used + size > most or len(groups[-1]) == count:
            groups.append([])
            used = 0
        groups[-1].append(i)
        used += size
    return groups
