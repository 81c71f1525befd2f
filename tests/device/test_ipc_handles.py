"""CUDA IPC handles as text, over a double of the driver: no GPU, and no cuda-bindings of any version."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest

from weight_sync.device import ipc
from weight_sync.errors import BindError


class Handle:
    """As cuda-bindings 13.5 has it: nothing but where it lies."""

    def __init__(self, content: bytes = bytes(64)) -> None:
        self._memory = (ctypes.c_uint8 * 64).from_buffer_copy(content)

    def getPtr(self) -> int:
        return ctypes.addressof(self._memory)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The handles that were opened. The driver has one allocation, whose handle is the numbers 0 to 63."""
    found: list[bytes] = []

    def open_handle(handle: Any, flags: int) -> tuple[int, int]:
        found.append(ctypes.string_at(handle.getPtr(), 64))
        return 0, 0x7000

    lazy = SimpleNamespace(value=1)
    driver = SimpleNamespace(
        CUdeviceptr=int,
        CUipcMemHandle=Handle,
        CUipcMem_flags=SimpleNamespace(CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS=lazy),
        cuMemGetAddressRange=lambda address: (0, 0x1000, 4096),
        cuIpcGetMemHandle=lambda base: (0, Handle(bytes(range(64)))),
        cuIpcOpenMemHandle=open_handle,
    )
    monkeypatch.setattr(ipc, "_cuda", lambda: driver)
    return found


def test_a_handle_arrives_as_it_was_exported(opened: list[bytes]) -> None:
    base, nbytes, handle = ipc.export(0x1010)
    assert (base, nbytes, bytes.fromhex(handle)) == (0x1000, 4096, bytes(range(64)))
    assert ipc.open_handle(handle) == 0x7000
    assert opened == [bytes(range(64))]


@pytest.mark.parametrize("wrong", ["", "00" * 63, "00" * 65])
def test_a_handle_of_another_length_is_refused(opened: list[bytes], wrong: str) -> None:
    with pytest.raises(BindError, match=rf"has {len(wrong) // 2} bytes instead of 64"):
        ipc.open_handle(wrong)
    assert not opened


def test_a_call_takes_so_many_bytes_and_copies_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """A double of the driver: a pointer is its number, and every call succeeds."""
    calls: list[tuple[list[int], list[int], list[int], int]] = []

    def queue(to: list[int], from_: list[int], nbytes: list[int], count: int, *rest: Any) -> tuple[int]:
        calls.append((to, from_, nbytes, count))
        return (0,)

    order = SimpleNamespace(CU_MEMCPY_SRC_ACCESS_ORDER_STREAM=1)
    driver = SimpleNamespace(
        CUdeviceptr=int,
        CUstream=int,
        CUmemcpyAttributes=SimpleNamespace,
        CUmemcpySrcAccessOrder=order,
        cuMemcpyBatchAsync=queue,
    )
    monkeypatch.setattr(ipc, "_cuda", lambda: driver)
    sizes = [40, 40, 40, 200, 1, 1, 1, 1]
    ipc.CopyBatches(range(8), range(100, 108), sizes, 100, 3).queue(SimpleNamespace(cuda_stream=7))
    assert [nbytes for _, _, nbytes, _ in calls] == [[40, 40], [40], [200], [1, 1, 1], [1]]
    assert [to for to, *_ in calls] == [[0, 1], [2], [3], [4, 5, 6], [7]]
    assert [from_ for _, from_, *_ in calls] == [[100, 101], [102], [103], [104, 105, 106], [107]]
    assert [count for *_, count in calls] == [2, 1, 1, 3, 1]
