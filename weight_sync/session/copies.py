"""Copies of live bytes in host memory, and in what the live bytes differ from them: what a session's snapshot is made of.

From a GPU to memory that is not pinned a copy runs at 1.5 GB/s on a machine where one to pinned memory runs at 52, and numpy
compares at 3. So bytes pass through two pinned pieces in turn, one being filled while the other is emptied, and are compared
and counted on the GPU, to which the copies are brought piece by piece. What is left is the host's own copying, which threads
share. What the GPU found is fetched once, at the end. Beside the weights that takes two pieces of pinned memory, one piece of
the GPU's and what counting in it needs, all dropped on return (torch's caches may keep them for whoever asks next). Where a
caller makes `live` as it goes (copies of tensors that are not dense), there is one at a time.

Live bytes are flat: numpy arrays of uint8, or torch tensors.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weight_sync.session.arrays import on_host

Bytes = NDArray[np.uint8]

PIECE = 32 << 20
"""Bytes that pass through pinned memory at a time; a multiple of _ROW."""
THREADS = min(4, os.cpu_count() or 1)
"""That copy in host memory, or digest it: one alone reaches a fraction of what the memory can do."""
_SHARE = 1 << 20
"""Bytes for which another thread is worth waking; also what numpy compares at a time, so that it stays in a core's cache."""
_ROW = 128
"""Ones that are added up in a byte, before rows are added in wider words: torch would first make 8 bytes of each."""


@dataclass(frozen=True, slots=True)
class Differing:
    """How many bytes differ, and the index of the first one."""

    count: int = 0
    first: int | None = None

    def plus(self, count: int, first: int) -> Differing:
        """With those of a later piece."""
        return Differing(self.count + count, first if self.first is None else self.first)


def duplicates(live: Iterable[Any]) -> list[Bytes]:
    """Independent copies of raw bytes in host memory, wherever they are: a GPU has no room for a second set of weights."""
    copies: list[Bytes] = []
    coming: dict[Any, _Down] = {}
    with ThreadPoolExecutor(THREADS) as pool:
        for raw in live:
            copies.append(np.empty(len(raw), np.uint8))
            if on_host(raw):
                _copy(copies[-1], raw, pool)
            else:
                if raw.device not in coming:
                    coming[raw.device] = _Down(raw.device, pool)
                coming[raw.device].copy(raw, copies[-1])
            del raw  # may itself be a copy, of a tensor that is not dense; before the next one is made
        for down in coming.values():
            down.finish()
    return copies


def differing(copies: Sequence[Bytes], live: Iterable[Any]) -> list[Differing]:
    """In what each of `live` differs from its copy, byte by byte. `live` is iterated once and none of it is kept."""
    found = [Differing()] * len(copies)
    looking: dict[Any, _Up] = {}
    pieces = sum(len(_cuts(copy)) for copy in copies)
    with ThreadPoolExecutor(THREADS) as pool:
        i = 0
        for raw in live:  # neither zipped nor enumerated, which hold on to one until the next one is there
            copy = copies[i]
            if len(copy) != len(raw):
                raise ValueError(f"{len(raw)} bytes to be compared with a copy of {len(copy)}")
            if on_host(raw):
                found[i] = _differing_here(copy, raw)
            else:
                if raw.device not in looking:
                    looking[raw.device] = _Up(raw.device, pool, pieces)
                looking[raw.device].compare(i, copy, raw)
            del raw
            i += 1
        if i != len(copies):
            raise ValueError(f"{i} of {len(copies)} copies have something to be compared with")
        for up in looking.values():
            for i, count, first in up.found():
                found[i] = found[i].plus(count, first)
    return found


def _differing_here(copy: Bytes, live: Bytes) -> Differing:
    found = Differing()
    for low in range(0, len(copy), _SHARE):
        flags = copy[low : low + _SHARE] != live[low : low + _SHARE]
        if count := int(np.count_nonzero(flags)):
            found = found.plus(count, low + int(flags.argmax()))
    return found


class _Down:
    """From a GPU to host memory. A pinned piece is emptied when it is needed again, while the other one is being filled."""

    def __init__(self, device: Any, pool: Executor) -> None:
        self._pool = pool
        self._empty = [_Pinned(device), _Pinned(device)]
        self._asked: deque[tuple[_Pinned, Bytes]] = deque()

    def copy(self, raw: Any, into: Bytes) -> None:
        """`into` has the bytes after finish()."""
        for cut in _cuts(into):
            if not self._empty:
                self._take()
            piece = self._empty.pop()
            room = into[cut]
            piece.tensor[: len(room)].copy_(raw[cut], non_blocking=True)
            piece.mark()
            self._asked.append((piece, room))

    def finish(self) -> None:
        while self._asked:
            self._take()

    def _take(self) -> None:
        piece, room = self._asked.popleft()
        piece.settle()
        _copy(room, piece.array[: len(room)], self._pool)
        self._empty.append(piece)


class _Up:
    """From host memory to a GPU, and compared there. pieces: at most so many in all."""

    def __init__(self, device: Any, pool: Executor, pieces: int) -> None:
        import torch  # pyright: ignore[reportMissingImports] - what is not on the host is a torch tensor

        self._torch, self._pool = torch, pool
        self._pinned = _Pinned(device), _Pinned(device)
        # One is enough: the device fills it again only after it has compared what was in it.
        self._there = torch.empty(PIECE, dtype=torch.uint8, device=device)
        self._found = torch.empty((pieces, 2), dtype=torch.int64, device=device)
        self._of: list[tuple[int, int]] = []

    def compare(self, i: int, copy: Bytes, raw: Any) -> None:
        for cut in _cuts(copy):
            here = copy[cut]
            n, at = len(here), len(self._of)
            pinned = self._pinned[at % 2]
            pinned.settle()
            _copy(pinned.array[:n], here, self._pool)
            there = self._there[:n]
            there.copy_(pinned.tensor[:n], non_blocking=True)
            pinned.mark()
            flags = there.ne_(raw[cut])
            self._found[at, 0] = self._ones(n)
            self._found[at, 1] = flags.argmax()  # the first of equal ones
            self._of.append((i, cut.start))

    def found(self) -> Iterator[tuple[int, int, int]]:
        """(i, count, index of the first byte) of each piece in which bytes differ, in the order in which they were compared."""
        found = self._found[: len(self._of)].cpu().numpy()
        for (i, low), (count, first) in zip(self._of, found.tolist(), strict=True):
            if count:
                yield i, count, low + first

    def _ones(self, n: int) -> Any:
        """The sum of the first n bytes, all 0 or 1."""
        whole = -(-n // _ROW) * _ROW
        self._there[n:whole].zero_()
        return self._there[:whole].view(-1, _ROW).sum(1, dtype=self._torch.uint8).sum(dtype=self._torch.int64)


class _Pinned:
    """A piece of host memory that a GPU reads and writes by itself, in the order of the current stream."""

    def __init__(self, device: Any) -> None:
        import torch  # pyright: ignore[reportMissingImports]

        self.tensor = torch.empty(PIECE, dtype=torch.uint8, device="cpu", pin_memory=device.type == "cuda")
        self.array: Bytes = self.tensor.numpy()
        self._device, self._event = device, _event(device)

    def mark(self) -> None:
        """All that uses it was asked for."""
        if self._event is not None:
            import torch  # pyright: ignore[reportMissingImports]

            self._event.record(torch.cuda.current_stream(self._device))

    def settle(self) -> None:
        """Return once all that was asked for before mark() is done."""
        if self._event is not None:
            self._event.synchronize()


def _event(device: Any) -> Any:
    """None where nothing is done later than it is asked for: torch tensors in host memory, in tests."""
    if device.type != "cuda":
        return None
    import torch  # pyright: ignore[reportMissingImports]

    return torch.cuda.Event()


def _cuts(raw: Bytes) -> list[slice]:
    return [slice(low, min(low + PIECE, len(raw))) for low in range(0, len(raw), PIECE)]


def _copy(into: Bytes, data: Bytes, pool: Executor) -> None:
    share = max(_SHARE, -(-len(into) // THREADS))
    if len(into) <= share:
        np.copyto(into, data)
        return
    cuts = [slice(low, low + share) for low in range(0, len(into), share)]
    list(pool.map(lambda cut: np.copyto(into[cut], data[cut]), cuts))
