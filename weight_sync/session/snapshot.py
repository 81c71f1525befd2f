"""A worker's own proof that a sync writes what it should and nothing else: snapshot, scramble, compare; and untouched bytes.

Works on the parameters' raw bytes, so it knows no dtype and no layout but the regions of the plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from math import prod
from typing import Any

import numpy as np
import xxhash

from weight_sync.errors import BindError, SessionError, VerifyError, listed
from weight_sync.ids import ITEMSIZE
from weight_sync.layout.table import Ints
from weight_sync.plan.runs import expand_runs
from weight_sync.session.arrays import invert, to_host
from weight_sync.session.copies import THREADS, Bytes, Differing, differing, duplicates
from weight_sync.session.digests import kind_for
from weight_sync.session.memory import Memory

_SHOWN = 4


class Snapshot:
    """All live parameters of a worker, copied. Costs as much host memory as the worker's weights until it is dropped."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        names = [p.name for p in memory.params]
        self._copies = dict(zip(names, duplicates(map(memory.raw, names)), strict=True))
        self._not_aliased()
        # Of the copies, not of the live bytes: it says later whether somebody wrote into the snapshot.
        self._digests = _digests(self._copies)
        for name, found in self.differing().items():
            if found.count:
                raise VerifyError(f"{memory.where}: {name} changed while it was copied: the engine is not quiet")

    @property
    def nbytes(self) -> int:
        return sum(copy.nbytes for copy in self._copies.values())

    def _not_aliased(self) -> None:
        """A copy that shares memory with what it is compared with would make every comparison pass."""
        for name, copy in self._copies.items():
            low = int(copy.ctypes.data)
            for storage in self._memory.storages:
                if low < storage.address + storage.nbytes and storage.address < low + copy.nbytes:
                    raise VerifyError(f"{self._memory.where}: the snapshot of {name} shares memory with live weights")

    def differing(self) -> dict[str, Differing]:
        """In what each live parameter differs from its copy now."""
        live = map(self._memory.raw, self._copies)
        return dict(zip(self._copies, differing(list(self._copies.values()), live), strict=True))

    def compare(self, table: Mapping[str, Any]) -> int:
        """Compare every live byte, covered by the plan or not. Returns the bytes compared.

        Raises VerifyError naming parameter, HF tensor and the first byte that differs.
        """
        where = self._memory.where
        digests = _digests(self._copies)
        for name in self._copies:
            if digests[name] != self._digests[name]:
                raise VerifyError(f"{where}: the snapshot of {name} was written to: nothing can be compared with it")
        wrong: list[str] = []
        for name, found in self.differing().items():
            if (at := found.first) is not None:
                copy, live = self._copies[name], self._memory.raw(name)
                size = ITEMSIZE[self._memory.param(name).dtype]
                wrong.append(
                    f"{name} ({_hf_tensor(table, name, at // size)}): {found.count} of {copy.nbytes} bytes differ, "
                    f"first byte {at}: was {int(copy[at]):#04x}, is {int(to_host(live[at : at + 1])[0]):#04x}"
                )
        if wrong:
            raise VerifyError(f"{where}: {len(wrong)} of {len(self._copies)} parameters are not as they were: "
                              + listed(wrong, _SHOWN))  # fmt: skip
        return self.nbytes


def scramble(memory: Memory, table: Mapping[str, Any], snapshot: Snapshot | None) -> int:
    """Invert every byte that the plan covers, in place, and prove that all have changed. Returns how many."""
    if snapshot is None:
        raise SessionError(f"{memory.where}: scramble without a snapshot: the weights would be lost")
    nbytes = 0
    for name, start, strides, shape in _regions(table):
        view = memory.view(name, start, strides, shape)
        invert(view)
        nbytes += view.nbytes
    changed = sum(found.count for found in snapshot.differing().values())
    if changed != nbytes:
        raise VerifyError(
            f"{memory.where}: the plan covers {nbytes} bytes, {changed} differ after they were all inverted: "
            "regions overlap, or something else writes to the weights"
        )
    return nbytes


class Untouched:
    """The bytes of live parameters that the plan does not write: padding, and parameters without any transfer.

    Nothing may change them during a session. Made once for each binding; `digest` is compared at begin and at verify.
    """

    def __init__(self, memory: Memory, table: Mapping[str, Any]) -> None:
        regions: dict[str, list[int]] = {}
        covered: dict[str, int] = {}
        for i, (name, _, _, shape) in enumerate(_regions(table)):
            regions.setdefault(name, []).append(i)
            covered[name] = covered.get(name, 0) + prod(shape)
        self._memory = memory
        self._gaps: list[tuple[str, Ints]] = []
        for p in memory.params:
            if (rest := prod(p.shape) - covered.get(p.name, 0)) < 0:
                raise BindError(f"{memory.where}: the plan writes {-rest} elements of {p.name} twice")
            if rest and p.name not in covered and not _contiguous(memory, p.name):
                raise BindError(
                    f"{memory.where}: {p.name} is written by no transfer and is not row-major contiguous: it cannot be watched"
                )
            if rest:
                self._gaps.append((p.name, _gaps(prod(p.shape), table, regions.get(p.name, []))))

    def written(self, name: str) -> Ints:
        """[ranges, 2]: first and one past last element of what the plan does write of a parameter, in order."""
        numel = prod(self._memory.param(name).shape)
        gaps = next((g for n, g in self._gaps if n == name), np.empty((0, 2), np.int64))
        ranges = np.stack([np.append(0, gaps[:, 1]), np.append(gaps[:, 0], numel)], axis=1)
        return ranges[ranges[:, 1] > ranges[:, 0]]

    @property
    def nbytes(self) -> int:
        return sum(int((g[:, 1] - g[:, 0]).sum()) * ITEMSIZE[self._memory.param(n).dtype] for n, g in self._gaps)

    def digests(self) -> dict[str, str]:
        """By parameter and, where it has several gaps, by gap."""
        names, views = list[str](), list[Any]()
        for name, gaps in self._gaps:
            live = self._memory.raw(name)
            size = ITEMSIZE[self._memory.param(name).dtype]
            names += [f"{name} elements [{low}, {high})" for low, high in gaps.tolist()]
            views += [live[low:high] for low, high in (gaps * size).tolist()]
        # Compared only with itself, so each kind of memory uses what suits it.
        digests = self._memory.digests(kind_for([self._memory.device]))
        digests.whole("untouched", names, lambda: views)
        return dict(zip(names, digests.hex(names), strict=True))


def _digests(copies: Mapping[str, Bytes]) -> dict[str, int]:
    shares = [list(copies)[i::THREADS] for i in range(THREADS)]
    with ThreadPoolExecutor(THREADS) as pool:
        done = pool.map(lambda names: [(name, xxhash.xxh3_64_intdigest(copies[name].data)) for name in names], shares)
        return dict(pair for pairs in done for pair in pairs)


def _regions(table: Mapping[str, Any]) -> Any:
    return zip(table["params"], table["start"], table["strides"], table["shape"], strict=True)


def _gaps(numel: int, table: Mapping[str, Any], rows: list[int]) -> Ints:
    """[gaps, 2]: first and one past last element of what the given transfers leave out of a parameter."""
    if not rows:
        return np.asarray([[0, numel]], np.int64)
    start, strides, shape = (np.asarray([table[key][i] for i in rows], np.int64) for key in ("start", "strides", "shape"))
    _, first, _, count = expand_runs(shape, start, strides, start, strides)
    order = np.argsort(first)
    low = np.append(0, (first + count)[order])
    high = np.append(first[order], numel)
    gaps = np.stack([low, high], axis=1)
    return gaps[gaps[:, 1] > gaps[:, 0]]


def _contiguous(memory: Memory, name: str) -> bool:
    try:
        memory.address(name)
    except BindError:
        return False
    return True


def _hf_tensor(table: Mapping[str, Any], name: str, element: int) -> str:
    """The HF tensor whose transfer writes an element of a parameter."""
    for i, (param, start, strides, shape) in enumerate(_regions(table)):
        if param != name:
            continue
        rest, inside = element - start, True
        for step, size in sorted(zip(strides, shape, strict=True), reverse=True):
            if size > 1:
                index = min(rest // step, size - 1)
                inside &= index >= 0
                rest -= index * step
        if inside and rest == 0:
            return str(table["tensors"][i])
    return "no transfer writes there"
