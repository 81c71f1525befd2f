"""The transfers of a rank that travel in pieces: packed, cast or quantised into the staging buffer, then written.

What goes into which half of the staging buffer follows from the schedule, so pieces are grouped, addressed and given their
kernels when a plan is bound; a sync only runs them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from weight_sync.ids import Deadline
from weight_sync.layout.table import Ints
from weight_sync.plan.pieces import Piece
from weight_sync.plan.schedule import Method
from weight_sync.quant.kernel import Prepared
from weight_sync.session.arrays import address
from weight_sync.session.casts import cast_into
from weight_sync.transport.base import Batch, DeviceOrdered, Endpoint, Ticket, Transport

if TYPE_CHECKING:
    from weight_sync.session.bound import Bound


@dataclass(frozen=True, slots=True, eq=False)
class Flight:
    """Pieces to one destination that fill half of the staging buffer together, and the batch that writes them.

    offsets: of each piece in the staging buffer, None where it is written from where it lies. first: byte of its transfer at
    which each piece begins. made: fills those that are made of weights. views: what is written of each piece, where that always
    lies in the same place. digested: which pieces are digested as pieces, their rows and first bytes.
    """

    pieces: tuple[Piece, ...]
    offsets: tuple[int | None, ...]
    first: tuple[int, ...]
    batch: Batch
    made: Prepared | None
    views: tuple[Any, ...] | None
    digested: tuple[list[int], list[int], list[int]]


def flights(bound: Bound, pieces: Sequence[Piece], done: dict[int, int]) -> list[Flight]:
    """The pieces of one round, grouped and addressed. The two halves of the staging buffer take turns.

    done: bytes of each transfer in the rounds before; added to.
    """
    plan = bound.schedule.plan
    half = bound.stage.storage.nbytes // 2 if bound.stage else 0
    result: list[Flight] = []
    for number, group in enumerate(_groups(_together(bound, pieces), half, plan.target_rank)):
        target = bound.targets[int(plan.target_rank[group[0].row])]
        offset = number % 2 * half
        offsets: list[int | None] = []
        sources: list[int] = []
        destinations: list[int] = []
        first: list[int] = []
        for piece in group:
            first.append(done.get(piece.row, 0))
            done[piece.row] = first[-1] + piece.nbytes
            if piece.method == Method.UNPACK:
                offsets.append(None)
                sources.append(address(bound.view(piece.row, piece.at, piece.shape)))
            else:
                offsets.append(offset)
                sources.append(bound.stage.storage.address + offset)
                offset += -(-piece.nbytes // 8) * 8
            if piece.method == Method.PACK:
                strides = plan.target_strides[piece.row].tolist()
                element = int(plan.target_start[piece.row]) + sum(a * s for a, s in zip(piece.at, strides, strict=True))
                destinations.append(bound.target_address(piece.row) + element * int(plan.itemsize[piece.row]))
            else:
                destinations.append(target.stage + piece.stage)
        batch = Batch(
            Endpoint.from_json(target.endpoint),
            np.asarray(sources, np.int64),
            np.asarray(destinations, np.int64),
            np.asarray([p.nbytes for p in group], np.int64),
            [plan.catalog.name(int(plan.tensor[p.row])) for p in group],
        )
        made = [
            (p.row, p.at, p.shape, bound.stage.bytes(at, p.nbytes))
            for p, at in zip(group, offsets, strict=True)
            if plan.made[p.row] and at is not None
        ]
        prepared = bound.quantiser.prepare(made) if made and bound.quantiser is not None else None
        views = None
        if len(made) == len(group):  # thousands of pieces in each sync: nothing is done for each that can be done once
            views = tuple(
                bound.stage.words(at, int(plan.itemsize[p.row]), p.shape) for p, at in zip(group, offsets, strict=True)
            )
        mine = [i for i, piece in enumerate(group) if piece.row not in bound.whole]
        digested = mine, [group[i].row for i in mine], [first[i] for i in mine]
        result.append(Flight(tuple(group), tuple(offsets), tuple(first), batch, prepared, views, digested))
    return result


def _together(bound: Bound, pieces: Sequence[Piece]) -> Sequence[Piece]:
    """Pieces to one destination, values and scales of one weight behind each other, so that one kernel makes both.

    The pieces of a transfer stay in their order, which digests need.
    """
    plan, rows = bound.schedule.plan, np.asarray([piece.row for piece in pieces], np.int64)
    if not plan.made[rows].any():
        return pieces
    weight, block = plan.catalog.base[plan.tensor[rows]], plan.catalog.block[plan.tensor[rows]]
    low = plan.offset[rows] * block
    order = np.lexsort(
        (np.arange(len(rows)), ~plan.catalog.leads[plan.tensor[rows]], *low.T[::-1], weight, plan.target_rank[rows])
    )
    return [pieces[i] for i in order.tolist()]


def write_pieces(transport: Transport, bound: Bound, round_: int, deadline: Deadline) -> tuple[int, list[Ticket]]:
    """Fill and write the pieces of a round; while one half of the staging buffer is on the wire, the other is filled.

    On a device that keeps the order of what it is asked, everything is asked for at once. Returns the bytes that are known to
    be written, and the tickets of those that may still be on the wire.
    """
    flying: deque[Ticket] = deque()
    moved = 0
    ordered = transport if isinstance(transport, DeviceOrdered) else None
    for number, flight in enumerate(bound.flights[round_]):
        if ordered is not None:
            if number >= 2:
                ordered.follow(flying[number - 2])
        elif len(flying) == 2:
            moved += transport.wait(flying.popleft(), deadline).nbytes
        bound.digest_pieces((round_, number), flight, filled(bound, flight))
        if ordered is None:
            bound.memory.settle()  # what was packed is there before the transport looks
        flying.append(transport.write(flight.batch))
    return moved, list(flying)


def filled(bound: Bound, flight: Flight) -> Sequence[Any]:
    """What is written of each piece: its packed, cast or quantised words, or the live ones."""
    plan = bound.schedule.plan
    if flight.made is not None:
        flight.made.run()
    if flight.views is not None:
        return flight.views
    views: list[Any] = []
    for piece, offset in zip(flight.pieces, flight.offsets, strict=True):
        if offset is None:
            views.append(bound.view(piece.row, piece.at, piece.shape))
        elif plan.made[piece.row]:
            views.append(bound.stage.words(offset, int(plan.itemsize[piece.row]), piece.shape))
        elif plan.casts[piece.row]:
            view = bound.view(piece.row, piece.at, piece.shape)
            views.append(cast_into(bound.stage.bytes(offset, piece.nbytes), view, *plan.dtypes(piece.row)))
        else:
            view = bound.view(piece.row, piece.at, piece.shape)
            packed = bound.stage.region(offset, view, piece.shape)
            packed[...] = view
            views.append(packed)
    return views


def _groups(pieces: Sequence[Piece], half: int, target_rank: Ints) -> list[list[Piece]]:
    """Pieces to one destination that fit half of the staging buffer together, in order."""
    groups: list[list[Piece]] = []
    used = 0
    for piece in pieces:
        size = -(-piece.nbytes // 8) * 8 if piece.method != Method.UNPACK else 0
        fits = groups and used + size <= half and target_rank[groups[-1][0].row] == target_rank[piece.row]
        if not fits:
            groups.append([])
            used = 0
        groups[-1].append(piece)
        used += size
    return groups


def made_bytes(bound: Bound, row: int, at: tuple[int, ...], shape: tuple[int, ...]) -> Any:
    """What a part of a made transfer must have arrived as, as words of its shape."""
    assert bound.quantiser is not None
    size = int(bound.schedule.plan.itemsize[row])
    stage = bound.memory.staging(prod(shape) * size)
    bound.quantiser.fill(row, at, shape, stage.bytes(0, prod(shape) * size))
    return stage.words(0, size, shape)
