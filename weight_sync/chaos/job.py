"""One job in the drill: trainer ranks, engines, a controller; and what must hold whatever happened to them.

What must hold, checked when a version moves, when an engine is resumed and after every sync:

- an engine that serves computes with exactly the bytes of the version it claims: live parameters, padding, guard bytes and all
  that was derived (what it loaded from disk, for one that claims none);
- a version moves only when every engine holds it, and an engine is resumed only with a version that has moved;
- a sync that raised has moved no version, unless every engine holds it;
- a trainer rank that is released has no transport that may still read its parameters;
- a sync ends within its deadlines.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from weight_sync.chaos.case import Case, Values, few_new_values, new_values, trainer_params, trainer_shapes
from weight_sync.chaos.clock import Clock
from weight_sync.chaos.engine import DrillEngine, Worker
from weight_sync.chaos.network import ControllerKilled, Network, Sender
from weight_sync.chaos.trainer import Block, DrillSource, DrillTransport, Trainer
from weight_sync.ids import Deadline
from weight_sync.session.calls import together
from weight_sync.session.failure import FailurePolicy
from weight_sync.session.inputs import dims_of
from weight_sync.session.session import Timeouts, WeightSync
from weight_sync.session.verify import Level
from weight_sync.transport.faults import Fault, FaultKind
from weight_sync.transport.memory import MemoryHub

TIMEOUTS = Timeouts(connect=20.0, sync=20.0, abort=5.0)
LIMIT = TIMEOUTS.connect + TIMEOUTS.sync + 3 * TIMEOUTS.abort + 5.0
"""Virtual seconds that one attempt may take with everything that goes before and after it."""


class WireFaults:
    """A FaultPlan of one transport: what is armed for its place strikes the n-th range that is moved from then on."""

    def __init__(self, armed: list[tuple[int, FaultKind, float]], network: Network, place: str) -> None:
        self._armed, self._network, self._place = armed, network, place
        self._known: dict[int, Fault | None] = {}

    def fault(self, index: int) -> Fault | None:
        if index not in self._known:
            self._known[index] = None
            if self._armed:
                left, kind, seconds = self._armed.pop(0)
                if left:
                    self._armed.insert(0, (left - 1, kind, seconds))
                else:
                    self._known[index] = Fault(kind, seconds=seconds)
                    self._network.fired[f"write {kind}"] += 1
                    self._network.say(f"** write {kind} at {self._place}, its write {index}")
        return self._known[index]


class Trainers:
    """A TrainerGroup as one controller reaches it."""

    def __init__(self, job: Job, sender: Sender) -> None:
        self._job, self._sender = job, sender
        self.world = len(job.trainers)

    def call(self, method: str, payloads: Mapping[int, Mapping[str, Any]], deadline: Deadline) -> dict[int, dict[str, Any]]:
        def one(rank: int, payload: Mapping[str, Any]) -> Any:
            trainer = self._job.trainers[rank]
            run = lambda: self._job.to_trainer(rank, method, payload)  # noqa: E731
            return self._job.network.message(self._sender, trainer.place, method, run, deadline, lambda: trainer.process)

        everyone = lambda: together({r: (lambda r=r, p=p: one(r, p)) for r, p in payloads.items()}, deadline)  # noqa: E731
        return self._job.network.message(self._sender, "trainers", method, everyone, deadline)


class Engine:
    """A RolloutEngine as one controller reaches it: every verb is a message to the server."""

    def __init__(self, job: Job, sender: Sender, server: DrillEngine) -> None:
        self.name = server.name
        self._job, self._sender, self._server = job, sender, server

    def __getattr__(self, verb: str) -> Any:
        server = self._server
        if not callable(getattr(server, verb)):
            return getattr(server, verb)

        def call(*args: Any, **named: Any) -> Any:
            deadline = named.get("deadline") or next(a for a in reversed(args) if isinstance(a, Deadline))
            run = lambda: server.process.run(lambda: getattr(server, verb)(*args, **named))  # noqa: E731
            return self._job.network.message(self._sender, f"engine {self.name}", verb, run, deadline, lambda: server.process)

        return call


@dataclass(slots=True)
class Controller:
    sender: Sender
    sync: WeightSync
    version: int = -1
    """The last version that was seen to be committed by it."""


@dataclass
class Job:
    """See the module docstring.

    eager: trainer ranks take their next step the moment they are released. landing: bytes land in any order, from the moment
    they are written. failure, level: how syncs are tried again and verified. deltas: steps change little, and syncs send only
    that; sent: how many did.
    """

    case: Case
    seed: int
    eager: bool = False
    landing: bool = False
    failure: FailurePolicy = field(default_factory=FailurePolicy)
    level: Level = Level.DIGEST
    deltas: bool = False
    sent: int = 0
    story: list[str] | None = None
    wrong: list[str] = field(default_factory=list)
    hung: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.clock = Clock()
        self.order = random.Random(f"{self.seed} order")
        self.network = Network(self.clock, self.story)
        self.hub = MemoryHub()
        self.wire: dict[str, list[tuple[int, FaultKind, float]]] = {}
        self._draw = np.random.default_rng(self.seed)
        self._noise = np.random.default_rng(0)
        self._values: list[Values] = []
        self._opened = 0
        self._old: list[Block] = []
        declared = self.case.spec().trainer
        assert declared is not None
        dims = dims_of(declared, "trainer")
        self.step_now = self.attempted = 0
        self.steps_of: dict[str, set[int]] = {}
        self.sessions: dict[int, str] = {}
        self.trainers: list[Trainer] = []
        for rank in range(self.case.ranks):
            coords = dims.coords(rank)
            block = Block(trainer_shapes(self.case.tp), self._noise)
            source = DrillSource(rank, coords, block, lambda step, tp=coords["tp"], r=rank: self._params(step, tp, r))
            source.on_release = lambda s=source: self._released(s)  # type: ignore[misc]
            source.latest = lambda: self.step_now
            source.may_step = lambda r=rank: self._may_step(self.trainers[r])  # type: ignore[misc]
            self.trainers.append(
                Trainer(source, lambda r=rank: self._open(f"trainer {r}"), self._moved)  # type: ignore[misc]
            )
            block.fill(trainer_params(self.values(0), self.case.tp, coords["tp"], block.blank))
            source.block.fill(trainer_params(self.values(0), self.case.tp, coords["tp"], block.blank))
        self.engines = [
            DrillEngine(i, self.case, self.network, self._noise, lambda r: self._open(f"worker {r}"), self.values(0))
            for i in range(self.case.engines)
        ]
        for engine in self.engines:
            engine.on_finish, engine.on_resume = self._on_finish, self._on_resume
        self.versions = 0
        self.in_service = [engine.name for engine in self.engines]
        self.controllers: list[Controller] = []
        self.new_controller()

    # -- parts -----------------------------------------------------------------------------------------------------

    def values(self, step: int) -> Values:
        while len(self._values) <= step:
            few = self.deltas and self._values
            self._values.append(few_new_values(self._draw, self._values[-1]) if few else new_values(self._draw))
        return self._values[step]

    def _params(self, step: int, tp_rank: int, rank: int) -> Values:
        return trainer_params(self.values(step), self.case.tp, tp_rank, self.trainers[rank].source.block.blank)

    def _open(self, place: str) -> DrillTransport:
        self._opened += 1
        faults = WireFaults(self.wire.setdefault(place, []), self.network, place)
        landing = self.seed + self._opened if self.landing else None
        return DrillTransport(self.hub, self.network, place, landing_seed=landing, faults=faults)

    def _moved(self, block: Block) -> Block:
        self._old.append(block)  # kept, so that the new one cannot get its address
        return block.moved(self._noise)

    @property
    def controller(self) -> Controller:
        return self.controllers[-1]

    def engine(self, name: str) -> DrillEngine:
        return next(engine for engine in self.engines if engine.name == name)

    def members(self, controller: Controller) -> list[DrillEngine]:
        """Those that take part in its syncs."""
        return [self.engine(replica.name) for replica in controller.sync.replicas if not replica.out]

    @property
    def workers(self) -> list[Worker]:
        return [worker for engine in self.engines for worker in engine.workers]

    def engine_of(self, worker: Worker) -> DrillEngine:
        return next(engine for engine in self.engines if worker in engine.workers)

    def new_controller(self) -> Controller:
        """Over the engines that are in service."""
        sender = Sender(f"controller {len(self.controllers)}")
        engines: list[Any] = [Engine(self, sender, self.engine(name)) for name in self.in_service]
        sync = WeightSync(
            Trainers(self, sender), engines, self.case.spec(len(engines), self.deltas), timeouts=TIMEOUTS, failure=self.failure,
            level=self.level,
        )  # fmt: skip
        self.controllers.append(Controller(sender, sync))
        return self.controller

    def to_trainer(self, rank: int, method: str, payload: Mapping[str, Any]) -> dict[str, Any]:
        trainer = self.trainers[rank]
        reply = trainer.call(method, payload)
        if method == "quiesce":
            self.steps_of.setdefault(payload["session"], set()).add(trainer.source.step)
        return reply

    # -- the training loop -----------------------------------------------------------------------------------------

    def _released(self, source: DrillSource) -> int:
        if self.eager and source.step == self.step_now:
            self.step_now += 1
        return self.step_now if self.eager else source.step

    def _may_step(self, trainer: Trainer) -> None:
        if any(transport.reading for transport in trainer.transports):
            self.lie(f"{trainer.place} may step, but a transport of it may still read its parameters")

    def step(self) -> None:
        """An optimiser step of every rank that is not held by a sync; a held one takes it when it may."""
        if self.step_now == self.attempted:
            self.step_now += 1
        for trainer in self.trainers:
            if not trainer.source.quiet:
                trainer.source.take(self.step_now)
        self.attempted = self.step_now

    def attempt(self, controller: Controller) -> bool:
        """One sync, to a version above all that there were. Whether it was committed."""
        self.versions += 1
        version = self.versions

        def sync() -> None:
            outcome = controller.sync.sync(version)
            self.sent += outcome.delta is not None and outcome.delta.used

        done = self.ask(controller, f"sync({version})", sync)
        if done and controller.version != version:
            self.lie(f"the sync to version {version} returned, but version {controller.version} is committed")
        return done

    def ask(self, controller: Controller, what: str, call: Callable[[], Any]) -> bool:
        """Have a controller do something. Whether it did; what must hold is checked either way."""
        begun, limit = self.clock.monotonic() - self.clock.jumped, LIMIT * self.failure.attempts
        who = controller.sender.name
        self.network.say(f"{who}: {what}")
        try:
            call()
        except ControllerKilled:
            self.network.say(f"{who} is dead")
            return False
        except Exception as error:  # noqa: BLE001 - what a drill provokes; judged below
            done = False
            self.network.say(f"{who}: {type(error).__name__}: {error}")
            for note in getattr(error, "__notes__", []):
                self.network.say(f"    {note}")
        else:
            done = True
            self.network.say(f"{who}: {what} is done")
        if (took := self.clock.monotonic() - self.clock.jumped - begun) > limit:
            self.hang(f"{what} took {took:.0f} s, its deadlines allow {limit:.0f} s")
        self.watch(controller)
        self.check()
        return done

    # -- what must hold --------------------------------------------------------------------------------------------

    def lie(self, text: str) -> None:
        self.network.say(f"!! {text}")
        self.wrong.append(text)

    def hang(self, text: str) -> None:
        self.network.say(f"!! {text}")
        self.hung.append(text)

    def watch(self, controller: Controller) -> None:
        """Has its version moved? Then every engine must hold it."""
        version = controller.sync.version
        if version == controller.version:
            return
        controller.version = version
        for engine in self.members(controller):
            if version in engine.had:
                continue  # it did hold it; what became of it since is its own affair
            self.lie(f"version {version} is committed, but engine {engine.name} never held it")

    def _on_finish(self, engine: DrillEngine) -> None:
        assert engine.finished is not None
        if engine.finished.session in self.steps_of:
            self.sessions[engine.version] = engine.finished.session
        if self._faults(engine) is None:
            engine.had.add(engine.version)

    def _on_resume(self, engine: DrillEngine) -> None:
        for controller in self.controllers:
            self.watch(controller)
        # A controller that takes over may finish what all engines hold, verified, though nobody lived to commit it.
        everywhere = all(engine.version in self.engine(name).had for name in self.in_service)
        if not everywhere and engine.version not in {controller.version for controller in self.controllers}:
            self.lie(f"engine {engine.name} is resumed with version {engine.version}, which nobody has committed")
        self.check()

    def _faults(self, engine: DrillEngine) -> str | None:
        """How what this engine computes with differs from what it claims."""
        if engine.finished is None:
            values = engine.on_disk
        else:
            # What is pulled from another engine is a version that was committed in another session.
            receipt = engine.finished
            steps = self.steps_of.get(receipt.session) or self.steps_of.get(self.sessions.get(receipt.version, ""), set())
            if len(steps) != 1:
                return f"version {receipt.version} was made of the trainer's steps {sorted(steps)}"
            values = self.values(next(iter(steps)))
        return next((text for worker in engine.workers if (text := worker.wrong(values))), None)

    def check(self) -> None:
        """Every engine that serves."""
        for engine in self.engines:
            if engine.serving and (text := self._faults(engine)):
                self.lie(f"engine {engine.name} serves version {engine.version} with other bytes: {text}")

    # -- what can happen -------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """What is on the wire arrives."""
        self.hub.settle()
        self.check()

    def takeover(self, recover: bool = False) -> Controller:
        """Another controller begins; the one before knows nothing of it."""
        self.network.say("a new controller takes over")
        controller = self.new_controller()
        if recover:
            self.ask(controller, "recover()", lambda: self._recovered(controller))
        return controller

    def _recovered(self, controller: Controller) -> None:
        found = controller.sync.recover()
        if found.action == "redo":
            controller.version = found.version  # a floor for the versions to come, no commit

    def change(self, luck: random.Random, *, back: bool = False) -> None:
        """An engine leaves, comes (back: every one that is not there), or is replaced by itself, started anew."""
        controller = self.controller
        here = {engine.name for engine in self.members(controller)}
        away = [engine for engine in self.engines if engine.name not in here]
        for server in away if back else away[:1]:
            pull = not back and luck.random() < 0.5
            engine: Any = Engine(self, controller.sender, server)
            self.ask(controller, f"join({server.name}, pull={pull})", lambda e=engine, p=pull: controller.sync.join(e, pull=p))
        if not away and not back and len(here) > 1:
            server = self.engine(luck.choice(sorted(here)))
            gone = server.process.state == "dead"
            if luck.random() < 0.5:
                self.ask(controller, f"leave({server.name})", lambda: controller.sync.leave(server.name, gone=gone))
            else:
                server.kill()
                server.boot()
                engine, pull = Engine(self, controller.sender, server), luck.random() < 0.5
                self.ask(
                    controller,
                    f"replace({server.name}, pull={pull})",
                    lambda: controller.sync.replace(server.name, engine, gone=True, pull=pull),
                )
        self.in_service = [replica.name for replica in controller.sync.replicas] or self.in_service

    def reboot(self) -> None:
        """What is dead, or has a transport that hangs, is started again; what is stopped goes on."""
        for trainer in self.trainers:
            trainer.process.resume()
            if trainer.process.state == "dead" or any(transport.stuck for transport in trainer.transports):
                self.network.say(f"{trainer.place} is started again")
                trainer.kill()
                trainer.boot()
        for engine in self.engines:
            engine.process.resume()
            for worker in engine.workers:
                worker.process.resume()
            dead = "dead" in {engine.process.state, *(worker.process.state for worker in engine.workers)}
            if dead or any(transport.stuck for worker in engine.workers for transport in worker.transports):
                self.network.say(f"engine {engine.name} is started again")
                engine.kill()
                engine.boot()

    def end(self) -> None:
        """Let no thread of a stopped process behind."""
        for part in (*self.trainers, *self.engines, *self.workers):
            if part.process.state == "stopped":
                part.process.kill()

    def disarm(self) -> None:
        self.network.events.clear()
        for part in [*self.trainers, *self.workers]:
            part.twist = lambda method, payload: payload
        for armed in self.wire.values():
            armed.clear()
