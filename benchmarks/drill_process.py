"""The processes of a drill that are ours: a trainer rank and the controller, each able to be killed and started again.

    python -m benchmarks.drill_process trainer      a SourceAgent over plain arrays, reached over HTTP with a token
    python -m benchmarks.drill_process controller   a WeightSync, driven by its standard input

Both read one line of JSON first. The trainer answers with its port; the controller then takes one command a line (Controller).
A process ends when its standard input does, so nothing outlives the drill.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import httpx

from benchmarks.drill_model import Values
from weight_sync import errors
from weight_sync.delta.spec import DeltaSpec
from weight_sync.errors import DeadlineExceeded, SessionError
from weight_sync.ids import Deadline
from weight_sync.session.connect import SyncSpec
from weight_sync.session.inprocess import ArraySource, arrays_for
from weight_sync.session.inputs import Declared
from weight_sync.session.session import Timeouts, WeightSync
from weight_sync.session.silent import SilentObserver
from weight_sync.session.source import SourceAgent
from weight_sync.session.verify import Level
from weight_sync.transport import registry
from weight_sync_integrations.ray.engine import connect_engine
from weight_sync_integrations.server import quiet_client
from weight_sync_integrations.sglang.endpoint import WorkerEndpoint


def say(value: Any) -> None:
    print(json.dumps(value), flush=True)


# -- a trainer rank ----------------------------------------------------------------------------------------------------


def trainer() -> None:
    """First line: {"rank", "side": a Declared, "step", "token", "transport"}. Answers {"port"}."""
    spec = json.loads(sys.stdin.readline())
    rank, values = spec["rank"], Values(Declared(**spec["side"]), "trainer")
    arrays = arrays_for(values.layout, rank)
    source = ArraySource(rank, arrays, _coords(spec["side"], rank))
    options = dict(spec["transport"])
    agent = SourceAgent(source, lambda: registry.create(options["name"], **{k: v for k, v in options.items() if k != "name"}))

    def step(number: int) -> dict[str, Any]:
        if source.quiet:
            raise SessionError(f"trainer rank {rank}: an optimiser step while a sync holds the parameters")
        values.fill(rank, number, {name: array.reshape(-1) for name, array in arrays.items()})
        return {}

    def serve(method: str, payload: dict[str, Any]) -> dict[str, Any]:
        return step(payload["step"]) if method == "step" else agent.call(method, payload)

    step(spec["step"])
    endpoint = WorkerEndpoint(spec["token"], "127.0.0.1", serve)
    endpoint.start()
    say({"port": endpoint.port})
    threading.Thread(target=_end_with_input, daemon=True).start()
    while True:
        endpoint.run_pending(0.5)


def _coords(side: Mapping[str, Any], rank: int) -> dict[str, int]:
    from weight_sync.session.inputs import dims_of

    return dims_of(Declared(**side), "trainer").coords(rank)


def _end_with_input() -> None:
    sys.stdin.read()
    os._exit(0)


class HttpTrainers:
    """A TrainerGroup over the endpoints of trainer ranks. ports: by rank; one that was restarted has another."""

    def __init__(self, ports: list[int], token: str) -> None:
        self.ports, self.world = ports, len(ports)
        self._client = quiet_client(*(f"http://127.0.0.1:{port}" for port in ports), token=token)
        self._pool = ThreadPoolExecutor(self.world)

    def close(self) -> None:
        self._client.close()
        self._pool.shutdown(wait=False)

    def call(self, method: str, payloads: Mapping[int, Mapping[str, Any]], deadline: Deadline) -> dict[int, dict[str, Any]]:
        calls = {rank: self._pool.submit(self._one, rank, method, payload, deadline) for rank, payload in payloads.items()}
        failed = {rank: error for rank, call in calls.items() if (error := call.exception()) is not None}
        if failed:
            (_, first), *others = sorted(failed.items())
            for rank, error in others:
                first.add_note(f"also trainer rank {rank}: {type(error).__name__}: {error}")
            raise first
        return {rank: call.result() for rank, call in calls.items()}

    def _one(self, rank: int, method: str, payload: Mapping[str, Any], deadline: Deadline) -> dict[str, Any]:
        where = f"trainer rank {rank}: {method}"
        left = deadline.check(where)
        request = {"method": method, "payload": dict(payload), "seconds": left}
        try:
            answer = self._client.post(f"http://127.0.0.1:{self.ports[rank]}/call", json=request, timeout=left)
        except httpx.TimeoutException:
            raise DeadlineExceeded(f"{where}: no answer within its {deadline.seconds:g} s deadline") from None
        except httpx.HTTPError as error:
            raise SessionError(f"{where}: its process is gone: {type(error).__name__}: {error}") from None
        content = answer.json()
        if "value" in content:
            return content["value"]
        kind, text = content["error"]["type"], content["error"]["message"]
        made = getattr(errors, kind, None)
        if made is None or made is errors.TransportError:
            raise SessionError(f"{where}: {kind}: {text}")
        raise made(text if text.startswith("trainer rank") else f"{where}: {text}")


# -- the controller ----------------------------------------------------------------------------------------------------


class Killer(SilentObserver):
    """Sends one signal when a phase of a sync begins, or a moment later: the sync goes on as if nothing had happened."""

    def __init__(self) -> None:
        self.phases: dict[str, float] = {}
        self.order: dict[str, Any] | None = None

    @contextmanager
    def phase(self, name: Any) -> Iterator[None]:
        order = self.order
        if order is not None and order["phase"] == str(name):
            self.order = None
            kill = threading.Timer(order["delay"], os.kill, (order["pid"] or os.getpid(), order["signal"]))
            kill.daemon = True
            kill.start() if order["delay"] else kill.function(*kill.args)
        began = time.monotonic()
        yield
        self.phases[str(name)] = time.monotonic() - began


class Controller:
    """Commands, each {"do": name, ...}, answered by {"ok", "error", "notes", "seconds", "version", "state", "replicas", ...}.

    sync {"version", "kill"}   kill: {"phase", "pid" (0: this process), "signal", "delay"} or nothing
    connect, recover, check {"version"} (check_weight_equal), trainers {"ports"}, level {"level"}
    delta {"on"}               as fresh, with or without deltas
    join {"engine", "pull"}, leave {"name", "gone"}, replace {"name", "engine", "gone", "pull"}
    fresh                      drop the WeightSync and make another, as a controller that was restarted has one
    """

    def __init__(self, spec: Mapping[str, Any]) -> None:
        self._spec = spec
        self._trainers = HttpTrainers(spec["ports"], spec["token"])
        self._engines = [self._engine(engine) for engine in spec["engines"]]
        self._killer = Killer()
        self._level = Level(spec.get("level", "digest"))
        self._delta: DeltaSpec | None = None
        self._sync = self._made()

    def _engine(self, about: Mapping[str, Any]) -> Any:
        return connect_engine(about["kind"], about, self._spec["token"])

    def _made(self) -> WeightSync:
        source, target = (Declared(**side) for side in self._spec["sides"])
        dims = {**target.dims, "engines": len(self._engines)}
        target = Declared(target.family, target.config, dims, target.convention, target.symbols)
        return WeightSync(
            self._trainers, self._engines, SyncSpec(source, target, delta=self._delta), pause=self._spec["pause"],
            observer=self._killer,
            timeouts=Timeouts(**self._spec["timeouts"]), level=self._level,
        )  # fmt: skip

    def answer(self, command: Mapping[str, Any]) -> dict[str, Any]:
        began, reply = time.monotonic(), {"ok": True, "error": "", "notes": []}
        self._killer.phases = {}
        try:
            reply |= getattr(self, f"do_{command['do']}")(command) or {}
        except errors.WeightSyncError as error:
            reply |= {"ok": False, "error": f"{type(error).__name__}: {error}", "notes": list(getattr(error, "__notes__", []))}
        except Exception:  # noqa: BLE001 - a fault that is none of ours: the drill fails with it
            reply |= {"ok": False, "error": f"unexpected: {traceback.format_exc()}"}
        reply |= {"seconds": time.monotonic() - began, "phases": dict(self._killer.phases)}
        replicas = {replica.name: f"{replica.state} {replica.version}" for replica in self._sync.replicas}
        return reply | {"version": self._sync.version, "state": str(self._sync.state), "replicas": replicas}

    def do_sync(self, command: Mapping[str, Any]) -> dict[str, Any]:
        self._killer.order = command.get("kill")
        outcome = self._sync.sync(command["version"])
        reason = None if outcome.delta is None else outcome.delta.reason
        return {"bytes": outcome.bytes, "digest": outcome.digest, "complete": reason}

    def do_check(self, command: Mapping[str, Any]) -> dict[str, Any]:
        return {"bytes": self._sync.check_weight_equal(command["version"]).bytes}

    def do_connect(self, command: Mapping[str, Any]) -> None:
        self._sync.connect()

    def do_recover(self, command: Mapping[str, Any]) -> dict[str, Any]:
        return {"recovery": asdict(self._sync.recover())}

    def do_trainers(self, command: Mapping[str, Any]) -> None:
        self._trainers.ports[:] = command["ports"]

    def do_level(self, command: Mapping[str, Any]) -> None:
        self._sync._level = Level(command["level"])

    def do_delta(self, command: Mapping[str, Any]) -> None:
        self._delta = DeltaSpec(staging=1 << 18) if command["on"] else None
        self.do_fresh(command)

    def do_join(self, command: Mapping[str, Any]) -> None:
        self._sync.join(self._engine(command["engine"]), pull=command["pull"])

    def do_leave(self, command: Mapping[str, Any]) -> None:
        old = self._adapter(command["name"])
        self._sync.leave(command["name"], gone=command["gone"])
        old.close()

    def do_replace(self, command: Mapping[str, Any]) -> None:
        old, engine = self._adapter(command["name"]), self._engine(command["engine"])
        self._sync.replace(command["name"], engine, gone=command["gone"], pull=command["pull"])
        old.close()

    def _adapter(self, name: str) -> Any:
        return next(replica.engine for replica in self._sync.replicas if replica.name == name)

    def do_fresh(self, command: Mapping[str, Any]) -> None:
        self._engines = [replica.engine for replica in self._sync.replicas]
        self._sync = self._made()


def controller() -> None:
    """First line: {"sides", "ports", "engines", "token", "pause", "timeouts", "level"}; then commands."""
    served = Controller(json.loads(sys.stdin.readline()))
    say({"ready": os.getpid()})
    for line in sys.stdin:
        say(served.answer(json.loads(line)))


if __name__ == "__main__":
    {"trainer": trainer, "controller": controller}[sys.argv[1]]()
