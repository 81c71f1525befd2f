"""Digests of transfers, wherever their bytes are: in host memory as they pass through the cache, on a GPU many by one launch.

Both sides of a plan use one kind of digest (`kind_for`): xxh3 where all memory is host memory, lanes where a GPU takes part.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from weight_sync.delta.message import LANES, XXH3, body_digest, lanes_digest
from weight_sync.device.lanes import Lanes, finish
from weight_sync.device.tables import Box, Tables
from weight_sync.errors import VerifyError, listed
from weight_sync.session.arrays import current, on_host, to_host

DIGITS = 16
"""Hex digits of a digest."""
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

    def text(self, keys: Sequence[Any]) -> str:
        """The digests, 16 hex digits each, one after another; waits for what was begun.

        VerifyError for a region of which nothing was digested.
        """
        ...

    def hex(self, keys: Sequence[Any]) -> list[str]:
        """The same, one string for each."""
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

    def text(self, keys: Sequence[Any]) -> str:
        return "".join(self.hex(keys))

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
        self._begun: list[tuple[object, list[Any], NDArray[np.int64], NDArray[np.uint64], Any]] = []
        self._host = HostDigests(LANES)

    def whole(self, group: object, keys: Sequence[Any], views: Callable[[], Sequence[Any]]) -> None:

        from weight_sync.device import kernels

        if group not in self._kept:
            all_views = views()
            boxes = [box_of(view) for view in all_views]
            odd = [i for i, box in enumerate(boxes) if Tables([box]).word != 8]
            even = sorted(set(range(len(boxes))) - set(odd))
            tables = Tables([boxes[i] for i in even], 8)
            nbytes = np.asarray([all_views[i].numel() * all_views[i].element_size() for i in even], np.uint64)
            strange = [(i, all_views[i]) for i in odd]  # not made of whole aligned words: in practice a few bytes
            launch = tables.in_two(self._device, kernels.PER_PROGRAM)
            self._kept[group] = strange, even, (list(keys), [keys[i] for i in even]), tables.owner, nbytes, launch
        strange, even, known, owner, nbytes, launch = self._kept[group]
        with current(self._device):  # hex() waits for this device's stream, whichever the thread's current device is
            sums = kernels.launch_digest(*launch)
        for i, view in strange:
            self._host.add(keys[i], to_host(view))
        self._begun.append((group, _members(keys, known, even), owner, nbytes, sums))

    def pieces(
        self, group: object, keys: Sequence[Any], first: Sequence[int], views: Sequence[Any], odd: Collection[Any] = ()
    ) -> None:

        from weight_sync.device import kernels

        if not keys:
            return
        if group not in self._kept:
            strange = [i for i, key in enumerate(keys) if key in odd]  # in practice a few bytes
            even = [i for i, key in enumerate(keys) if key not in odd]
            sizes = np.asarray([views[i].numel() * views[i].element_size() for i in even], np.int64)
            tables = Tables.of_ranges(np.asarray([views[i].data_ptr() for i in even], np.int64), sizes, 8)
            tables.table[:, 6] = np.asarray([first[i] // 8 for i in even], np.int64)
            launch = tables.in_two(self._device, kernels.PER_PROGRAM)
            self._kept[group] = (
                strange,
                even,
                (list(keys), [keys[i] for i in even]),
                tables.owner,
                sizes.astype(np.uint64),
                launch,
            )
        strange, even, known, owner, nbytes, launch = self._kept[group]
        with current(self._device):
            sums = kernels.launch_digest(*launch)
        for i in strange:
            self._host.add(keys[i], to_host(views[i]))
        self._begun.append((group, _members(keys, known, even), owner, nbytes, sums))

    def text(self, keys: Sequence[Any]) -> str:
        import torch  # pyright: ignore[reportMissingImports]

        order = self._order(keys)
        totals = np.zeros(len(order.sizes), np.uint64)
        if len(order.sums):
            sums = torch.cat([begun[-1] for begun in self._begun]).cpu().numpy().view(np.uint64)
            totals[order.some] = np.add.reduceat(sums[order.sums], order.first)
        found = finish(totals, order.sizes)
        found = (found[order.place] if len(found) else np.zeros(len(keys), np.uint64)).astype(">u8").tobytes().hex()
        if not order.odd:
            return found
        parts = split_digests(found)
        for i in order.odd:
            parts[i] = self._host.text([keys[i]])
        return "".join(parts)

    def hex(self, keys: Sequence[Any]) -> list[str]:
        return split_digests(self.text(keys))

    def _order(self, keys: Sequence[Any]) -> _Order:
        """Where the sums of each key's region are. Worked out once for groups that come again with the same keys."""
        begun = [(group, members) for group, members, *_ in self._begun]
        groups = _Order, *(group for group, _ in begun)
        kept = self._kept.get(groups)
        if kept is None or kept.keys != list(keys) or kept.begun != begun:
            kept = self._kept[groups] = _Order.of(keys, begun, [(owner, nbytes) for *_, owner, nbytes, _ in self._begun])
        return kept


@dataclass(frozen=True, slots=True, eq=False)
class _Order:
    """How sums that kernels return, in the order they were asked for, become digests of keys.

    sums: numbers of the sums, those of one region behind each other; first: where each region's begin; some: which regions have
    any (all but empty ones); sizes: bytes of each region. place: the region of each key. odd: keys whose digest was made on the
    host (their place means nothing).
    """

    keys: list[Any]
    begun: list[tuple[object, list[Any]]]
    sums: NDArray[np.int64]
    first: NDArray[np.int64]
    some: NDArray[np.int64]
    sizes: NDArray[np.uint64]
    place: NDArray[np.int64]
    odd: list[int]

    @classmethod
    def of(cls, keys: Sequence[Any], begun: list[tuple[object, list[Any]]], parts: Sequence[tuple[Any, Any]]) -> _Order:
        regions: dict[Any, int] = {}
        for _, members in begun:
            for key in members:
                regions.setdefault(key, len(regions))
        sizes = np.zeros(len(regions), np.uint64)
        of_sum: list[NDArray[np.int64]] = [np.empty(0, np.int64)]
        for (_, members), (owner, nbytes) in zip(begun, parts, strict=True):
            at = np.fromiter((regions[key] for key in members), np.int64, len(members))
            np.add.at(sizes, at, nbytes)
            of_sum.append(at[owner])
        region = np.concatenate(of_sum)
        order = np.argsort(region, kind="stable")
        some, first = np.unique(region[order], return_index=True)
        if nothing := np.setdiff1d(np.flatnonzero(sizes), some).tolist():
            names = list(regions)
            raise VerifyError(f"no byte was digested of {len(nothing)} regions: {listed(str(names[i]) for i in nothing)}")
        place = np.asarray([regions.get(key, 0) for key in keys], np.int64)
        return cls(list(keys), begun, order, first, some, sizes, place, [i for i, key in enumerate(keys) if key not in regions])


def _members(keys: Sequence[Any], known: tuple[list[Any], list[Any]], even: list[int]) -> list[Any]:
    """The keys at `even`, in practice those of the last time: `known` has all of them then, and these."""
    return known[1] if list(keys) == known[0] else [keys[i] for i in even]


def digest_of_bytes(kind: str, view: Any) -> bytes:
    """Of contiguous bytes, whole 8-byte words on a GPU: as messages of deltas carry it (weight_sync.delta.message)."""
    if on_host(view):
        return body_digest(kind, view)
    from weight_sync.device import kernels

    tables = Tables.of_ranges(np.asarray([view.data_ptr()], np.int64), np.asarray([view.nbytes], np.int64), 8)
    with current(view.device):
        total = kernels.launch_digest(*tables.in_two(view.device, kernels.PER_PROGRAM)).cpu().numpy().view(np.uint64)
    return lanes_digest(int(finish(total, np.asarray([view.nbytes], np.uint64))[0]))


def split_digests(text: str) -> list[str]:
    """The single digests of a text of many."""
    return [text[i : i + DIGITS] for i in range(0, len(text), DIGITS)]


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
