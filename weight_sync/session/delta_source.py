"""Deltas in a trainer rank: the snapshot of what was last sent, finding and encoding what changed, writing it.

The snapshot is one buffer, as large as all distinct regions that this rank sends, as they are sent (cast, quantised). It says
which committed version it is of, or nothing: encode() brings it to the new bytes in place, and until keep() says that the
version was committed it is of no version. Whatever closes the transport or binds anew drops it.

SourceAgent calls this, on its thread and under its lock.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from weight_sync.delta.codec import (
    HEADER_BYTES,
    WORDS,
    Label,
    Record,
    encode,
    most_elements,
    write_message,
)
from weight_sync.delta.regions import Regions, regions_of
from weight_sync.delta.spec import Base, DeltaSpec
from weight_sync.errors import SessionError
from weight_sync.ids import Deadline
from weight_sync.layout.table import Ints
from weight_sync.plan.pieces import split
from weight_sync.session.arrays import on_host, to_host
from weight_sync.session.bound import Bound
from weight_sync.session.digests import HostDigests
from weight_sync.transport.base import Batch, DeviceOrdered, Endpoint, Region, Ticket, Transport

_SPAN = 1 << 20
"""Most elements of one record: positions inside it are found and encoded while the cache holds it."""
_SMALL = 1024
"""Elements of a span that is brought from a GPU whole: its encoding may be that of all elements."""
_FEW = 16
"""With one of so many 8-byte words different or fewer, looking at these alone is faster."""
_PART = {"cpu": 4 << 20, "cuda": 256 << 20}
"""Bytes looked at together."""


@dataclass(frozen=True, slots=True)
class _Message:
    """To one rollout rank: (transfer of its table, record), and the bytes of it all."""

    target: int
    records: Sequence[tuple[int, Record]]
    nbytes: int


class DeltaSource:
    """One for a SourceAgent. Nothing of it exists until bind() was called with a spec."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._spec: DeltaSpec | None = None
        self._bound: Bound | None = None
        self._regions: Regions | None = None
        self._parts: Any = None
        self._kind = ""
        self._snapshot: Any = None
        self._made_for: tuple[Any, ...] = ()
        self._held: tuple[Base, str] | None = None
        self._why = "no delta was asked for"
        self._session = ""
        self._messages: list[_Message] = []
        self._stages: list[Any] = []  # the last one is used; all are registered on the transport, so all stay until it closes
        self._staged_on: Transport | None = None

    @property
    def nbytes(self) -> int:
        """Of the snapshot."""
        return 0 if self._regions is None else self._regions.total

    def bind(self, bound: Bound, spec: DeltaSpec | None, digest: str) -> None:
        """A new binding: the snapshot is of no version. Its memory is taken now, before anything is paused.

        digest: the kind that both sides compute of every transfer.
        """
        self.drop("this rank was bound anew since")
        self._spec, self._bound, self._kind = spec, bound, digest
        if spec is None:
            self._regions = self._snapshot = None
            return
        regions = regions_of(bound.schedule.plan, bound.rows)
        made_for = regions.total, spec.snapshot, bound.memory.device
        if self._made_for != made_for or self._snapshot is None:
            self._snapshot = None
            self._snapshot = _Snapshot(bound, regions.total, spec.snapshot == "device")
        self._made_for = made_for
        self._regions, self._parts = regions, _Parts(bound, regions)

    def drop(self, why: str) -> None:
        self._held, self._why, self._session, self._messages = None, why, "", []

    def closed(self) -> None:
        """The transport is closed: nothing reads the staging buffer any more."""
        self._bound = self._parts = self._staged_on = None
        self._stages = []

    # -- what changed ----------------------------------------------------------------------------------------------

    def encode(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        """Compare all live bytes with the snapshot and encode what changed; see SourceAgent for payload and reply."""
        base, session = Base.from_json(payload["base"]), str(payload["session"])
        spec, bound, regions = self._ready()
        if self._held != (base, bound.schedule.digest):
            why = f"it holds {self._held[0].text()}" if self._held else self._why
            return {"missing": f"trainer rank {self.rank} has no snapshot of {base.text()}: {why}"}
        self.drop(f"what changed was encoded for session {session}, which was not committed")
        self._session = session
        plan = bound.schedule.plan
        if bound.quantiser is not None:
            bound.quantiser.settle(payload["magnitudes"])
        limit = int(spec.max_share * int(plan.nbytes[bound.rows].sum()))
        copies = np.bincount(regions.of, minlength=len(regions.first))
        records: list[list[Record]] = []
        digests = _Digests(bound, regions, self._kind)
        volume = (regions.nbytes // plan.itemsize[regions.first]).tolist()
        changed = encoded = elements = 0
        for number in range(len(regions.first)):
            found, count = self._compare(number, digests)
            elements += volume[number]
            records.append(found)
            changed += count
            encoded += sum(record.nbytes for record in found) * int(copies[number])
            if encoded > limit:
                break
        over = encoded > limit
        if bound.quantiser is not None and not over:
            bound.quantiser.unchanged()
        if not over:
            self._messages = list(self._packed(records))
        return {
            "missing": None,
            "over": over,
            "changed": changed,
            "elements": elements,
            "encoded": encoded,
            "bytes": int(plan.nbytes[bound.rows].sum()),
            "messages": [[message.target, message.nbytes] for message in self._messages],
            "digests": "" if over else digests.text(),
            "snapshot": self.nbytes,
        }

    def _ready(self) -> tuple[DeltaSpec, Bound, Regions]:
        if self._spec is None or self._bound is None or self._regions is None:
            raise SessionError(f"trainer rank {self.rank}: bound without deltas, or not at all")
        return self._spec, self._bound, self._regions

    def _compare(self, number: int, digests: _Digests) -> tuple[list[Record], int]:
        """The records of one region and how many of its elements changed. The snapshot has the new bytes afterwards."""
        spec, bound, regions = self._ready()
        row, size = int(regions.first[number]), int(bound.schedule.plan.itemsize[regions.first[number]])
        span = min(_SPAN, most_elements(spec.message, size))
        records: list[Record] = []
        at, changed = int(regions.start[number]), 0
        first = 0
        for words in self._parts.of(row):
            digests.add(number, words)
            for low, new, positions in self._snapshot.renew(at, words, size, span):
                changed += len(positions)
                records.append(encode(first + low, new, positions))
            first += len(words)
            at += len(words) * size
        return records, changed

    def _packed(self, records: Sequence[Sequence[Record]]) -> Iterator[_Message]:
        """Messages of at most spec.message bytes: for each destination the records of its transfers, in its table's order."""
        spec, bound, regions = self._ready()
        plan = bound.schedule.plan
        to = plan.target_rank[bound.rows]
        for target in np.unique(to).tolist():
            mine = np.flatnonzero(to == target)
            table = np.searchsorted(plan.rows_to(target), bound.rows[mine])
            group: list[tuple[int, Record]] = []
            used = HEADER_BYTES
            for transfer, region in sorted(zip(table.tolist(), regions.of[mine].tolist(), strict=True)):
                for record in records[region]:
                    if group and used + record.nbytes > spec.message:
                        yield _Message(target, group, used)
                        group, used = [], HEADER_BYTES
                    group.append((transfer, record))
                    used += record.nbytes
            if group:
                yield _Message(target, group, used)

    # -- sending ---------------------------------------------------------------------------------------------------

    def send(self, payload: Mapping[str, Any], transport: Transport) -> tuple[int, int]:
        """Write the messages [number, byte of the destination's staging, plan as it knows it]. Returns (bytes, writes)."""
        spec, bound, _ = self._ready()
        session, base = str(payload["session"]), Base.from_json(payload["base"])
        if self._session != session:
            raise SessionError(f"trainer rank {self.rank}: nothing was encoded for session {session}")
        deadline = Deadline.after(float(payload["seconds"]))
        stage = self._staging(spec, bound, transport)
        half = spec.message
        flying: list[list[Ticket]] = [[], []]
        moved = writes = 0
        for turn, group in enumerate(self._halves(payload["messages"], half)):
            mine = turn % 2
            moved += _landed(transport, flying[mine], deadline)
            at = mine * half
            ranges: dict[int, list[tuple[int, int, int]]] = {}
            for number, offset, plan in group:
                message = self._messages[number]
                binding = bound.targets[message.target]
                label = Label(session, base, str(plan), self.rank, binding.epoch)
                used = _laid_down(stage, at, message, label)
                ranges.setdefault(message.target, []).append((stage.storage.address + at, binding.stage + offset, used))
                at += used
            if not isinstance(transport, DeviceOrdered):
                bound.memory.settle()
            for target, rows in ranges.items():
                here, there, nbytes = np.asarray(rows, np.int64).T
                endpoint = Endpoint.from_json(bound.targets[target].endpoint)
                names = [f"what changed, session {session}"] * len(rows)
                flying[mine].append(transport.write(Batch(endpoint, here.copy(), there.copy(), nbytes.copy(), names)))
                writes += len(rows)
        return moved + sum(_landed(transport, tickets, deadline) for tickets in flying), writes

    def _halves(self, messages: Sequence[Sequence[Any]], half: int) -> Iterator[list[tuple[int, int, str]]]:
        """Messages that fill half of the staging buffer together."""
        group: list[tuple[int, int, str]] = []
        used = 0
        for number, offset, plan in messages:
            nbytes = self._messages[number].nbytes
            if group and used + nbytes > half:
                yield group
                group, used = [], 0
            group.append((number, offset, plan))
            used += nbytes
        if group:
            yield group

    def _staging(self, spec: DeltaSpec, bound: Bound, transport: Transport) -> Any:
        need = 2 * spec.message
        if self._staged_on is not transport:
            self._stages, self._staged_on = [], transport
        if not self._stages or self._stages[-1].storage.nbytes < need:  # another controller may allow more than the one before
            stage = bound.memory.staging(need)
            transport.register([Region(stage.storage.address, stage.storage.nbytes)])
            self._stages.append(stage)
        return self._stages[-1]

    # -- after the commit ------------------------------------------------------------------------------------------

    def keep(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        """The version is committed: the snapshot is of it from now on. Where nothing was encoded, it is copied now."""
        _, bound, regions = self._ready()
        base = Base.from_json(payload["base"])
        encoded = bool(payload["encoded"])
        if encoded and self._session != base.session:
            raise SessionError(f"trainer rank {self.rank}: nothing was encoded for session {base.session}")
        self.drop("copying what was sent did not end")
        if not encoded:
            for number in range(len(regions.first)):
                at, row = int(regions.start[number]), int(regions.first[number])
                for words in self._parts.of(row):
                    at += self._snapshot.store(at, words)
        self._held = base, bound.schedule.digest
        return {"snapshot": self.nbytes}


class _Parts:
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


def _landed(transport: Transport, tickets: list[Ticket], deadline: Deadline) -> int:
    moved = sum(transport.wait(ticket, deadline).nbytes for ticket in tickets)
    tickets.clear()
    return moved


def _laid_down(stage: Any, at: int, message: _Message, label: Label) -> int:
    room = stage.bytes(at, message.nbytes)
    if on_host(room):
        return write_message(room, label, message.records)
    import torch  # pyright: ignore[reportMissingImports] - what is not on the host is a torch tensor

    out = np.empty(message.nbytes, np.uint8)
    used = write_message(out, label, message.records)
    room.copy_(torch.from_numpy(out))
    return used


class _Digests:
    """Digests of a rank's transfers, of the very words that are compared; one for each region."""

    def __init__(self, bound: Bound, regions: Regions, kind: str) -> None:
        self._of = regions.of.tolist()
        plan, memory = bound.schedule.plan, bound.memory
        self._host = HostDigests(kind)
        self._late: set[int] = set()
        self._device: Any = None
        if memory.device != "cpu":
            # At once on the GPU, where they lie; what is computed exists only in parts, which the host digests.
            whole = np.flatnonzero(~plan.computed[regions.first]).tolist()
            self._late = set(whole)
            self._device = memory.digests(kind)
            self._device.whole("delta", whole, lambda: [bound.view(int(regions.first[i])) for i in whole])

    def add(self, region: int, words: Any) -> None:
        if region not in self._late:
            self._host.add(region, to_host(words))

    def text(self) -> str:
        late = sorted(self._late)
        by_region = dict(zip(late, self._device.hex(late), strict=True)) if late else {}
        rest = sorted(set(self._of) - self._late)
        by_region |= dict(zip(rest, self._host.hex(rest), strict=True))
        return "".join(by_region[i] for i in self._of)


class _Snapshot:
    """The bytes that were last sent, in one buffer in host memory, or on the device of the parameters."""

    def __init__(self, bound: Bound, nbytes: int, on_device: bool) -> None:
        self._there = on_device and bound.memory.device != "cpu"
        self._bytes: Any = bound.memory.staging(nbytes).bytes(0, nbytes) if self._there else np.zeros(nbytes, np.uint8)

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
