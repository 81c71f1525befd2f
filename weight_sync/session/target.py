"""TargetAgent: the engine's side of a sync, inside each engine worker's process. Engine neutral.

Adapters reach it by call(method, payload) -> reply, plain data both ways:

    describe  {}                                  -> RankDescription as a dict; no params between the first and the last wave
                                                     of a load by the engine's own loader (feed)
    claim     {"controller"}                      -> {}; no older controller may call from now on, see gate.py
    admit     {"session"}                         -> {}; raises if an older controller's: adapters ask before they resume
    bind      target_table(...), "controller"     -> {"addresses", "stage", "endpoint", "epoch", "params"}; the live parameters
                                                     must be those planned, {name: [shape, dtype]}
    begin     {"session", "version", "epoch", "plan"} -> {}; refused when memory moved since bind
    place     {"session", "round"}                -> {}; unpack one staging round
    patch     {"session", "base", "messages"}     -> {"words", "seconds"}; apply encoded changes that were written into the
                                                     staging buffer, [source rank, byte, bytes] each, to the base that was
                                                     last finished here. DeltaError for anything else; see delta_target.py
    pull      {"session", "peer", "seconds"}      -> {"bytes", "reads", "seconds"}; read all parameters from another worker's
                                                     live memory. peer: what that worker answered to bind
    verify    {"session", "digests": bool}        -> {"digests": hex digits} of the live destination bytes of every transfer,
                                                     [] where none are wanted. Refused where memory moved, and where a byte
                                                     that no transfer writes has changed since begin (only with digests)
    feed      {"session", "wave"}                 -> {"tensors"}; where HF tensors are put beside the weights (placing.py): hand
                                                     a wave, which verify has looked at, to the engine's own loader. Returns
                                                     when it has read them; refused where verify's digests are no longer theirs
    snapshot  {"session"}                         -> {"bytes"}; copy all live parameters
    scramble  {"session"}                         -> {"bytes"}; invert every byte the plan writes; needs a snapshot
    compare   {"session"}                         -> {"bytes"}; VerifyError unless every live byte equals the snapshot's
    end       {"session"}                         -> {}; refused after a pull that failed and between scramble and compare
    abort     {"session", "reason"}               -> {}; closes the transport: nothing more can land, the binding is void.
                                                     If it does not close, this and every later bind raises

The agent moves no version and resumes nothing; that is the engine adapter's business after the controller's commit.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from weight_sync.errors import BindError, SessionError, VerifyError, listed
from weight_sync.ids import Deadline
from weight_sync.session.contracts import RankDescription
from weight_sync.session.delta_target import DeltaTarget
from weight_sync.session.digests import XXH3, Digests
from weight_sync.session.gate import Gate
from weight_sync.session.memory import Memory, memory_of
from weight_sync.session.placing import Loader, Placing
from weight_sync.session.pull import pull
from weight_sync.session.snapshot import Snapshot, Untouched, scramble
from weight_sync.transport.base import Region, Transport


class TargetAgent:
    """See the module docstring.

    tensors: returns the live parameters and weight buffers, by the engine's names, each memory once. transport: opens a
    transport. Both are called again whenever a binding is made, so memory that moved is seen. loader: makes the engine's own
    loader, where the adapter has one that can load again.
    """

    def __init__(
        self,
        *,
        rank: int,
        host: str,
        coords: Mapping[str, int],
        tensors: Callable[[], Mapping[str, Any]],
        transport: Callable[[], Transport],
        loader: Callable[[], Loader] | None = None,
    ) -> None:
        self.rank = rank
        self.host = host
        self.coords = dict(coords)
        self._tensors = tensors
        self._open = transport
        self._loader = loader
        self._placing: Placing | None = None
        self._lock = threading.Lock()
        self._transport: Transport | None = None
        self._memory: Memory | None = None
        self._stage: Any = None
        self._table: dict[str, Any] | None = None
        self._session: str | None = None
        self._opened = -1
        self._held: tuple[str, int] | None = None
        self._reason: str | None = None
        self._generation = 0
        self._gate = Gate(f"rollout rank {rank}")
        self._unfenced: str | None = None
        self._untouched: Untouched | None = None
        self._delta: DeltaTarget | None = None
        self._before: dict[str, str] = {}
        self._told = ""
        self._snapshot: Snapshot | None = None
        self._filling = False
        self._scrambled = False

    def call(self, method: str, payload: Mapping[str, Any]) -> dict[str, Any]:
        """Dispatch one request. Raises SessionError for an unknown method or one that is illegal now, BindError otherwise."""
        handlers = {
            "describe": self._describe,
            "claim": lambda _: {},  # the gate has taken note
            "admit": lambda _: {},
            "bind": self._bind,
            "begin": self._begin,
            "place": self._place,
            "patch": self._patch,
            "pull": self._pull,
            "verify": self._verify,
            "feed": self._feed,
            "snapshot": self._take_snapshot,
            "scramble": self._scramble,
            "compare": self._compare,
            "end": self._end,
            "abort": self._abort,
        }
        if method not in handlers:
            raise SessionError(f"rollout rank {self.rank}: unknown method {method!r}; known: {', '.join(handlers)}")
        with self._lock:
            self._gate.check(method, payload)
            return handlers[method](payload)

    def _describe(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        # Where a rank stands can always be asked: also while its own loader has the weights, which may lie nowhere then.
        loading = self._placing is not None and self._placing.loading
        memory = memory_of(self._written() if loading else self._tensors(), f"rollout rank {self.rank}")
        # A transport whose read failed describes itself no more.
        endpoint = None if self._transport is None or self._filling else self._transport.describe()
        description = RankDescription(
            rank=self.rank,
            host=self.host,
            coords=self.coords,
            epoch=self._epoch(memory),
            params=() if loading else memory.params,
            storages=() if loading else memory.storages,
            endpoint=endpoint,
            device=memory.device,
        )
        return asdict(description) | {
            "session": self._session, "aborted": self._reason, "generation": self._gate.generation,
        }  # fmt: skip

    def _epoch(self, memory: Memory) -> int:
        # A new transport is a new epoch too: what was bound to the old one must not be written to again.
        return (memory.epoch + self._generation) & (2**48 - 1)

    def _bind(self, table: Mapping[str, Any]) -> dict[str, Any]:
        if self._session is not None:
            raise SessionError(f"rollout rank {self.rank}: bind during session {self._session}; abort it first")
        table = {key: value for key, value in table.items() if key != "controller"}
        # The whole table, not only its plan: two engines of one plan have other transfers, in another order. A plan that was
        # extended for other engines leaves all but its name as it was, and nothing is closed or registered anew.
        if self._memory is not None and self._same(table) and self._memory.moved(self._written()) is None:
            self._table = table
            return self._binding()
        self._close()
        self._placing = self._beside(table) if table.get("loader") else None
        memory = memory_of(self._written(), f"rollout rank {self.rank}")
        self._check(memory, table["expected"])
        memory.digests(_kind(table))  # raises now, before anything is paused, if this memory has no such digest
        stage = memory.staging(int(table["stage_bytes"])) if table["stage_bytes"] else None
        storages = [*memory.storages, *([stage.storage] if stage else [])]
        self._transport = self._open()
        self._generation += 1
        try:
            self._transport.register([Region(s.address, s.nbytes) for s in storages])
            untouched = Untouched(memory, table)
            delta = DeltaTarget(memory, table) if table.get("deltas") else None
        except BaseException:
            self._close()
            raise
        self._memory, self._stage, self._table = memory, stage, dict(table)
        self._untouched, self._delta = untouched, delta
        return self._binding()

    def _beside(self, table: Mapping[str, Any]) -> Placing:
        if self._loader is None:
            raise BindError(f"rollout rank {self.rank}: this engine offers no loader of its own to a sync")
        return Placing(self._loader(), table, f"rollout rank {self.rank}")

    def _written(self) -> Mapping[str, Any]:
        """What transfers end in: live parameters, or HF tensors beside them."""
        return self._tensors() if self._placing is None else self._placing.tensors

    def _same(self, table: Mapping[str, Any]) -> bool:
        named = ("plan", "rank")
        return self._table is not None and {**self._table, **dict.fromkeys(named)} == {**table, **dict.fromkeys(named)}

    def _binding(self) -> dict[str, Any]:
        assert self._transport is not None
        assert self._memory is not None
        assert self._table is not None
        return {
            "addresses": {name: self._memory.address(name) for name in dict.fromkeys(self._table["params"])},
            "stage": self._stage.storage.address if self._stage else 0,
            "endpoint": self._transport.describe().to_json(),
            "epoch": self._epoch(self._memory),
            "params": self._table["expected"],
        }

    def _check(self, memory: Memory, expected: Mapping[str, Any]) -> None:
        """The live parameters must be exactly those of the plan: no name missing or extra, every shape and dtype equal."""
        live = {p.name: [list(p.shape), p.dtype] for p in memory.params}
        problems = [f"{name}: planned {planned}, live {live.get(name, 'absent')}" for name, planned in expected.items()
                    if live.get(name) != planned]  # fmt: skip
        problems += [f"{name}: live {live[name]}, not planned" for name in live if name not in expected]
        if problems:
            raise BindError(f"rollout rank {self.rank}: the declared layout is not the live one: {listed(problems)}")

    def _begin(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        if self._session is not None:
            raise SessionError(f"rollout rank {self.rank}: session {self._session} is still open")
        if self._memory is None or self._table is None or self._table["plan"] != payload["plan"]:
            raise BindError(f"rollout rank {self.rank}: no binding for plan {payload['plan']}; bind first")
        self._not_moved(self._memory)
        if self._epoch(self._memory) != payload["epoch"]:
            raise BindError(
                f"rollout rank {self.rank}: the binding of epoch {payload['epoch']} was replaced by one of epoch "
                f"{self._epoch(self._memory)}; bind again"
            )
        assert self._untouched is not None
        self._before = self._untouched.digests()
        self._snapshot, self._scrambled, self._told = None, False, ""
        if self._placing is not None:
            self._placing.begin()
        self._session, self._reason, self._opened = payload["session"], None, int(payload["version"])
        return {}

    def _not_moved(self, memory: Memory) -> None:
        if changed := memory.moved(self._written()):
            raise BindError(f"rollout rank {self.rank}: memory moved since it was bound: {changed}; bind again")

    def _in_session(self, payload: Mapping[str, Any]) -> tuple[Memory, dict[str, Any]]:
        """The binding, for work on the weights; also refused after a pull that failed, which may still be filling them."""
        if self._session is None or self._session != payload["session"] or self._memory is None or self._table is None:
            raise SessionError(
                f"rollout rank {self.rank}: session {payload['session']} is not open here (open: {self._session}"
                + (f"; the last one was aborted: {self._reason})" if self._reason else ")")
            )
        if self._filling:
            raise SessionError(
                f"rollout rank {self.rank}: a pull failed and may still be writing to the weights; abort {self._session}"
            )
        return self._memory, self._table

    def _place(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        memory, table = self._in_session(payload)
        for i, at, shape, offset in table["rounds"][payload["round"]]:
            assert self._stage is not None
            strides = table["strides"][i]
            start = table["start"][i] + sum(a * s for a, s in zip(at, strides, strict=True))
            view = memory.view(table["params"][i], start, strides, shape)
            view[...] = self._stage.region(offset, view, shape)
        memory.settle()
        return {}

    def _patch(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        memory, table = self._in_session(payload)  # whose memory lies where it lay at begin; verify() looks again
        if self._delta is None:
            raise SessionError(f"rollout rank {self.rank}: patch, but it was bound without deltas")
        return self._delta.patch(table, self._stage, self._held, self._epoch(memory), payload)

    def _pull(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        memory, table = self._in_session(payload)
        assert self._transport is not None
        assert self._untouched is not None
        self._not_moved(memory)
        self._filling = True  # until all of it has come; after an error, until the transport is closed
        try:
            deadline = Deadline.after(float(payload["seconds"]))
            reply = pull(memory, self._untouched, table["expected"], payload["peer"], self._transport, deadline)
        except BindError:
            self._filling = False  # the layouts differ: nothing was asked for
            raise
        self._filling = False
        return reply

    def _feed(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        memory, table = self._in_session(payload)
        self._not_moved(memory)
        if self._placing is None:
            raise SessionError(f"rollout rank {self.rank}: feed, but bytes go into live parameters here")
        memory.settle()
        wave = int(payload["wave"])
        reply = self._placing.feed(wave)
        memory.settle()  # a GPU may still be at it, and the next wave is written where this one lies
        rows = self._rows(table, wave)
        if self._told and self._digested(memory, table, rows, wave).text(rows) != self._told:
            raise VerifyError(
                f"rollout rank {self.rank}: bytes of wave {wave} have changed while the engine's own loader read them: it may "
                "have taken others than were verified"
            )
        return reply

    def _rows(self, table: Mapping[str, Any], wave: int) -> Sequence[int]:
        """The transfers of a wave; all of them where there are no waves."""
        if self._placing is None:
            return range(len(table["params"]))
        places = table["loader"]["places"]
        return [i for i, name in enumerate(table["params"]) if places[name][0] == wave]

    def _digested(self, memory: Memory, table: Mapping[str, Any], rows: Sequence[int], wave: int) -> Digests:
        """Of the live destination bytes."""
        columns = (table["params"], table["start"], table["strides"], table["shape"])
        digests = memory.digests(_kind(table))
        # Where digests look is kept by this name: waves lie in the same memory, in other places.
        digests.whole(("transfers", wave), rows, lambda: [memory.view(*(column[i] for column in columns)) for i in rows])
        return digests

    def _take_snapshot(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        memory, _ = self._in_session(payload)
        if self._placing is not None:
            return self._placing.check("snapshot")
        if self._snapshot is not None:  # a request that came twice: what was written would be compared with itself
            raise SessionError(f"rollout rank {self.rank}: session {self._session} has a snapshot already")
        self._snapshot = Snapshot(memory)
        return {"bytes": self._snapshot.nbytes}

    def _scramble(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        memory, table = self._in_session(payload)
        if self._placing is not None:
            return self._placing.check("scramble")
        self._scrambled = self._snapshot is not None
        return {"bytes": scramble(memory, table, self._snapshot)}

    def _compare(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        memory, table = self._in_session(payload)
        self._not_moved(memory)
        if self._placing is not None:
            return self._placing.check("compare")
        if self._snapshot is None:
            raise SessionError(f"rollout rank {self.rank}: compare without a snapshot")
        reply = {"bytes": self._snapshot.compare(table)}
        self._snapshot, self._scrambled = None, False
        return reply

    def _verify(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        memory, table = self._in_session(payload)
        self._not_moved(memory)  # or we would digest what the engine no longer serves from
        wave, self._told = int(payload.get("wave", 0)), ""
        if self._placing is not None:
            self._placing.verified(wave)
        if not payload.get("digests", True):
            return {"digests": ""}
        assert self._untouched is not None
        rows = self._rows(table, wave)
        digests = self._digested(memory, table, rows, wave)  # a GPU goes on with it
        after = self._untouched.digests()
        if changed := [name for name, value in self._before.items() if after[name] != value]:
            raise VerifyError(f"rollout rank {self.rank}: bytes that no transfer writes have changed: {listed(changed)}")
        self._told = digests.text(rows)
        return {"digests": self._told}

    def _end(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        memory, _ = self._in_session(payload)
        self._not_moved(memory)  # or what was verified is not what the engine is about to serve from
        if self._placing is not None:
            self._placing.end()
        if self._scrambled:
            raise SessionError(
                f"rollout rank {self.rank}: session {self._session} cannot end: weights were scrambled and not compared since"
            )
        self._gate.end(str(self._session))
        self._held = str(self._session), self._opened
        self._session = self._snapshot = None
        return {}

    def _abort(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        self._gate.end(str(payload.get("session") or ""))
        self._session, self._reason, self._held = None, str(payload["reason"]), None
        self._close()
        return {}

    def _close(self) -> None:
        """Raises if the transport does not close, now and ever after: what it still lets in could land in a later sync."""
        if self._unfenced is not None:
            raise SessionError(
                f"rollout rank {self.rank}: a transport did not close ({self._unfenced}), so its peers may still write here; "
                "end this process"
            )
        transport, self._transport, self._table = self._transport, None, None
        if transport is not None:
            self._generation += 1
            try:
                transport.close()
            except BaseException as error:
                self._unfenced = f"{type(error).__name__}: {error}"
                raise
        self._memory = self._stage = self._untouched = self._delta = self._snapshot = None
        placing, self._placing = self._placing, None
        if placing is not None:
            placing.loader.abandon()
        self._filling = self._scrambled = False


def _kind(table: Mapping[str, Any]) -> str:
    """The digest that both sides compute; see weight_sync.session.digests."""
    return str(table.get("digest", XXH3))
