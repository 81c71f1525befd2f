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
