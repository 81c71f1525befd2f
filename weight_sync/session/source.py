"""SourceAgent: the trainer's side of a sync, inside each trainer rank's process. Trainer neutral.

The controller reaches it by call(method, payload) -> reply, plain data both ways:

    describe  {}                                   -> RankDescription as a dict, and what this agent knows: "session",
                                                      "generation", "source" (its class), "exports", "witnessed" (digest of
                                                      the layout that its export has agreed with, "" if none has)
    claim     {"controller"}                       -> {}; no older controller may call from now on, see gate.py
    plan      PlanInputs.to_json(), "controller"   -> {"digest"}; every rank computes the schedule itself
    extend    {"base", "change", "controller"}     -> {"digest"}; the plan of digest `base`, changed by one engine. Digest None
                                                      where this rank has another plan or none (it restarted): plan it in full
    witness   {"plan", "controller"}               -> {"elements"}; the declared layout against the trainer's own export, see
                                                      exported.py. A collective of all ranks if the export is one
    bind      {"plan", "targets": {rank: binding}} -> {"endpoint"}; registers, checks sizes, proves that each peer answers
    quiesce   {"session", "plan"}                  -> {}; parameters hold the finished step, no step may start. Refused when
                                                      there is no binding of this plan or parameters moved since (a rank
                                                      that restarted): nothing has been paused yet
    scan      {"session", "finite", "wave"}        -> {"session", "magnitudes", "spans"}; where weights are quantised: looks at
                                                      all of them (of one wave; of the only one by default, here and below).
                                                      WeightsError for NaN and infinities, if finite is set
    write     {"session", "round", "seconds", "wave"} -> {"session", "round", "bytes", "writes", "spans", "digests",
                                                      "made"}; the last two with the last round only. Where
                                                      weights are quantised, round 0 brings
                                                     "magnitudes": those that scan gave, of all ranks
    encode    {"session", "base", "magnitudes"}    -> {"missing", "over", "changed", "elements", "encoded", "bytes", "messages",
                                                      "digests", "snapshot"}: what changed since the base (a committed
                                                      version), in messages [rollout rank, bytes]; see delta_source.py.
                                                      missing: why there is no snapshot of the base, or None. over: it takes
                                                      more than the share that is allowed
    send      {"session", "round", "base", "messages", "seconds"} -> {"bytes", "writes", "spans"}; writes messages
                                                      [number, byte of the destination's staging buffer, plan]
    keep      {"session", "base", "encoded"}       -> {"snapshot", "spans"}; base was committed and is what the next encode
                                                      compares with
    compare   {"session", "seconds"}               -> {"bytes", "reads"}; reads what it wrote back out of the engines and
                                                      compares every byte with the live source. VerifyError names the first
                                                      that differs
    fence     {"reason", "session"}                -> {"failed": a write of this rank failed}; closes the transport: nothing of
                                                      ours can still be written. If it does not close, this and every later
                                                      call but describe raises
    release   {"session"}                          -> {}; the trainer may step again. Refused between a write that failed
                                                      and its fence: the transport may still be reading the parameters
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

from weight_sync.delta.spec import DeltaSpec
from weight_sync.errors import BindError, SessionError, VerifyError, listed
from weight_sync.ids import Deadline
from weight_sync.plan.figures import source_staging
from weight_sync.plan.schedule import Schedule
from weight_sync.session.bound import Bound
from weight_sync.session.contracts import LiveStorage, TrainerSource
from weight_sync.session.delta_source import DeltaSource
from weight_sync.session.digests import XXH3
from weight_sync.session.exported import Comparison, Export, compare_export
from weight_sync.session.gate import Gate, controller_of
from weight_sync.session.inputs import PlanInputs, layout_of
from weight_sync.session.memory import Memory, memory_of
from weight_sync.session.pieces import write_pieces
from weight_sync.session.readback import BUFFER_BYTES, compare
from weight_sync.session.tables import TargetBinding
from weight_sync.transport.base import Endpoint, Region, Ticket, Transport


class SourceAgent:
    """See the module docstring. transport: opens a transport; called once for each binding. export: the trainer's own, for
    weight_sync.verify.trainer_witness (weight_sync.session.exported); None where there is none."""

    def __init__(self, source: TrainerSource, transport: Callable[[], Transport], export: Export | None = None) -> None:
        self._source = source
        self._open = transport
        self._export = export
        self._witnessed = ""
        self._lock = threading.Lock()
        self._transport: Transport | None = None
        self._schedule: Schedule | None = None
        self._bound: Bound | None = None  # the first of _waves
        self._waves: tuple[Bound, ...] = ()
        self._label = ""  # digest of the schedule that is bound
        self._stage: Any = None
        self._readback: Any = None
        self._storages: tuple[LiveStorage, ...] = ()
        self._probed: set[Endpoint] = set()
        self._session: str | None = None
        self._scanned: dict[int, str] = {}
        self._writing = False
        self._unfenced: str | None = None
        self._inputs: PlanInputs | None = None
        self._bound_by = ""
        self.rank = source.describe().rank
        self._gate = Gate(f"trainer rank {self.rank}")
        self._delta = DeltaSource(self.rank)

    def call(self, method: str, payload: Mapping[str, Any]) -> dict[str, Any]:
        """Dispatch one request. Raises SessionError for an unknown method or one that is illegal now."""
        handlers = {
            "describe": self._describe,
            "claim": lambda _: {},  # the gate has taken note
            "plan": self._plan,
            "extend": self._extend,
            "witness": self._witness,
            "bind": self._bind,
            "quiesce": self._quiesce,
            "scan": self._scan,
            "write": self._write,
            "encode": self._encode,
            "send": self._send,
            "keep": self._keep,
            "compare": self._compare,
            "release": self._release,
            "fence": self._fence,
        }
        if method not in handlers:
            raise SessionError(f"trainer rank {self.rank}: unknown method {method!r}; known: {', '.join(handlers)}")
        with self._lock:
            self._gate.check(method, payload)
            return handlers[method](payload)

    def _describe(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        known = {"session": self._session, "generation": self._gate.generation, "source": type(self._source).__name__}
        export = {"exports": self._export is not None, "witnessed": self._witnessed}
        return asdict(self._source.describe()) | known | export

    def _plan(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        self._inputs = PlanInputs.from_json(payload)
        self._schedule = self._inputs.schedule()
        return {"digest": self._schedule.digest}

    def _extend(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        if self._schedule is None or self._inputs is None or self._schedule.digest != payload["base"]:
            return {"digest": None}
        self._schedule = self._inputs.extend(self._schedule, payload["change"])
        self._inputs = self._inputs.changed(payload["change"])
        return {"digest": self._schedule.digest}

    def _witness(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        if self._export is None:
            raise BindError(f"trainer rank {self.rank}: {type(self._source).__name__} was given no export to be compared with")
        with ExitStack() as stack:

            def begin() -> Comparison:
                if self._session is None:  # else the parameters stand still already
                    self._source.quiesce()
                    stack.callback(self._source.release)
                if self._inputs is None or self._schedule is None or self._schedule.digest != payload["plan"]:
                    raise BindError(f"trainer rank {self.rank}: witness of plan {payload['plan']}, has computed another")
                memory = memory_of(self._source.tensors(), f"trainer rank {self.rank}")
                memory.settle()
                return Comparison(layout_of(self._inputs.source, "trainer"), self.rank, memory)

            compared = compare_export(begin, self._export, self.rank)
        self._witnessed = compared.declared.digest
        return {"elements": compared.elements}

    def _bind(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        schedule = self._schedule
        if schedule is None or schedule.digest != payload["plan"]:
            raise BindError(f"trainer rank {self.rank}: asked to bind plan {payload['plan']}, has computed another")
        targets = {int(rank): TargetBinding.from_json(data) for rank, data in payload["targets"].items()}
        self._bound, self._scanned = None, {}
        memory = memory_of(self._source.tensors(), f"trainer rank {self.rank}")
        self._check(memory, schedule)
        peers = {rank: Endpoint.from_json(binding.endpoint) for rank, binding in targets.items()}
        transport = self._registered(memory, source_staging(schedule).get(self.rank, 0), set(peers.values()))
        deadline = Deadline.after(float(payload["seconds"]))
        kind, report = str(payload.get("digest", XXH3)), bool(payload.get("report", True))
        waves = tuple(
            Bound(part, self.rank, memory, self._stage, targets, transport, kind, report, wave)
            for wave, part in enumerate(schedule.waves)
        )
        for rank in sorted(set(schedule.plan.target_rank[schedule.plan.rows_from(self.rank)].tolist())):
            self._probed.add(peers[rank])
            transport.probe(peers[rank], deadline)
        self._delta.bind(waves[0], DeltaSpec(**payload["delta"]) if payload.get("delta") else None, kind)
        self._bound, self._waves, self._label = waves[0], waves, schedule.digest
        self._bound_by = controller_of(str(payload.get("controller") or ""))
        return {"endpoint": transport.describe().to_json()}

    def _registered(self, memory: Memory, staging: int, peers: set[Endpoint]) -> Transport:
        """A transport on which the parameters and `staging` bytes of a buffer are registered: the old one if it fits.

        Not one that has spoken to a peer that is gone: it keeps what it knew of it, open sockets too, and Mooncake would take a
        newcomer on the same port (it draws from 2,000) for the one that left, for ever.
        """
        enough = not staging or (self._stage is not None and self._stage.storage.nbytes >= staging)
        fits = enough and self._storages == memory.storages and self._probed <= peers
        if self._transport is not None and not self._writing and fits:
            return self._transport
        self._close()
        self._stage = memory.staging(staging) if staging else None
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
        if self._session not in (None, payload["session"]):
            self._release({"session": self._session})  # of a sync whose controller did not come to it
        if self._session is None:  # a request that comes twice must not let the trainer step in between
            # First, whatever is wrong here: quiescing may be a collective of all ranks, and the others are in it.
            self._source.quiesce()
            self._session = payload["session"]
        if self._bound is None or self._label != payload["plan"]:
            raise BindError(
                f"trainer rank {self.rank}: has no binding of plan {payload['plan']}; was it restarted since? connect again"
            )
        if self._bound_by != controller_of(payload["session"]):
            raise BindError(
                f"trainer rank {self.rank}: its binding was made by controller {self._bound_by or 'none'}, not by that of "
                f"session {payload['session']}; connect again"
            )
        self._not_moved(self._bound)
        self._bound.memory.settle()
        return {}

    def _not_moved(self, bound: Bound) -> None:
        if changed := bound.memory.moved(self._source.tensors()):
            raise BindError(f"trainer rank {self.rank}: parameters moved since they were bound: {changed}; connect again")

    def _release(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        if self._session is None or self._session != payload["session"]:
            self._gate.end(payload["session"])  # its quiesce may still be on its way, and would hold the trainer for nobody
            return {}
        if self._writing:
            raise SessionError(
                f"trainer rank {self.rank}: a write failed and its transport is not closed"
                + (f" ({self._unfenced}); end this process" if self._unfenced else "; fence first")
                + ": its parameters may still be read, so it must not step"
            )
        self._source.release()
        self._gate.end(self._session)
        self._session = None
        return {}

    def _scan(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        wave, bound = self._wave(payload)
        if self._session != payload["session"] or bound is None:
            raise SessionError(f"trainer rank {self.rank}: scan for session {payload['session']}, which is not open here")
        if bound.quantiser is None:
            return {"session": payload["session"], "magnitudes": [], "spans": []}
        begin, wall = time.monotonic(), time.time()
        self._scanned.pop(wave, None)
        found = bound.quantiser.scan(bool(payload["finite"]))
        self._scanned[wave] = payload["session"]
        return {"session": payload["session"], "magnitudes": found, "spans": [self._span("quantise", begin, wall, 0)]}

    def _write(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        if self._session != payload["session"]:
            open_ = f"session {self._session} is open" if self._session else "nothing was quiesced: parameters may still change"
            raise SessionError(f"trainer rank {self.rank}: write for session {payload['session']}, but {open_}")
        (wave, bound), transport = self._wave(payload), self._transport
        if bound is None or transport is None:
            raise SessionError(f"trainer rank {self.rank}: write without a binding")
        deadline = Deadline.after(float(payload["seconds"]))
        round_ = int(payload["round"])
        spans: list[dict[str, Any]] = []
        begin, wall = time.monotonic(), time.time()
        tickets: list[Ticket] = []
        if round_ == 0 and bound.quantiser is not None:
            if payload.get("magnitudes") is None:
                raise SessionError(f"trainer rank {self.rank}: weights are quantised, but write came without magnitudes")
            if self._scanned.get(wave) != payload["session"]:  # this binding's: it knows magnitudes of an older step, or none
                raise SessionError(
                    f"trainer rank {self.rank}: write for session {payload['session']}, but weights were last looked at for "
                    f"{self._scanned.get(wave, 'none')}"
                )
            bound.quantiser.settle(payload["magnitudes"])
        self._writing = True  # until every byte is reported written; after an error, until the transport is closed
        if round_ == 0:
            bound.start_digests(bool(payload.get("digests", True)))
            for number, (rows, batch) in enumerate(bound.batches):
                # Digested while they are on the wire: both only read.
                tickets.append(transport.write(batch))
                bound.digest_batch(number, rows)
            bound.digest_staged()
        moved, flying = write_pieces(transport, bound, round_, deadline)
        tickets += flying
        writes = sum(len(flight.pieces) for flight in bound.flights[round_])
        # After the last byte was asked for here by address, while writes are still on their way: together with quiesce(),
        # which looked before the first, it says that what was digested and packed was the parameters. If not, the sync ends.
        self._not_moved(bound)
        last = round_ == bound.schedule.rounds - 1
        digests = bound.finished_digests() if last else None
        if round_ == 0:
            writes += sum(len(batch.nbytes) for _, batch in bound.batches)
        made = None
        if last and bound.quantiser is not None:  # while the last bytes are on the wire
            bound.quantiser.fetch()
            made = bound.quantiser.stats()
        for ticket in tickets:
            moved += transport.wait(ticket, deadline).nbytes
        self._writing = False
        if last and bound.quantiser is not None:
            bound.quantiser.check_outgrown()
        spans.append(self._span("write", begin, wall, moved))
        # Which request this answers goes with it: an old reply taken for a new one would prove old bytes.
        answers = {"session": payload["session"], "round": round_, "wave": wave}
        return answers | {"bytes": moved, "writes": writes, "spans": spans, "digests": digests, "made": made and made.to_json()}

    def _quiet(self, method: str, payload: Mapping[str, Any]) -> Bound:
        """The binding, for work on weights that stand still in this session."""
        if self._session != payload["session"] or self._bound is None or self._transport is None or self._writing:
            raise SessionError(f"trainer rank {self.rank}: {method} for session {payload['session']}, which is not open here")
        return self._bound

    def _encode(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        bound, begin, wall = self._quiet("encode", payload), time.monotonic(), time.time()
        if bound.quantiser is not None and self._scanned.get(0) != payload["session"]:
            raise SessionError(f"trainer rank {self.rank}: weights were not looked at for session {payload['session']}")
        reply = self._delta.encode(payload)
        self._not_moved(bound)  # what was compared and digested was the parameters
        return reply | {"session": payload["session"], "spans": [self._span("encode", begin, wall, 0)]}

    def _send(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        begin, wall = time.monotonic(), time.time()
        self._quiet("send", payload)
        assert self._transport is not None
        self._writing = True  # as in write
        moved, writes = self._delta.send(payload, self._transport)
        self._writing = False
        spans = [self._span("write", begin, wall, moved)]
        return {"session": payload["session"], "round": payload["round"], "bytes": moved, "writes": writes, "spans": spans}

    def _keep(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        bound, begin, wall = self._quiet("keep", payload), time.monotonic(), time.time()
        self._not_moved(bound)
        reply = self._delta.keep(payload)
        return reply | {"session": payload["session"], "spans": [self._span("keep", begin, wall, 0)]}

    def _compare(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        (_, bound), transport = self._wave(payload), self._transport
        if self._session != payload["session"] or bound is None or transport is None or self._writing:
            raise SessionError(f"trainer rank {self.rank}: compare for session {payload['session']} before it was written")
        self._not_moved(bound)
        if self._readback is None:
            self._readback = bound.memory.staging(BUFFER_BYTES)
            storage = self._readback.storage
            transport.register([Region(storage.address, storage.nbytes)])
        if bound.quantiser is not None:
            bound.quantiser.unchanged()
        plan = bound.schedule.plan
        self._writing = True  # after a read that failed, as after a write, the fence comes first
        try:
            nbytes, reads = compare(
                plan,
                bound.rows,
                transport,
                self._readback,
                endpoint=lambda rank: Endpoint.from_json(bound.targets[rank].endpoint),
                address=bound.target_address,
                sent=bound.sent,
                deadline=Deadline.after(float(payload["seconds"])),
            )
        except VerifyError:
            self._writing = False  # every read had come back whole
            raise
        self._writing = False
        return {"bytes": nbytes, "reads": reads}

    def _wave(self, payload: Mapping[str, Any]) -> tuple[int, Bound | None]:
        """Which wave a request is about, and what is bound for it."""
        wave = int(payload.get("wave", 0))
        return wave, self._waves[wave] if self._bound is not None and 0 <= wave < len(self._waves) else None

    def _span(self, phase: str, start: float, wall: float, nbytes: int) -> dict[str, Any]:
        end = time.monotonic()
        return {"rank": f"trainer {self.rank}", "phase": phase, "start": start, "end": end, "wall": wall, "nbytes": nbytes}

    def _fence(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        failed = self._writing
        self._close()
        return {"failed": failed}

    def _close(self) -> None:
        """Raises if the transport does not close, now and ever after: only the end of the process is a fence then."""
        self._not_unfenced()
        transport, self._transport, self._bound, self._probed = self._transport, None, None, set()
        self._waves = ()
        self._delta.drop("this rank's transport was closed since")
        if transport is not None:
            try:
                transport.close()
            except BaseException as error:
                self._unfenced = f"{type(error).__name__}: {error}"
                raise
        self._writing = False
        self._stage = self._readback = None  # only now: what is not closed may still read it
        self._delta.closed()

    def _not_unfenced(self) -> None:
        if self._unfenced is not None:
            raise SessionError(
                f"trainer rank {self.rank}: a transport did not close ({self._unfenced}), so it may still write to engines; "
                "end this process"
            )
