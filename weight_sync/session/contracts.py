"""The two sides as the session sees them.

Trainer side, in every trainer rank's process:

    TrainerSource.describe()    any time; parallel coordinates and live parameters. No data moves.
    TrainerSource.tensors()     the same parameters as live tensors, by the same names.
    TrainerSource.quiesce()     at the start of every sync: afterwards the parameters hold the finished optimiser step
                                and no step may start until release().
    TrainerSource.release()     when the sync is over, committed or not; after a failed write only once the rank's transport is
                                closed, for until then it may still be read from.

Rollout side, in the controller's process, one object for each engine:

    describe()                  any time; the model it serves, its parallel sizes, each worker's live parameters, and where it
                                stands (EngineState): what a controller that takes over needs to know.
    claim(controller)           before anything else a controller does: from here on a controller of a lower generation is
                                refused by every verb that has a session, and by resume(). See weight_sync.session.gate.
    pause(mode)                 generation stops; from here on only a receipt resumes it.
    bind(tables)                each worker checks its part of the plan against its live parameters, registers its memory
                                and says where it is. Nothing is paused yet.
    begin(session, version)     workers accept bytes for this session only; refused if the engine is not paused.
    place(round)                workers unpack one staging round (only where the plan has staged pieces).
    patch(base, messages)       workers apply encoded changes out of their staging buffers (delta sessions only).
    pull(session, peers)        instead of the trainer's writes: each worker reads the bytes of all its transfers from the same
                                worker of another engine, which goes on serving.
    verify()                    workers digest the live destination bytes of every transfer.
    feed(wave)                  only where HF tensors are put beside the weights (session/placing.py), after verify() of this
                                wave: workers hand it to the engine's own loader.
    check(step)                 snapshot, scramble, compare: what check_weight_equal asks of each worker.
    finish(session, version)    after the controller compared the digests: post-processing, caches, version. -> Receipt
    resume(receipt)             generation goes on. Nothing else resumes an engine.
    abort(reason)               the session is over without commit: workers close their transports, bindings are void, a paused
                                engine stays paused and says why. May come again, and before begin().

Everything that crosses a process border is plain data: numbers, strings, lists and dicts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from weight_sync.ids import Deadline
from weight_sync.transport.base import Endpoint

PauseMode = Literal["abort", "retract", "in_place", "wait", "keep"]
"""abort: drop running requests; retract: requeue them (KV freed); in_place: stop between steps, KV kept;
wait: let running requests end first; keep: vLLM's word for in_place. What an engine offers differs: ask describe()."""


CheckStep = Literal["snapshot", "scramble", "compare"]


@dataclass(frozen=True, slots=True)
class LiveParam:
    """One physical parameter (or weight buffer) of one process.

    shape: elements, as the process sees it. stride: elements. dtype: torch's name without prefix.
    storage: index into RankDescription.storages; offset: bytes from that storage's start to element 0.
    """

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    storage: int
    offset: int


@dataclass(frozen=True, slots=True)
class LiveStorage:
    """One allocation: address and size in bytes. This is what a transport registers."""

    address: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class RankDescription:
    """One trainer rank or one engine worker as it is right now.

    coords: its index on every parallel axis. epoch: changes when memory moves or the process is replaced; a binding made
    for another epoch is refused. endpoint is None where no transport has been opened yet.
    device: "cpu" or "cuda", where its parameters are.
    shards: only for sides whose layout is read from the live process (FSDP DTensors, recorded engines), as
    `Layout.rank_to_json` writes them; None where the layout is declared.
    """

    rank: int
    host: str
    coords: dict[str, int]
    epoch: int
    params: tuple[LiveParam, ...]
    storages: tuple[LiveStorage, ...]
    endpoint: Endpoint | None = None
    shards: list[dict[str, Any]] | None = None
    device: str = "cpu"


def describe_from_json(data: Mapping[str, Any]) -> RankDescription:
    """The RankDescription that `asdict` turned into plain data; other keys are ignored."""

    def param(p: Mapping[str, Any]) -> LiveParam:
        return LiveParam(p["name"], tuple(p["shape"]), tuple(p["stride"]), p["dtype"], p["storage"], p["offset"])

    return RankDescription(
        rank=data["rank"],
        host=data["host"],
        coords=dict(data["coords"]),
        epoch=data["epoch"],
        params=tuple(param(p) for p in data["params"]),
        storages=tuple(LiveStorage(s["address"], s["nbytes"]) for s in data["storages"]),
        endpoint=None if data.get("endpoint") is None else Endpoint.from_json(data["endpoint"]),
        shards=data.get("shards"),
        device=data.get("device", "cpu"),
    )


@dataclass(frozen=True, slots=True)
class Receipt:
    """Proof that an engine holds `version`: made by finish() only, after the controller saw equal digests."""

    engine: str
    session: str
    version: int
    digest: str


@dataclass(frozen=True, slots=True)
class EngineState:
    """Where an engine stands. A controller that was restarted reads this instead of a memory it no longer has.

    paused: generation stands. session: the one that is open, "" for none. receipt: of its last finish(), None once another
    session was begun or it was aborted. reason: why it was aborted or stands, "" if nobody said. generation: the highest of the
    controllers that claimed it, 0 for none.
    """

    paused: bool
    session: str = ""
    receipt: Receipt | None = None
    reason: str = ""
    generation: int = 0

    def text(self) -> str:
        """In words, for messages: also for an engine whose controller died before it could say why it is paused."""
        if self.session:
            where = f"session {self.session} was begun and not finished"
        elif self.receipt is not None:
            where = f"holds version {self.receipt.version}, verified in session {self.receipt.session}"
        else:
            where = "holds no receipt"
        why = f" ({self.reason})" if self.reason else ""
        return f"{'paused' if self.paused else 'serving'}, {where}{why}"


def engine_state(name: str, paused: bool, workers: Mapping[int, Mapping[str, Any]], generations: Iterable[int]) -> EngineState:
    """Where an engine stands, from what its workers keep (by rank): session, suspect, aborted, committed {session, version,
    digest} or None. A receipt counts only if all workers hold the same one and none has bytes that nobody vouches for.
    """
    held: list[dict[str, Any] | None] = [worker["committed"] for worker in workers.values() if not worker["suspect"]]
    first = held[0] if held and len(held) == len(workers) and all(other == held[0] for other in held) else None
    return EngineState(
        paused=paused,
        session=max((str(worker["session"] or "") for worker in workers.values()), default=""),
        receipt=None if first is None else Receipt(name, first["session"], first["version"], first["digest"]),
        reason="; ".join(sorted({worker["aborted"] for worker in workers.values()} - {"", None})),
        generation=max(generations, default=0),
    )


@dataclass(frozen=True, slots=True)
class EngineDescription:
    """One engine. model: the HF config it serves (as loaded from its config.json). sizes: parallel size by axis.

    pause_modes: what pause() accepts. version: the committed integer it last reported, -1 if it never got one. state: None
    from an adapter that cannot tell; recover() needs it. refusals: why it cannot be synced
    as it runs (experts that move, memory that cannot be registered, LoRA), each by the argument that causes it.
    not_writable: live tensors that no byte may be written into, "rank 0 NAME", each with the reason. no_loader: why its own
    loader cannot take the weights instead; "" where it can.
    """

    name: str
    kind: str
    model: dict[str, Any]
    sizes: dict[str, int]
    version: int
    pause_modes: tuple[PauseMode, ...]
    ranks: tuple[RankDescription, ...]
    software: dict[str, str] = field(default_factory=dict)
    refusals: tuple[str, ...] = ()
    state: EngineState | None = None
    not_writable: dict[str, str] = field(default_factory=dict[str, str])
    no_loader: str = "its adapter offers no loading through the engine"


class TrainerSource(Protocol):
    def describe(self) -> RankDescription: ...

    def tensors(self) -> Mapping[str, Any]: ...

    def quiesce(self) -> None: ...

    def release(self) -> None: ...


class TrainerGroup(Protocol):
    """All trainer ranks, as the controller reaches them: a method of SourceAgent on every rank at once."""

    world: int

    def call(self, method: str, payloads: Mapping[int, Mapping[str, Any]], deadline: Deadline) -> dict[int, dict[str, Any]]:
        """Run `method` with payloads[rank] on each rank given; replies by rank.

        Returns when all have answered. If any failed, raises the first rank's error with the others as notes.
        """
        ...


class RolloutEngine(Protocol):
    name: str

    def describe(self, deadline: Deadline) -> EngineDescription: ...

    def claim(self, controller: str, deadline: Deadline) -> None:
        """TargetAgent's claim on each worker rank. Raises SessionError if a controller of a higher generation holds one."""
        ...

    def record(self, tensors: Mapping[str, tuple[list[int], str]], deadline: Deadline) -> dict[int, dict[str, Any]]:
        """The second witness: what the engine's own loader does with HF tensors of these shapes and dtypes.

        For each worker rank: {"shards": as Layout.rank_to_json, "unexplained": {HF name: operation}, "constants": regions of
        parameters set to one value ({"param", "start", "shape", "strides"}), "rewritten": {parameter: elements written again}}.
        No live byte changes.
        """
        ...

    def bind(self, tables: Mapping[int, Mapping[str, Any]], deadline: Deadline) -> dict[int, dict[str, Any]]:
        """TargetAgent's bind on each worker rank; replies by rank."""
        ...

    def pause(self, mode: PauseMode, deadline: Deadline) -> None: ...

    def begin(self, session: str, version: int, plan: str, epochs: Mapping[int, int], deadline: Deadline) -> None: ...

    def place(self, session: str, round: int, deadline: Deadline) -> None: ...

    def patch(
        self, session: str, base: Mapping[str, Any], messages: Mapping[int, Sequence[Sequence[int]]], deadline: Deadline
    ) -> dict[int, dict[str, Any]]:
        """TargetAgent's patch on each worker rank: {"session", "base", "messages": messages[rank]} -> {"words", "seconds"}."""
        ...

    def pull(self, session: str, peers: Mapping[int, Mapping[str, Any]], deadline: Deadline) -> dict[int, dict[str, Any]]:
        """TargetAgent's pull on each worker rank: {"session", "peer": peers[rank], "seconds"} -> {"bytes", "reads"}.

        peers: for each worker rank, what the bind() of another engine's same worker answered.
        """
        ...

    def verify(self, session: str, deadline: Deadline, digests: bool = True, wave: int = 0) -> dict[int, str]:
        """For each worker rank the digests of its transfers, in the order given to bind(): 16 hex digits each, one after
        another (there may be a hundred thousand); empty without `digests`. wave: of which part, where a plan has waves."""
        ...

    def feed(self, session: str, wave: int, deadline: Deadline) -> None:
        """TargetAgent's feed on each worker rank. Raises RolloutError where the engine's loader fails, VerifyError where it has
        not used what it was given."""
        ...

    def check(self, session: str, step: CheckStep, deadline: Deadline) -> dict[int, dict[str, Any]]:
        """TargetAgent's snapshot, scramble or compare on each worker; replies by rank. VerifyError where bytes differ."""
        ...

    def finish(self, session: str, version: int, digest: str, deadline: Deadline) -> Receipt: ...

    def resume(self, receipt: Receipt, deadline: Deadline) -> None: ...

    def abort(self, session: str, reason: str, deadline: Deadline) -> None: ...


class SyncObserver(Protocol):
    """Who watches one sync. Called by the session on the controller's thread."""

    def phase(self, name: Any) -> AbstractContextManager[Any]:
        """Entered for each phase: plan, pause, write, verify, commit, resume."""
        ...

    def add_spans(self, rank: str, spans: Iterable[Mapping[str, Any]]) -> None:
        """What a rank measured itself: {"rank", "phase", "start", "end" (its monotonic seconds), "wall", "nbytes"}."""
        ...

    def count(
        self, *, bytes: int | None = None, gathered_bytes: int = 0, writes: int = 0, transfers: int = 0, retries: int = 0
    ) -> None:
        """What was really done, once it was."""
        ...

    def figures(self, values: Mapping[str, float]) -> None:
        """More numbers of this sync, by name; reported as weight_sync/<name>."""
        ...

    def say(self, text: str) -> None:
        """Something a person should read now: an attempt that failed and is made again, a replica that is left out."""
        ...

    def mark_verified(self) -> None: ...

    def mark_committed(self) -> None: ...


class Observer(Protocol):
    """Who watches all syncs. sync() is entered before anything happens and sees the exception of a sync that fails."""

    def sync(self, version: int, session: str, *, nbytes: int | None = None) -> AbstractContextManager[SyncObserver]: ...
