"""One trainer rank's part of a schedule, with addresses: batches to be written again and again, and the packing of pieces."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np

from weight_sync.errors import BindError, listed
from weight_sync.ids import Deadline
from weight_sync.layout.table import Ints
from weight_sync.plan.runs import expand_runs, merge_runs
from weight_sync.plan.schedule import Method, Piece, Schedule
from weight_sync.session.arrays import address
from weight_sync.session.casts import cast_into
from weight_sync.session.digests import Digests
from weight_sync.session.memory import Memory
from weight_sync.session.tables import TargetBinding
from weight_sync.transport.base import Batch, Boxes, Endpoint, Ticket, Transport


class Bound:
    """A schedule's part on one rank, with addresses: ready to be written any number of times."""

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        memory: Memory,
        stage: Any,
        targets: Mapping[int, TargetBinding],
        transport: Transport,
        digest: str,
    ) -> None:
        self.schedule, self.memory, self.stage, self.targets = schedule, memory, stage, targets
        self._strided, self._batch_bytes, self._kind = transport.strided, transport.batch_bytes, digest
        plan = schedule.plan
        self.rows = plan.rows_from(rank)
        mine = {row: i for i, row in enumerate(self.rows.tolist())}
        self.pieces: list[list[Piece]] = [[] for _ in range(schedule.rounds)]
        for piece in schedule.pieces:
            if piece.row in mine:
                self.pieces[piece.round].append(piece)
        missing = sorted(set(plan.target_rank[self.rows].tolist()) - set(targets))
        if missing:
            raise BindError(f"trainer rank {rank}: no binding of rollout ranks {listed(missing)}")
        packs = np.isin(schedule.method, (Method.PACK, Method.BOTH))
        if raw := np.flatnonzero(plan.casts & ~packs).tolist():
            names = listed(plan.catalog.name(t) for t in plan.tensor[raw].tolist())
            raise BindError(f"trainer rank {rank}: the schedule would move values unconverted that must be cast: {names}")
        direct = schedule.method[self.rows] == Method.DIRECT
        self.batches = self._batches(self.rows[direct])
        # On the host a piece is digested while the cache holds it; a GPU digests whole transfers, many in one launch, but for
        # those that are cast: their bytes exist only as pieces.
        self._whole = set[int]() if memory.device == "cpu" else set(self.rows[~direct & ~plan.casts[self.rows]].tolist())
        memory.digests(digest)  # raises now, before anything is paused, if this memory has no such digest
        self._digests: Digests | None = None

    def target_address(self, row: int) -> int:
        plan = self.schedule.plan
        rank, param = int(plan.target_rank[row]), plan.target_params[int(plan.target[row])]
        return self.targets[rank].addresses[param.name]

    def _batches(self, rows: Ints) -> list[tuple[Ints, Batch]]:
        """The direct transfers in batches to one destination rank each, adjacent runs merged, with the rows they carry.

        Destinations take turns, so that no engine worker waits until another has all its bytes.
        """
        plan = self.schedule.plan
        ranks = plan.target_rank[rows]
        queues: list[list[Ints]] = []
        for rank in np.unique(ranks).tolist():
            part = rows[ranks == rank]
            group = np.cumsum(plan.nbytes[part]) // self._batch_bytes
            queues.append([part[group == g] for g in np.unique(group).tolist()])
        order = [queue[i] for i in range(max(map(len, queues), default=0)) for queue in queues if i < len(queue)]
        return [(part, self._batch(part)) for part in order]

    def _batch(self, part: Ints) -> Batch:
        plan = self.schedule.plan
        rank = int(plan.target_rank[part[0]])
        if self._strided:
            return self._boxes(part, Endpoint.from_json(self.targets[rank].endpoint))
        run, source, target, count = expand_runs(
            plan.shape[part],
            plan.source_start[part],
            plan.source_strides[part],
            plan.target_start[part],
            plan.target_strides[part],
        )
        itemsize = plan.itemsize[part][run]
        names = {i: plan.source_params[i].name for i in set(plan.source[part].tolist())}
        from_ = np.asarray([self.memory.address(names[i]) for i in plan.source[part].tolist()], np.int64)[run]
        to = np.asarray([self.target_address(r) for r in part.tolist()], np.int64)[run]
        allocation = {i: self.memory.param(name).storage for i, name in names.items()}
        source, target, nbytes, first = merge_runs(
            from_ + source * itemsize,
            to + target * itemsize,
            count * itemsize,
            np.asarray([allocation[i] for i in plan.source[part].tolist()], np.int64)[run],
            plan.target[part][run],  # what the engine allocated together is not known here, so no run leaves its parameter
        )
        labels = [plan.catalog.name(t) for t in plan.tensor[part][run[first]].tolist()]
        return Batch(Endpoint.from_json(self.targets[rank].endpoint), source, target, nbytes, labels)

    def _boxes(self, part: Ints, endpoint: Endpoint) -> Batch:
        """As _batch(), for a transport that walks strides itself: one entry for each transfer."""
        plan = self.schedule.plan
        size = plan.itemsize[part]
        column = size[:, None]
        one = np.ones_like(column)
        boxes = Boxes(
            np.concatenate([plan.shape[part], column], axis=1),
            np.concatenate([plan.source_strides[part] * column, one], axis=1),
            np.concatenate([plan.target_strides[part] * column, one], axis=1),
        )
        from_ = [self.memory.address(plan.source_params[i].name) for i in plan.source[part].tolist()]
        to = [self.target_address(row) for row in part.tolist()]
        return Batch(
            endpoint,
            np.asarray(from_, np.int64) + plan.source_start[part] * size,
            np.asarray(to, np.int64) + plan.target_start[part] * size,
            plan.nbytes[part],
            [plan.catalog.name(t) for t in plan.tensor[part].tolist()],
            boxes,
        )

    def view(self, row: int, at: tuple[int, ...] | None = None, shape: tuple[int, ...] | None = None) -> Any:
        """The live source bytes of a transfer, or of a part of it."""
        plan = self.schedule.plan
        strides = plan.source_strides[row].tolist()
        start = int(plan.source_start[row]) + sum(a * s for a, s in zip(at or (), strides, strict=False))
        return self.memory.view(
            plan.source_params[int(plan.source[row])].name, start, strides, shape or plan.shape[row].tolist()
        )

    def sent(self, row: int, at: tuple[int, ...], shape: tuple[int, ...]) -> Any:
        """What a part of a transfer must have arrived as: the live source words, cast if so declared."""
        plan, view = self.schedule.plan, self.view(row, at, shape)
        if not plan.casts[row]:
            return view
        nbytes = prod(shape) * int(plan.itemsize[row])
        return cast_into(self.memory.staging(nbytes).bytes(0, nbytes), view, *plan.dtypes(row))

    def start_digests(self, wanted: bool) -> None:
        self._digests = self.memory.digests(self._kind) if wanted else None

    def digest_batch(self, number: int, rows: Ints) -> None:
        """Digest the transfers of a batch, if digests are wanted."""
        self._digest_whole(number, rows.tolist())

    def digest_staged(self) -> None:
        """Digest the transfers that travel in pieces, where that is not done piece by piece."""
        if self._whole:
            self._digest_whole("staged", sorted(self._whole))

    def _digest_whole(self, group: object, rows: list[int]) -> None:
        if self._digests is not None:
            self._digests.whole(group, rows, lambda: [self.view(row) for row in rows])

    def digest(self, row: int, view: Any) -> None:
        """Add a piece of a transfer to its digest, if digests are wanted; pieces come in row-major order."""
        if self._digests is not None and row not in self._whole:
            self._digests.add(row, view)

    def finished_digests(self) -> list[str]:
        return [] if self._digests is None else self._digests.hex(self.rows.tolist())


def write_pieces(transport: Transport, bound: Bound, round_: int, deadline: Deadline) -> tuple[int, int]:
    """Pack and write the pieces of a round; the two halves of the staging buffer take turns. (bytes, writes)."""
    plan = bound.schedule.plan
    half = bound.stage.storage.nbytes // 2 if bound.stage else 0
    flying: list[Ticket | None] = [None, None]
    turn, moved, writes = 0, 0, 0
    for group in _groups(bound.pieces[round_], half, plan.target_rank):
        ticket = flying[turn]
        if ticket is not None:
            moved += transport.wait(ticket, deadline).nbytes
        rank = int(plan.target_rank[group[0].row])
        target = bound.targets[rank]
        sources: list[int] = []
        destinations: list[int] = []
        offset = turn * half
        for piece in group:
            view = bound.view(piece.row, piece.at, piece.shape)
            if piece.method is Method.UNPACK:
                bound.digest(piece.row, view)
                sources.append(address(view))
            else:
                assert bound.stage is not None
                packed = _packed(bound.stage, offset, bound.schedule, piece, view)
                bound.digest(piece.row, packed)
                sources.append(bound.stage.storage.address + offset)
                offset += -(-piece.nbytes // 8) * 8
            if piece.method is Method.PACK:
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
        bound.memory.settle()  # what was packed is there before the transport looks
        flying[turn] = transport.write(batch)
        writes += len(group)
        turn = 1 - turn
    for ticket in flying:
        if ticket is not None:
            moved += transport.wait(ticket, deadline).nbytes
    return moved, writes


def _packed(stage: Any, offset: int, schedule: Schedule, piece: Piece, view: Any) -> Any:
    """A piece's values in the staging buffer from byte `offset`, as the destination will hold them: cast if so declared."""
    if schedule.plan.casts[piece.row]:
        return cast_into(stage.bytes(offset, piece.nbytes), view, *schedule.plan.dtypes(piece.row))
    packed = stage.region(offset, view, piece.shape)
    packed[...] = view
    return packed


def _groups(pieces: list[Piece], half: int, target_rank: Ints) -> list[list[Piece]]:
    """Pieces to one destination that fit half of the staging buffer together, in order."""
    groups: list[list[Piece]] = []
    used = 0
    for piece in pieces:
        size = -(-piece.nbytes // 8) * 8 if piece.method is not Method.UNPACK else 0
        fits = groups and used + size <= half and target_rank[groups[-1][0].row] == target_rank[piece.row]
        if not fits:
            groups.append([])
            used = 0
        groups[-1].append(piece)
        used += size
    return groups
