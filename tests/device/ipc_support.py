"""A GPU, torch and driver for the cuda_ipc transport, of which only the order of things is real.

Addresses are those of host memory, and what is asked of a stream is done when somebody waits for it.
"""

from __future__ import annotations

import ctypes
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import weight_sync.device
from weight_sync.device import ipc


class Stream:
    def __init__(self, gpu: Gpu, device: int) -> None:
        self._gpu, self.device = gpu, device
        self.queue: list[Callable[[], None]] = []
        self._asked = 0

    def ask(self, work: Callable[[], None]) -> None:
        self.queue.append(work)
        self._asked += 1

    def step(self) -> None:
        """The first thing that is not done yet."""
        self.queue.pop(0)()

    def synchronize(self) -> None:
        assert self not in self._gpu.stuck, "waits for a stream that does not come to an end"
        while self.queue:
            self.step()

    def wait_stream(self, other: Stream) -> None:
        self.ask(other.synchronize)

    def wait_event(self, event: Any) -> None:
        self.ask(event.stream.synchronize)

    def record_event(self) -> Any:
        number = self._asked

        def query() -> bool:
            if self not in self._gpu.stuck:
                self.synchronize()
            return self._asked - len(self.queue) >= number

        return SimpleNamespace(query=query, stream=self)


class Tensor:
    """gpu: whose memory it is in; it notes when nobody holds it any more."""

    def __init__(self, array: np.ndarray[Any, Any], gpu: Gpu) -> None:
        self.array = array
        gpu.memory[self.data_ptr()] = array  # kept, so that no address comes twice
        weakref.finalize(self, gpu.freed.add, self.data_ptr())

    def data_ptr(self) -> int:
        return int(self.array.ctypes.data)

    def to(self, device: Any) -> Tensor:
        return self

    def numpy(self) -> np.ndarray[Any, Any]:
        return self.array

    def item(self) -> int:
        return int(self.array[0])

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, at: int) -> int:
        return int(self.array[at])

    def __setitem__(self, at: int, value: int) -> None:
        self.array[at] = value


class Gpu:
    """freed: memory that was given back. strayed: what was read or written there. stuck: streams on which nothing goes on."""

    def __init__(self) -> None:
        self.memory: dict[int, np.ndarray[Any, Any]] = {}
        self.freed: set[int] = set()
        self.strayed: list[int] = []
        self.stuck: set[Stream] = set()
        self.device = 0
        self.opened: list[int] = []
        self.capability = 9, 0
        self.batch: Callable[[], None] = lambda: None
        """Called before a copy of a batch is queued; may raise."""
        self._default = Stream(self, 0)
        self._current = [self._default]
        self.cuda = SimpleNamespace(
            is_available=lambda: True,
            current_device=lambda: self.device,
            get_device_capability=lambda device: self.capability,
            synchronize=lambda device: None,
            device=self._on_device,
            Stream=lambda device, priority=0: Stream(self, device.index),
            stream=self._on_stream,
            current_stream=lambda device=None: self._current[-1],
            default_stream=lambda device: self._default,
        )

    @contextmanager
    def _on_device(self, device: Any) -> Iterator[None]:
        before, self.device = self.device, device.index
        yield
        self.device = before

    @contextmanager
    def _on_stream(self, stream: Stream) -> Iterator[None]:
        before, self.device = self.device, stream.device
        self._current.append(stream)
        yield
        self._current.pop()
        self.device = before

    def move(self, to: int, from_: int, nbytes: int) -> None:
        self.touch(to)
        self.touch(from_)
        ctypes.memmove(to, from_, nbytes)

    def touch(self, address: int) -> None:
        if (at := self.base(address)) in self.freed:
            self.strayed.append(at)

    def base(self, address: int) -> int:
        return next(at for at, array in self.memory.items() if at <= address < at + max(1, array.nbytes))

    def later(self, to: int, from_: int, nbytes: int, stream: Stream) -> None:
        assert self.device == stream.device, "the driver's calls need the context of the stream's device"
        stream.ask(lambda: self.move(to, from_, nbytes))

    def launch_copy(self, source: Tensor, target: Tensor, blocks: Any, word: int, fence: tuple[int, int, Tensor]) -> None:
        at, epoch, missed = fence

        def run() -> None:
            self.touch(at)
            if ctypes.c_int64.from_address(at).value != epoch:
                missed[0] = missed[0] + 1
                return
            for from_, to in zip(source.array, target.array, strict=True):
                self.move(int(to[0]), int(from_[0]), int(from_[5]) * word)

        self._current[-1].ask(run)

    def open_handle(self, handle: str) -> int:
        self.opened.append(int(handle, 16))
        return self.opened[-1]

    def torch(self) -> Any:
        def zeros(n: int, dtype: Any, **named: Any) -> Tensor:
            return Tensor(np.zeros(n, dtype), self)

        return SimpleNamespace(
            cuda=self.cuda, uint8=np.uint8, int64=np.int64, zeros=zeros, empty=zeros,
            device=lambda kind, index: SimpleNamespace(type=kind, index=index),
            arange=lambda n, dtype, device: Tensor(np.arange(n, dtype=dtype), self),
            from_numpy=lambda array: Tensor(array, self),
            frombuffer=lambda data, dtype: Tensor(np.frombuffer(data, dtype), self),
        )  # fmt: skip


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    made = Gpu()

    class CopyBatches:
        def __init__(self, to: list[int], from_: list[int], nbytes: list[int], most: int, count: int) -> None:
            self.copies = list(zip(to, from_, nbytes, strict=True))

        def queue(self, stream: Stream) -> None:
            for copy in self.copies:
                made.batch()
                made.later(*copy, stream)

    kernels = SimpleNamespace(PER_PROGRAM=8192, launch_copy=made.launch_copy)
    monkeypatch.setitem(sys.modules, "torch", made.torch())
    monkeypatch.setitem(sys.modules, "weight_sync.device.kernels", kernels)
    monkeypatch.setattr(weight_sync.device, "kernels", kernels, raising=False)
    monkeypatch.setattr(ipc, "export", lambda at: (made.base(at), made.memory[made.base(at)].nbytes, f"{made.base(at):x}"))
    monkeypatch.setattr(ipc, "open_handle", made.open_handle)
    monkeypatch.setattr(ipc, "close_handle", lambda address: made.opened.remove(address))
    monkeypatch.setattr(ipc, "copy", lambda to, from_, nbytes, device: made.move(to, from_, nbytes))
    monkeypatch.setattr(ipc, "copy_later", made.later)
    monkeypatch.setattr(ipc, "CopyBatches", CopyBatches)
    return made
