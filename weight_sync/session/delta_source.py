"""Deltas in a trainer rank: the snapshot of what was last sent, finding and encoding what changed, writing it.

The snapshot is one buffer, as large as all distinct regions that this rank sends, as they are sent (cast, quantised). It says
which committed version it is of, or nothing: encode() brings it to the new bytes in place, and until keep() says that the
version was committed it is of no version. Whatever closes the transport or binds anew drops it.

SourceAgent calls this, on its thread and under its lock.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weight_sync.delta.codec import Record, encode, most_elements
from weight_sync.delta.message import Label
from weight_sync.delta.regions import Regions, regions_of
from weight_sync.delta.spec import Base, DeltaSpec
from weight_sync.errors import SessionError
from weight_sync.ids import Deadline
from weight_sync.layout.table import Ints
from weight_sync.session.arrays import to_host
from weight_sync.session.bound import Bound
from weight_sync.session.delta_device import CHUNK, DeviceChanges
from weight_sync.session.delta_encoded import Encoded, Message
from weight_sync.session.delta_snapshot import Parts, Snapshot
from weight_sync.session.digests import HostDigests, box_of
from weight_sync.session.pieces import Flight, filled
from weight_sync.transport.base import Batch, DeviceOrdered, Endpoint, Region, Ticket, Transport

_SPAN = 1 << 20
"""Most elements of one record: positions inside it are found and encoded while the cache holds it."""
_HELD, _LEAST_HELD = 16, 256 << 20
"""Encoded changes stay on a GPU up to this part of the snapshot, or so many bytes; further ones wait in host memory."""
_ALIGN = 16
"""Messages begin at multiples of it in the staging buffer: a GPU digests them 16 bytes at a time."""


class DeltaSource:
    """One for a SourceAgent. Nothing of it exists until bind() was called with a spec."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._spec: DeltaSpec | None = None
        self._bound: Bound | None = None
        self._regions: Regions | None = None
        self._parts: Any = None
        self._device: DeviceChanges | None = None
        self._kind = ""
        self._snapshot: Any = None
        self._made_for: tuple[Any, ...] = ()
        self._held: tuple[Base, str] | None = None
        self._why = "no delta was asked for"
        self._session = ""
        self._encoded = Encoded()
        self._messages: list[Message] = []
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
            self._regions = self._snapshot = self._device = None
            return
        regions = regions_of(bound.schedule.plan, bound.rows)
        made_for = regions.total, spec.snapshot, bound.memory.device
        if self._made_for != made_for or self._snapshot is None:
            self._snapshot = None
            self._snapshot = Snapshot(bound, regions.total, spec.snapshot == "device")
        self._made_for = made_for
        self._regions, self._parts = regions, Parts(bound, regions)
        self._device = _on_device(bound, regions, spec)

    def drop(self, why: str) -> None:
        self._held, self._why, self._session, self._messages, self._encoded = None, why, "", [], Encoded()

    def closed(self) -> None:
        """The transport is closed: nothing reads the staging buffer any more."""
        self._bound = self._parts = self._device = self._staged_on = None
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
        found = Encoded(max(_LEAST_HELD, regions.total // _HELD))
        digests = _Digests(regions, self._kind)
        elements, encoded = self._find(found, digests, limit)
        over = encoded > limit
        if bound.quantiser is not None and not over:
            bound.quantiser.unchanged()
        if not over:
            self._encoded, self._messages = found, list(found.messages(plan, regions, spec.message))
        return {
            "missing": None,
            "over": over,
            "changed": found.changed,
            "elements": elements,
            "encoded": encoded,
            "bytes": int(plan.nbytes[bound.rows].sum()),
            "messages": [[message.target, message.nbytes] for message in self._messages],
            "digests": "" if over else digests.text(),
            "snapshot": self.nbytes,
        }

    def _find(self, found: Encoded, digests: _Digests, limit: int) -> tuple[int, int]:
        """Compare and encode all regions. Returns how many elements were looked at and the bytes that records take, each as
        often as it is sent; more than `limit`: not everything was looked at.
        """
        _, bound, regions = self._ready()
        copies = np.bincount(regions.of, minlength=len(regions.first))
        volume = regions.nbytes // bound.schedule.plan.itemsize[regions.first]
        elements = encoded = 0
        alone = set[int]()
        if self._device is not None:
            alone = self._device.numbers
            for part in self._device.find(self._snapshot.whole, limit, copies):
                elements, encoded = elements + part.elements, encoded + part.nbytes(copies)
                if part.bodies is None:
                    return elements, encoded
                found.add_found(part)
            digests.known(*self._device.digests())
        for number in range(len(regions.first)):
            if number not in alone:
                records = self._compare(number, digests)
                elements += int(volume[number])
                encoded += sum(record.nbytes for record in records) * int(copies[number])
                if encoded > limit:
                    break
                found.add(number, records)
        return elements, encoded

    def _ready(self) -> tuple[DeltaSpec, Bound, Regions]:
        if self._spec is None or self._bound is None or self._regions is None:
            raise SessionError(f"trainer rank {self.rank}: bound without deltas, or not at all")
        return self._spec, self._bound, self._regions

    def _compare(self, number: int, digests: _Digests) -> list[Record]:
        """The records of one region. The snapshot has the new bytes afterwards."""
        spec, bound, regions = self._ready()
        row, size = int(regions.first[number]), int(bound.schedule.plan.itemsize[regions.first[number]])
        span = min(_SPAN, most_elements(spec.message, size))
        records: list[Record] = []
        at, first = int(regions.start[number]), 0
        for words in self._parts.of(row):
            digests.add(number, words)
            records += [
                encode(first + low, new, positions) for low, new, positions in self._snapshot.renew(at, words, size, span)
            ]
            first += len(words)
            at += len(words) * size
        return records

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
                self._encoded.lay_down(stage.bytes(at, message.nbytes), message, label, self._kind)
                place = stage.storage.address + at, binding.stage + offset, message.nbytes
                ranges.setdefault(message.target, []).append(place)
                at += -(-message.nbytes // _ALIGN) * _ALIGN
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
            used += -(-nbytes // _ALIGN) * _ALIGN
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
            alone = set[int]()
            if self._device is not None:
                self._device.store(self._snapshot.whole)
                alone = self._device.numbers
            for number in range(len(regions.first)):
                if number not in alone:
                    at, row = int(regions.start[number]), int(regions.first[number])
                    for words in self._parts.of(row):
                        at += self._snapshot.store(at, words)
        self._held = base, bound.schedule.digest
        return {"snapshot": self.nbytes}


def _on_device(bound: Bound, regions: Regions, spec: DeltaSpec) -> DeviceChanges | None:
    """What a GPU compares by itself: what is sent as it lies, and, where the snapshot is beside it, what is made in the staging
    buffer. The rest is compared region by region."""
    if bound.memory.device == "cpu":
        return None
    computed = bound.schedule.plan.computed[regions.first]
    numbers = np.flatnonzero(~computed).tolist()
    views = [bound.view(int(regions.first[i])) for i in numbers]
    found = DeviceChanges(bound.memory.on, spec.message, CHUNK[spec.snapshot])
    found.add(numbers, [box_of(view) for view in views], regions.start[numbers].tolist())
    if spec.snapshot == "device":
        made = {int(regions.first[i]): i for i in np.flatnonzero(computed).tolist() if int(regions.first[i]) not in bound.odd}
        for flight in (flight for round_ in bound.flights for flight in round_):
            if pieces := list(_in_staging(bound, flight, regions, made)):
                found.add_filled(partial(filled, bound, flight), pieces)
    found.check({int(i): int(regions.nbytes[i]) for i in found.numbers})
    return found


def _in_staging(
    bound: Bound, flight: Flight, regions: Regions, made: Mapping[int, int]
) -> Iterator[tuple[int, int, int, int, int, int]]:
    """The pieces of a flight that are of regions `made` (by plan row), as DeviceChanges.add_filled takes them."""
    for piece, offset, first in zip(flight.pieces, flight.offsets, flight.first, strict=True):
        region = made.get(piece.row)
        if region is not None and offset is not None:
            size, start = int(bound.schedule.plan.itemsize[piece.row]), int(regions.start[region]) + first
            yield region, size, bound.stage.storage.address + offset, piece.nbytes, first, start


def _landed(transport: Transport, tickets: list[Ticket], deadline: Deadline) -> int:
    moved = sum(transport.wait(ticket, deadline).nbytes for ticket in tickets)
    tickets.clear()
    return moved


class _Digests:
    """Digests of a rank's transfers, of the very words that are compared; one for each region."""

    def __init__(self, regions: Regions, kind: str) -> None:
        self._of = regions.of
        self._host = HostDigests(kind)
        self._known = np.zeros(len(regions.first), np.uint64)
        self._is_known = np.zeros(len(regions.first), np.bool_)

    def add(self, region: int, words: Any) -> None:
        self._host.add(region, to_host(words))

    def known(self, regions: Ints, digests: NDArray[np.uint64]) -> None:
        """Of regions that a GPU compared."""
        self._known[regions], self._is_known[regions] = digests, True

    def text(self) -> str:
        rest = np.flatnonzero(~self._is_known).tolist()
        self._known[rest] = [int(digest, 16) for digest in self._host.hex(rest)]
        return self._known[self._of].astype(">u8").tobytes().hex()
