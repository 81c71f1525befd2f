"""The bytes that a trainer rank last sent, and comparing with them what it would send now, region by region.

What a GPU compares in thousands of regions at once is in weight_sync.session.delta_device. Here is host memory, and what is
left of a GPU: regions that are not made of whole 8-byte words; with the snapshot on the host, weights that are computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from weight_sync.delta.codec import WORDS
from weight_sync.delta.regions import Regions
from weight_sync.layout.table import Ints
from weight_sync.plan.pieces import split
from weight_sync.session.arrays import on_host, to_host
from weight_sync.session.bound import Bound

_SMALL = 1024
"""Elements of a span that is brought from a GPU whole: its encoding may be that of all elements."""
_FEW = 16
"""With one of so many 8-byte words different or fewer, looking at these alone is faster."""
_PART = {"cpu": 4 << 20, "cuda": 256 << 20}
"""Bytes looked at together."""


class Parts:
    """How each region is looked at: part by part, in row-major order, as flat words as they are sent."""

    def __init__(self, bound: Bound, regions: Regions) -> None:
        plan = bound.schedule.plan
        self._bound = bound
        self._boxes: dict[int, list[tuple[tuple[int, ...], tuple[int, ...]]]] = {}
        # What is computed is cut as it is for staging: where it may be cut is known to the schedule alone.
        for piece in bound.schedule.pieces.of(regions.first[plan.computed[regions.first]]):
            self._boxes.setdefault(piece.row, []).append((piece.at, piece.shape))

    def of(self, row: int) -> Iterator[Any]:
        bound, plan = self._bound, self._bound.schedule.plan
        limit = max(1, _PART[bound.memory.device] // int(plan.itemsize[row]))
        for at, shape in self._boxes.get(row) or split(tuple(plan.shape[row].tolist()), limit):
            yield _flat(bound.sent(row, at, shape))


def _flat(view: Any) -> Any:
    return np.ascontiguousarray(view).reshape(-1) if on_host(view) else view.reshape(-1)


class Snapshot:
    """The bytes that were last sent, in one buffer in host memory, or on the device of the parameters."""

    def __init__(self, bound: Bound, nbytes: int, on_device: bool) -> None:
        self._there = on_device and bound.memory.device != "cpu"
        self._bytes: Any = bound.memory.staging(nbytes).bytes(0, nbytes) if self._there else np.zeros(nbytes, np.uint8)

    @property
    def whole(self) -> Any:
        """All of it: an array, or on the device a tensor."""
        return self._bytes

    def store(self, at: int, words: Any) -> int:
        """Copy words to byte `at`; returns their bytes."""
        raw = words.view(np.uint8) if on_host(words) else _torch_bytes(words)
        if self._there:
            self._bytes[at : at + len(raw)].copy_(raw)
        else:
            self._bytes[at : at + len(raw)] = to_host(raw)
        return len(raw)

    def renew(self, at: int, words: Any, size: int, span: int) -> Iterator[tuple[int, Any, Ints]]:
        """Bring the snapshot from byte `at` to `words`. Yields what changed, by spans: (first, the span's words, positions)."""
        if not on_host(words):
            yield from self._renew_device(at, words, size, span)
            return
        old = self._bytes[at : at + words.nbytes].view(words.dtype)
        for low in range(0, len(words), span):
            new, known = words[low : low + span], old[low : low + span]
            positions = different(known, new)
            if len(positions):
                yield low, new, positions
                known[positions] = new[positions]

    def _renew_device(self, at: int, words: Any, size: int, span: int) -> Iterator[tuple[int, Any, Ints]]:
        import torch  # pyright: ignore[reportMissingImports]

        nbytes = len(words) * size
        old = self._bytes[at : at + nbytes]
        there = old if self._there else torch.from_numpy(old).to(words.device)
        found = (there.view(words.dtype) != words).nonzero().reshape(-1)
        if not len(found):
            return
        values, positions = words[found].cpu().numpy().view(WORDS[size]), found.cpu().numpy()
        if self._there:
            there.view(words.dtype)[found] = words[found]
            known = None
        else:
            known = old.view(WORDS[size])
            known[positions] = values
        cuts = np.searchsorted(positions, np.arange(0, len(words) + span, span))
        for i in range(len(cuts) - 1):
            mine = positions[cuts[i] : cuts[i + 1]] - i * span
            if len(mine):
                low, high = i * span, min((i + 1) * span, len(words))
                # Only what is sent is brought here: all of a span where the positions would take more.
                yield low, _sparse(words, low, high, mine, values[cuts[i] : cuts[i + 1]], size), mine


def _sparse(words: Any, low: int, high: int, positions: Ints, values: Any, size: int) -> Any:
    """The words of a span on a GPU as encode() takes them: all of them where many changed, else zeros where none did."""
    if len(positions) * 4 > high - low or high - low < _SMALL:
        return words[low:high].cpu().numpy().view(WORDS[size])
    new = np.zeros(high - low, WORDS[size])
    new[positions] = values
    return new


def _torch_bytes(words: Any) -> Any:
    import torch  # pyright: ignore[reportMissingImports]

    return words.view(torch.uint8)


def different(old: Any, new: Any) -> Ints:
    """Indices at which two flat arrays of words differ; where they are few, found eight bytes at a time."""
    each = 8 // new.itemsize
    if each > 1 and len(new) % each == 0 and old.ctypes.data % 8 == 0 and new.ctypes.data % 8 == 0:
        a, b = old.view(np.uint64), new.view(np.uint64)
        groups = np.flatnonzero(a != b)
        if len(groups) * _FEW < len(a):
            found = np.flatnonzero((a.take(groups) ^ b.take(groups)).view(new.dtype))
            return groups.take(found // each) * each + found % each
    return np.flatnonzero(old != new)
