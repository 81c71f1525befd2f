"""SourceAgent: the trainer's side of a sync, inside each trainer rank's process. Trainer neutral.

The controller reaches it by call(method, payload) -> reply, plain data both ways:

    describe  {}                                   -> RankDescription as a dict
    plan      PlanInputs.to_json()                 -> {"digest"}; every rank computes the schedule itself
    bind      {"plan", "targets": {rank: binding}} -> {"endpoint"}; registers, checks sizes, proves that each peer answers
    quiesce   {"session", "plan"}                  -> {}; parameters hold the finished step, no step may start. Refused when
                                                      there is no binding of this plan or parameters moved since (a rank
                                                      that restarted): nothing has been paused yet
    write     {"session", "round", "seconds"}      -> {"bytes", "writes", "spans", "digests" (last round only)}
    fence     {"reason"}                           -> {}; closes the transport: nothing of ours can still be written. If it
                                                      does not close, this and every later call but describe raises
    release   {"session"}                          -> {}; the trainer may step again. Refused between a write that failed
                                                      and its fence: the transport may still be reading the parameters
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import xxhash

from weight_sync.errors import BindError, SessionError, listed
from weight_sync.ids import Deadline
from weight_sync.layout.table import Ints
from weight_sync.plan.runs import expand_runs, merge_runs
from weight_sync.plan.schedule import Method, Piece, Schedule
from weight_sync.session.contracts import LiveStorage, TrainerSource
from weight_sync.session.inputs import PlanInputs
from weight_sync.session.memory import Memory, Staging, feed
from weight_sync.session.tables import TargetBinding
from weight_sync.transport.base import Batch, Endpoint, Region, Ticket, Transport

_BATCH_BYTES = 32 << 20
"""Bytes handed to the transport, and digested, at a time."""


class SourceAgent:
    """See the module docstring. transport: opens a transport; called once for each binding."""

    def __init__(self, source: TrainerSource, transport: Callable[[], Transport]) -> None:
        self._source = source
        self._open = transport
        self._lock = threading.Lock()
        self._transport: Transport | None = None
        self._schedule: Schedule | None = None
        self._bound: _Bound | None = None
        self._stage: Staging | None = None
        self._storages: tuple[LiveStorage, ...] = ()
        self._session: str | None = None
        self._writing = False
        self._unfenced: str | None = None
        self.rank = source.describe().rank

    def call(self, method: str, payload: Mapping[str, Any]) -> dict[str, Any]:
        """Dispatch one request. Raises SessionError for an unknown method or one that is illegal now."""
        handlers = {
            "describe": self._describe,
            "plan": self._plan,
            "bind": self._bind,
            "quiesce": self._quiesce,
            "write": self._write,
            "release": self._release,
            "fence": self._fence,
        }
        if method not in handlers:
            raise SessionError(f"trainer rank {self.rank}: unknown method {method!r}; known: {', '.join(handlers)}")
        with self._lock:
            return handlers[method](payload)

    def _describe(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        return asdict(self._source.describe())

    def _plan(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        self._schedule = PlanInputs.from_json(payload).schedule()
        return {"digest": self._schedule.digest}

    def _bind(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        schedule = self._schedule
        if schedule is None or schedule.digest != payload["plan"]:
            raise BindError(f"trainer rank {self.rank}: asked to bind plan {payload['plan']}, has computed another")
        targets = {int(rank): TargetBinding.from_json(data) for rank, data in payload["targets"].items()}
        self._bound = None
        memory = Memory(self._source.tensors(), f"trainer rank {self.rank}")
        self._check(memory, schedule)
        transport = self._registered(memory, max((p.nbytes for p in schedule.pieces), default=0))
        deadline = Deadline.after(float(payload["seconds"]))
        bound = _Bound(schedule, self.rank, memory, self._stage, targets)
        for rank in sorted(set(schedule.plan.target_rank[bound.rows].tolist())):
            transport.probe(Endpoint.from_json(targets[rank].endpoint), deadline)
        self._bound = bound
        return {"endpoint": transport.describe().to_json()}

    def _registered(self, memory: Memory, piece: int) -> Transport:
        """A transport on which the parameters and a staging buffer of two pieces are registered: the old one if it fits."""
        half = -(-piece // 64) * 64
        enough = not half or (self._stage is not None and self._stage.storage.nbytes >= 2 * half)
        if self._transport is not None and not self._writing and enough and self._storages == memory.storages:
            return self._transport
        self._close()
        self._stage = Staging(2 * half) if half else None
        self._storages = memory.storages
        self._transport = self._open()
        storages = [*memory.storages, *([self._stage.storage] if self._stage else [])]
        try:
            self._transport.register([Region(s.address, s.nbytes) for s in storages])
        except BaseException:
            self._close()
            raise
        return self._transport

    def _check(self, memory: Memory, schedule: Schedule) -> None:
        """The live parameters must be those the plan was made for."""
        live = {p.name: [list(p.shape), p.dtype] for p in memory.params}
        planned = {p.name: [list(p.shape), p.dtype] for p in schedule.plan.source_params if p.rank == self.rank}
        problems = [f"{n}: planned {v}, live {live.get(n, 'absent')}" for n, v in planned.items() if live.get(n) != v]
        problems += [f"{name}: live {live[name]}, no rule places it" for name in live if name not in planned]
        if problems:
            raise BindError(f"trainer rank {self.rank}: the declared layout is not the live one: {listed(problems)}")

    def _quiesce(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        self._not_unfenced()
        if self._session is not None:
            self._release({"session": self._session})  # of a sync whose controller did not come to it
        # First, whatever is wrong here: quiescing may be a collective of all ranks, and the others are in it.
        self._source.quiesce()
        self._session = payload["session"]
        if self._bound is None or self._bound.schedule.digest != payload["plan"]:
            raise BindError(
                f"trainer rank {self.rank}: has no binding of plan {payload['plan']}; was it restarted since? connect again"
            )
        self._not_moved(self._bound)
        return {}

    def _not_moved(self, bound: _Bound) -> None:
        if changed := bound.memory.moved(self._source.tensors()):
            raise BindError(f"trainer rank {self.rank}: parameters moved since they were bound: {changed}; connect again")

    def _release(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        if self._session is None or self._session != payload["session"]:
            return {}
        if self._writing:
            raise SessionError(
                f"trainer rank {self.rank}: a write failed and its transport is not closed"
                + (f" ({self._unfenced}); end this process" if self._unfenced else "; fence first")
                + ": its parameters may still be read, so it must not step"
            )
        self._source.release()
        self._session = None
        return {}

    def _write(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        if self._session != payload["session"]:
            open_ = f"session {self._session} is open" if self._session else "nothing was quiesced: parameters may still change"
            raise SessionError(f"trainer rank {self.rank}: write for session {payload['session']}, but {open_}")
        bound, transport = self._bound, self._transport
        if bound is None or transport is None:
            raise SessionError(f"trainer rank {self.rank}: write without a binding")
        self._not_moved(bound)
        deadline = Deadline.after(float(payload["seconds"]))
        round_ = int(payload["round"])
        spans: list[dict[str, Any]] = []
        begin, wall = time.monotonic(), time.time()
        tickets: list[Ticket] = []
        self._writing = True  # until every byte is reported written; after an error, until the transport is closed
        if round_ == 0:
            bound.start_digests()
            for rows, batch in bound.batches:
                # Digested while they are on the wire: both only read.
                tickets.append(transport.write(batch))
                for row in rows.tolist():
                    bound.digest(row, bound.view(row))
        moved, writes = _write_pieces(transport, bound, round_, deadline)
        digests = bound.finished_digests() if round_ == bound.schedule.rounds - 1 else None
        for ticket in tickets:
            moved += transport.wait(ticket, deadline).nbytes
            writes += len(ticket.batch.nbytes)
        self._writing = False
        spans.append(self._span("write", begin, wall, moved))
        return {"bytes": moved, "writes": writes, "spans": spans, "digests": digests}

    def _span(self, phase: str, start: float, wall: float, nbytes: int) -> dict[str, Any]:
        end = time.monotonic()
        return {"rank": f"trainer {self.rank}", "phase": phase, "start": start, "end": end, "wall": wall, "nbytes": nbytes}

    def _fence(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        self._close()
        return {}

    def _close(self) -> None:
        """Raises if the transport does not close, now and ever after: only the end of the process is a fence then."""
        self._not_unfenced()
        transport, self._transport, self._bound = self._transport, None, None
        if transport is not None:
            try:
                transport.close()
            except BaseException as error:
                self._unfenced = f"{type(error).__name__}: {error}"
                raise
        self._writing = False
        self._stage = None  # only now: what is not closed may still read it

    def _not_unfenced(self) -> None:
        if self._unfenced is not None:
            raise SessionError(
                f"trainer rank {self.rank}: a transport did not close ({self._unfenced}), so it may still write to engines; "
                "end this process"
            )


class _Bound:
    """A schedule's part on one rank, with addresses: ready to be written any number of times."""

    def __init__(
        self, schedule: Schedule, rank: int, memory: Memory, stage: Staging | None, targets: Mapping[int, TargetBinding]
    ) -> None:
        self.schedule, self.memory, self.stage, self.targets = schedule, memory, stage, targets
        plan = schedule.plan
        self.rows = plan.rows_from(rank)
        self.nbytes = int(plan.nbytes[self.rows].sum())
        mine = {row: i for i, row in enumerate(self.rows.tolist())}
        self.pieces: list[list[Piece]] = [[] for _ in range(schedule.rounds)]
        for piece in schedule.pieces:
            if piece.row in mine:
                self.pieces[piece.round].append(piece)
        missing = sorted(set(plan.target_rank[self.rows].tolist()) - set(targets))
        if missing:
            raise BindError(f"trainer rank {rank}: no binding of rollout ranks {listed(missing)}")
        self.batches = self._batches(self.rows[schedule.method[self.rows] == Method.DIRECT])
        self._hashers: dict[int, Any] = {}

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
            group = np.cumsum(plan.nbytes[part]) // _BATCH_BYTES
            queues.append([part[group == g] for g in np.unique(group).tolist()])
        order = [queue[i] for i in range(max(map(len, queues), default=0)) for queue in queues if i < len(queue)]
        return [(part, self._batch(part)) for part in order]

    def _batch(self, part: Ints) -> Batch:
        plan = self.schedule.plan
        rank = int(plan.target_rank[part[0]])
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
        source, target, nbytes, first = merge_runs(from_ + source * itemsize, to + target * itemsize, count * itemsize)
        labels = [plan.catalog.name(t) for t in plan.tensor[part][run[first]].tolist()]
        return Batch(Endpoint.from_json(self.targets[rank].endpoint), source, target, nbytes, labels)

    def view(self, row: int, at: tuple[int, ...] | None = None, shape: tuple[int, ...] | None = None) -> Any:
        """The live source bytes of a transfer, or of a part of it."""
        plan = self.schedule.plan
        strides = plan.source_strides[row].tolist()
        start = int(plan.source_start[row]) + sum(a * s for a, s in zip(at or (), strides, strict=False))
        return self.memory.view(
            plan.source_params[int(plan.source[row])].name, start, strides, shape or plan.shape[row].tolist()
        )

    def start_digests(self) -> None:
        self._hashers = {row: xxhash.xxh3_64() for row in self.rows.tolist()}

    def digest(self, row: int, view: Any) -> None:
        """Add bytes of a transfer to its digest; its pieces come in row-major order."""
        feed(self._hashers[row], view)

    def finished_digests(self) -> list[str]:
        return [self._hashers[row].hexdigest() for row in self.rows.tolist()]


def _write_pieces(transport: Transport, bound: _Bound, round_: int, deadline: Deadline) -> tuple[int, int]:
    """Pack and write the pieces of a round; the two halves of the staging buffer take turns. (bytes, writes)."""
    plan = bound.schedule.plan
    half = bound.stage.storage.nbytes // 2 if bound.stage else 0
    flying: list[Ticket | None] = [None, None]
    turn, moved, writes = 0, 0, 0
    for group in _groups(bound.pieces[round_], half, plan.target_rank.tolist()):
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
                sources.append(int(view.ctypes.data))
            else:
                assert bound.stage is not None
                packed = bound.stage.region(offset, view, piece.shape)
                packed[...] = view
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
        flying[turn] = transport.write(batch)
        writes += len(group)
        turn = 1 - turn
    for ticket in flying:
        if ticket is not None:
            moved += transport.wait(ticket, deadline).nbytes
    return moved, writes


def _groups(pieces: list[Piece], half: int, target_rank: list[int]) -> list[list[Piece]]:
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
