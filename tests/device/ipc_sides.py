"""Two processes' cuda_ipc transports over the double of a GPU (ipc_support), in one process."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ipc_support import Gpu, Tensor

from weight_sync.ids import Deadline
from weight_sync.transport import cuda_ipc, ipc_copies
from weight_sync.transport.base import Batch, Region
from weight_sync.transport.cuda_ipc import CudaIpcTransport

SOON = Deadline.after(3600)
LONG, SHORT = 256, 16  # bytes of a range that is a copy engine's, and of one that is not


class Side:
    """A process with a registered buffer of one value."""

    def __init__(self, gpu: Gpu, value: int, name: str, copy_engines: bool | None = None) -> None:
        self.buffer = Tensor(np.full(LONG + SHORT, value, np.uint8), gpu)
        self.transport = CudaIpcTransport(copy_engines=copy_engines)
        self.transport._process = name
        self.transport.register([Region(self.buffer.data_ptr(), LONG + SHORT)])

    def batch(self, peer: Side, *, long: bool = True, short: bool = True) -> Batch:
        which = [long, short]
        at, sizes = np.asarray([0, LONG])[which], np.asarray([LONG, SHORT])[which]
        names = [name for name, wanted in zip("ab", which, strict=True) if wanted]
        return Batch(peer.transport.describe(), self.buffer.data_ptr() + at, peer.buffer.data_ptr() + at, sizes, names)

    def meeting(self, peer: Side) -> Any:
        return self.transport._peers[peer.transport.describe()].meeting


@pytest.fixture
def sides(gpu: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Side, Side]:
    """A sender of sevens and a peer with zeros."""
    monkeypatch.setattr(ipc_copies, "COPY_FROM", LONG)
    monkeypatch.setattr(cuda_ipc, "_SETTLE_SECONDS", 0.0)
    monkeypatch.setattr(cuda_ipc, "_DRAIN_SECONDS", 0.2)
    make = cuda_ipc.tempfile.mkstemp
    monkeypatch.setattr(cuda_ipc.tempfile, "mkstemp", lambda prefix, dir: make(prefix=prefix, dir=tmp_path))
    return Side(gpu, 7, "sender"), Side(gpu, 0, "peer")


def written(sender: Side, peer: Side) -> int:
    return sender.transport.wait(sender.transport.write(sender.batch(peer)), SOON).nbytes


def raising(error: BaseException) -> Callable[..., Any]:
    """A function that fails, whatever it is given."""

    def fail(*arguments: Any, **named: Any) -> Any:
        raise error

    return fail


def open_files(folder: Path) -> list[str]:
    """Of this process, in a folder; once for each descriptor, also those whose name is gone."""
    found = (os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd"))
    return [path for path in found if path.startswith(f"{folder}/")]
