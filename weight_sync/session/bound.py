"""One trainer rank's part of a schedule, with addresses: batches to be written again and again, and the packing of pieces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from weight_sync.errors import BindError, listed
from weight_sync.layout.table import Ints
from weight_sync.plan.pieces import Piece
from weight_sync.plan.runs import expand_runs, merge_runs
from weight_sync.plan.schedule import Method, Schedule
from weight_sync.session.casts import cast_into
from weight_sync.session.digests import Digests
from weight_sync.session.memory import Memory
from weight_sync.session.pieces import Flight, flights, made_bytes
from weight_sync.session.quantise import Quantiser
from weight_sync.session.tables import TargetBinding
from weight_sync.transport.base import Batch, Boxes, Endpoint, Transport


class Bound:
    """A schedule's part on one rank, with addresses: ready to be written any number of times.

    wave: which part of a schedule in waves this is.
    """

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        memory: Memory,
        stage: Any,
        targets: Mapping[int, TargetBinding],
        transport: Transport,
        digest: str,
        report: bool = True,
        wave: int = 0,
    ) -> None:
        self.schedule, self.memory, self.stage, self.targets = schedule, memory, stage, targets
        self._wave = wave  # waves share a memory, which keeps where digests look: each has its own
        self._strided, self._batch_bytes, self._kind = transport.strided, transport.batch_bytes, digest
        plan = schedule.plan
        self.rows = plan.rows_from(rank)
        pieces: list[list[Piece]] = [[] for _ in range(schedule.rounds)]
        for piece in schedule.pieces.of(self.rows):
            pieces[piece.round].append(piece)
        missing = sorted(set(plan.target_rank[self.rows].tolist()) - set(targets))
        if missing:
            raise BindError(f"trainer rank {rank}: no binding of rollout ranks {listed(missing)}")
        packs = np.isin(schedule.method, (Method.PACK, Method.BOTH))
        if raw := np.flatnonzero(plan.computed & ~packs).tolist():
            names = listed(plan.catalog.name(t) for t in plan.tensor[raw].tolist())
            raise BindError(f"trainer rank {rank}: the schedule would move values unconverted that must be computed: {names}")
        direct = schedule.method[self.rows] == Method.DIRECT
        self.batches = self._batches(self.rows[direct])
        # On the host a piece is digested while the cache holds it; a GPU digests whole transfers, many in one launch, but for
        # those that are computed: their bytes exist only as pieces.
        self.whole = set[int]() if memory.device == "cpu" else set(self.rows[~direct & ~plan.computed[self.rows]].tolist())
        self.odd = {piece.row for round_ in pieces for piece in round_ if piece.nbytes % 8}
        memory.digests(digest)  # raises now, before anything is paused, if this memory has no such digest
        self._digests: Digests | None = None
        # Made now: what cannot be quantised is said before anything is paused.
        self.quantiser = Quantiser(plan, rank, memory, report) if plan.made[self.rows].any() else None
        done: dict[int, int] = {}
        self.flights = [flights(self, round_, done) for round_ in pieces]

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
        """What a part of a transfer must have arrived as: the live source words, cast or quantised if so declared."""
        plan = self.schedule.plan
        if plan.made[row]:
            return made_bytes(self, row, at, shape)
        view = self.view(row, at, shape)
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
        if self.whole:
            self._digest_whole("staged", sorted(self.whole))

    def _digest_whole(self, group: object, rows: list[int]) -> None:
        if self._digests is not None:
            self._digests.whole((self._wave, group), rows, lambda: [self.view(row) for row in rows])

    def digest_pieces(self, group: object, flight: Flight, views: Sequence[Any]) -> None:
        """Add pieces of transfers to their digests, if digests are wanted; pieces of a transfer come in row-major order."""
        if self._digests is None:
            return
        mine, rows, first = flight.digested
        mine_only = views if len(mine) == len(views) else [views[i] for i in mine]
        self._digests.pieces((self._wave, group), rows, first, mine_only, self.odd)

    def finished_digests(self) -> str:
        """Of the transfers of this rank in order, 16 hex digits each; empty where none are wanted."""
        return "" if self._digests is None else self._digests.text(self.rows.tolist())
