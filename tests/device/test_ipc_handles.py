"""CUDA IPC handles as text, over a double of the driver: no GPU, and no cuda-bindings of any version."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np
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


class Driver:
    """A double of the driver's batches of copies, called as C is; it moves the bytes itself. code: what it returns."""

    def __init__(self, code: int = 0) -> None:
        self.calls: list[list[int]] = []
        self.streams: list[int] = []

        def batch(
            to: int, from_: int, nbytes: int, count: int, attributes: int, first: int, kinds: int, failed: int, stream: int
        ) -> int:
            sides = [(ctypes.c_uint64 * count).from_address(at) for at in (to, from_)]
            sizes = (ctypes.c_size_t * count).from_address(nbytes)
            assert ctypes.c_int.from_address(attributes).value == 1
            assert (kinds, ctypes.c_size_t.from_address(first).value) == (1, 0)
            ctypes.c_size_t.from_address(failed).value = 0
            self.calls.append(list(sizes))
            self.streams.append(stream)
            for target, source, size in zip(*sides, sizes, strict=True):
                ctypes.memmove(target, source, size)
            return code

        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        kind = ctypes.CFUNCTYPE(ctypes.c_int, pointer, pointer, pointer, size, pointer, pointer, size, pointer, pointer)
        self._kept = kind(batch)
        self.address = ctypes.cast(self._kept, pointer).value
        self.CUmemcpySrcAccessOrder = SimpleNamespace(CU_MEMCPY_SRC_ACCESS_ORDER_STREAM=1)

    class CUmemcpyAttributes:
        def __init__(self) -> None:
            self._memory = ctypes.c_int(0)

        def __setattr__(self, name: str, value: Any) -> None:
            if name == "srcAccessOrder":
                self._memory.value = value
            else:
                super().__setattr__(name, value)

        def getPtr(self) -> int:
            return ctypes.addressof(self._memory)

    def CUresult(self, code: int) -> Any:
        return SimpleNamespace(name=f"CUDA_ERROR_{code}")

    def cuGetProcAddress(self, symbol: bytes, version: int, flags: int) -> tuple[int, int | None, str]:
        assert (symbol, version, flags) == (b"cuMemcpyBatchAsync", 12080, 0)
        return 0, self.address, "found"


def test_a_call_takes_so_many_bytes_and_copies_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    monkeypatch.setattr(ipc, "_cuda", lambda: driver)
    sizes = [40, 40, 40, 200, 1, 1, 1, 1]
    here, there = np.arange(324, dtype=np.uint8), np.zeros(324, np.uint8)
    at = np.cumsum([0, *sizes[:-1]])
    copies = ipc.CopyBatches((there.ctypes.data + at).tolist(), (here.ctypes.data + at).tolist(), sizes, 100, 3)
    for _ in range(2):
        there[:] = 0
        driver.calls.clear()
        copies.queue(SimpleNamespace(cuda_stream=7))
        assert driver.calls == [[40, 40], [40], [200], [1, 1, 1], [1]]
        assert np.array_equal(there, np.arange(324, dtype=np.uint8))
    assert set(driver.streams) == {7}


def test_a_batch_that_the_driver_refuses_is_an_error_with_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(code=801)
    monkeypatch.setattr(ipc, "_cuda", lambda: driver)
    here = np.zeros(8, np.uint8)
    copies = ipc.CopyBatches([here.ctypes.data], [here.ctypes.data], [8], 100, 3)
    with pytest.raises(BindError, match=r"a batch of 1 copies: CUDA_ERROR_801 \(801\)"):
        copies.queue(SimpleNamespace(cuda_stream=7))


def test_a_driver_without_batches_of_copies_is_said_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    driver.address = 0
    monkeypatch.setattr(ipc, "_cuda", lambda: driver)
    with pytest.raises(BindError, match=r"no batches of copies, which came with CUDA 12\.8"):
        ipc.CopyBatches([0], [0], [8], 100, 3)
