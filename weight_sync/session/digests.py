"""Digests of transfers, wherever their bytes are: in host memory as they pass through the cache, on a GPU by one launch.

Both sides of a plan use one kind of digest (`kind_for`): xxh3 where all memory is host memory, lanes where a GPU takes part.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from weight_sync.device.lanes import Lanes, finish
from weight_sync.device.tables import Box, Tables
from weight_sync.errors import VerifyError, listed
from weight_sync.session.arrays import to_host

XXH3 = "xxh3"
LANES = "lanes"
_CHUNK = 8 << 20
"""Bytes gathered at a time when a strided region of host memory is digested."""


def kind_for(devices: Iterable[str]) -> str:
    """The digest that all ranks of a plan use. devices: of every rank, "cpu" or "cuda"."""
    return XXH3 if set(devices) <= {"cpu"} else LANES


class Digests(Protocol):
    """Of some regions, by key (a plan row, a parameter's name). A region is digested as its bytes in row-major order."""

    def whole(self, group: object, keys: Sequence[Any], views: Callable[[], Sequence[Any]]) -> None:
        """Begin with regions that come in one view each. group: names the same keys and views when they come again."""
        ...

    def pieces(
        self, group: object, keys: Sequence[Any], first: Sequence[int], views: Sequence[Any], odd: Collection[Any] = ()
    ) -> None:
        """The next parts of regions that come in several views, in row-major order. first: bytes of the region before each.

        group: as for whole(). odd: keys of regions of which some part is not made of whole 8-byte words.
        """
        ...

    def hex(self, keys: Sequence[Any]) -> list[str]:
        """The digests, 16 hex digits each; waits for what was begun. VerifyError for a region of which nothing was digested."""
        ...


class HostDigests:
    """In host memory, on the calling thread. kind: XXH3, or LANES where the other side is a GPU."""

    def __init__(self, kind: str) -> None:
        self._new: Any = xxhash.xxh3_64 if kind == XXH3 else Lanes
        self._hashers: dict[Any, Any] = {}

    def whole(self, group: object, keys: Sequence[Any], views: Callable[[], Sequence[Any]]) -> None:
        for key, view in zip(keys, views(), strict=True):
            self.add(key, view)

    def pieces(
        self, group: object, keys: Sequence[Any], first: Sequence[int], views: Sequence[Any], odd: Collection[Any] = ()
    ) -> None:
        for key, view in zip(keys, views, strict=True):
            self.add(key, view)

    def add(self, key: Any, view: Any) -> None:
        hasher = self._hashers.get(key)
        if hasher is None:
            hasher = self._hashers[key] = self._new()
        feed(hasher, view)

    def hex(self, keys: Sequence[Any]) -> list[str]:
        # Two regions that nobody looked at would otherwise have equal digests.
        if missing := [key for key in keys if key not in self._hashers]:
            raise VerifyError(f"no byte was digested of {len(missing)} of {len(keys)} regions: {listed(map(str, missing))}")
        return [self._hashers[key].hexdigest() for key in keys]


class DeviceDigests:
    """On a GPU, kind LANES: whole() launches and returns.

    kept: where the tables of a group stay for the next time. They hold addresses, so it belongs to one binding of one memory
    (DeviceMemory has it): who finds that memory moved makes a new one.
    """

    def __init__(self, device: Any, kept: dict[object, Any]) -> None:
        self._device, self._kept = device, kept
        self._begun: list[tuple[list[Any], NDArray[np.int64], NDArray[np.uint64], Any]] = []
        self._host = HostDigests(LANES)

    def whole(self, group: object, keys: Sequence[Any], views: Callable[[], Sequence[Any]]) -> None:
        import torch  # pyright: ignore[reportMissingImports] - what is on a GPU is a torch tensor

        from weight_sync.device import kernels

        if group not in self._kept:
            all_views = views()
            boxes = [box_of(view) for view in all_views]
            odd = [i for i, box in enumerate(boxes) if Tables([box]).word != 8]
            even = sorted(set(range(len(boxes))) - set(odd))
            tables = Tables([boxes[i] for i in even], 8)
            nbytes = np.asarray([all_views[i].numel() * all_views[i].element_size() for i in even], np.uint64)
            strange = [(i, all_views[i]) for i in odd]  # not made of whole aligned words: in practice a few bytes
            self._kept[group] = strange, even, tables.owner, nbytes, tables.on(self._device, kernels.PER_PROGRAM)
        strange, even, owner, nbytes, launch = self._kept[group]
        for i, view in strange:
            self._host.add(keys[i], to_host(view))
        with torch.cuda.device(self._device):  # hex() waits for this device's stream, whichever the thread's current device is
            sums = kernels.launch_digest(*launch)
        self._begun.append(([keys[i] for i in even], owner, nbytes, sums))

    def pieces(
        self, group: object, keys: Sequence[Any], first: Sequence[int], views: Sequence[Any], odd: Collection[Any] = ()
    ) -> None:
        import torch  # pyright: ignore[reportMissingImports]

        from weight_sync.device import kernels

        if not keys:
            return
        if group not in self._kept:
            strange = [i for i, key in enumerate(keys) if key in odd]  # in practice a few bytes
            even = [i for i, key in enumerate(keys) if key not in odd]
            sizes = np.asarray([views[i].numel() * views[i].element_size() for i in even], np.int64)
            tables = Tables.of_ranges(np.asarray([views[i].data_ptr() for i in even], np.int64), sizes, 8)
            tables.table[:, 6] = np.asarray([first[i] // 8 for i in even], np.int64)
            launch = tables.on(self._device, kernels.PER_PROGRAM)
            self._kept[group] = strange, even, tables.owner, sizes.astype(np.uint64), launch
        strange, even, owner, nbytes, launch = self._kept[group]
        for i in strange:
            self._host.add(keys[i], to_host(views[i]))
        with torch.cuda.device(self._device):
            sums = kernels.launch_digest(*launch)
        self._begun.append(([keys[i] for i in even], owner, nbytes, sums))

    def hex(self, keys: Sequence[Any]) -> list[str]:
        place: dict[Any, int] = {}
        for begun, _, _, _ in self._begun:
            for key in begun:
                place.setdefault(key, len(place))
        totals, sizes = np.zeros(len(place), np.uint64), np.zeros(len(place), np.uint64)
        for begun, owner, nbytes, sums in self._begun:
            at = np.fromiter((place[key] for key in begun), np.int64, len(begun))
            np.add.at(totals, at[owner], sums.cpu().numpy().view(np.uint64))
            np.add.at(sizes, at, nbytes)
        text = finish(totals, sizes).astype(">u8").tobytes().hex()
        found = [place.get(key) for key in keys]
        return [
            self._host.hex([key])[0] if i is None else text[16 * i : 16 * i + 16] for key, i in zip(keys, found, strict=True)
        ]


def box_of(view: Any) -> Box:
    """A torch view as the tables take it."""
    return view.data_ptr(), view.element_size(), view.stride(), tuple(view.shape)


def feed(hasher: Any, view: NDArray[Any]) -> None:
    """Update a hasher with a region's bytes in row-major order. Regions fed one after another count as one."""
    for part in (view,) if view.flags.c_contiguous else chunks(view, _CHUNK):
        hasher.update(np.ascontiguousarray(part).reshape(-1).view(np.uint8).data)


def chunks(view: NDArray[Any], limit: int) -> Iterator[NDArray[Any]]:
    """A strided view as views of at most about `limit` bytes, in row-major order."""
    if view.nbytes <= limit or view.ndim == 0:
        yield view
        return
    if view.shape[0] == 1:
        yield from chunks(view[0], limit)
        return
    each = max(1, limit // max(1, view.nbytes // view.shape[0]))
    for low in range(0, view.shape[0], each):
        yield from chunks(view[low : low + each], limit)
