"""One job for drills: real inference servers, trainer ranks and a controller, each a process that can be killed and replaced.

with Job("vllm", folder, engines=2) as job:
    reply = job.ask("sync", version=1)
    assert job.wrong("e0", step=1) == []
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.drill_model import KIND, SIZES, Values, sides, wrong_in_engine
from benchmarks.drill_process import HttpTrainers
from weight_sync.errors import DeadlineExceeded, RolloutError, WeightSyncError
from weight_sync.ids import Deadline
from weight_sync.session.contracts import EngineDescription
from weight_sync_integrations.ray.engine import connect_engine
from weight_sync_integrations.server import free_port

ROOT = Path(__file__).resolve().parents[1]
TIMEOUTS = {"connect": 40.0, "sync": 12.0, "abort": 8.0}
"""Seconds: short, because a stopped process answers nothing and every such cell of the matrix waits for them."""

START_SECONDS = 400.0
PROMPT = [5, 17, 40, 101, 7]


class Child:
    """A process that answers one line of JSON for each line it is sent."""

    def __init__(self, command: list[str], first: Mapping[str, Any] | None, log: Path, seconds: float, **options: Any) -> None:
        with log.open("ab") as errors:
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors}
            self.process = subprocess.Popen(command, cwd=ROOT, start_new_session=True, **pipes, **options)
        self._buffer = b""
        if first is not None:
            self.send(first)
        self.first = self.reply(seconds)

    @property
    def pid(self) -> int:
        return self.process.pid

    def send(self, value: Mapping[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(value).encode() + b"\n")
        self.process.stdin.flush()

    def reply(self, seconds: float) -> Any:
        """The next answer. EOFError when the process has ended, TimeoutError when there is none in time."""
        assert self.process.stdout is not None
        end = time.monotonic() + seconds
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([self.process.stdout], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                raise TimeoutError(f"process {self.pid} said nothing for {seconds:g} s")
            part = os.read(self.process.stdout.fileno(), 1 << 16)
            if not part:
                raise EOFError(f"process {self.pid} has ended with code {self.process.wait(10)}")
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)

    def ask(self, seconds: float, **command: Any) -> Any:
        self.send(command)
        return self.reply(seconds)

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                stream.close()  # type: ignore[union-attr]


@dataclass
class Engine:
    """A server that runs. about: what a controller needs to reach it. group: its process group. workers: their pids by rank."""

    about: dict[str, Any]
    group: int
    workers: list[int]
    adapter: Any
    described: EngineDescription
    server: Any = None
    step: int | None = None

    def soon(self, seconds: float = 10.0) -> Deadline:
        return Deadline.after(seconds)


@dataclass
class Job:
    """kind: vllm or sglang. transport: "tcp" (Mooncake) or "cma". members: engines that take part at first."""

    kind: str
    folder: Path
    engines: int = 2
    tp: int = 1
    ranks: int = 2
    transport: str = "tcp"
    members: int | None = None
    level: str = "digest"
    timeouts: Mapping[str, float] = field(default_factory=lambda: dict(TIMEOUTS))

    def __enter__(self) -> Job:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.token = secrets.token_urlsafe(16)
        self.servers: dict[str, Engine] = {}
        self.trainers: list[Child] = []
        self.controllers: list[Child] = []
        self.zygote: Child | None = None
        self.step_number = 0
        options: dict[str, Any] = {"protocol": "tcp", "host": "127.0.0.1"} if self.transport == "tcp" else {"any_tracer": True}
        self.wire = {"name": "mooncake" if self.transport == "tcp" else "cma", **options}
        try:
            self._begin()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        for engine in self.servers.values():
            self.end(engine)
        for child in [*self.trainers, *self.controllers, *([self.zygote] if self.zygote else [])]:
            child.kill()

    def _begin(self) -> None:
        began = time.monotonic()
        self._make_model()
        config = json.loads((self.folder / "model" / "config.json").read_text())
        self.sides = sides(config, self.kind, self.ranks, self.tp, 1)
        self.held = Values(self.sides[1], "rollout")
        for number in range(self.engines):
            self.start_engine(f"e{number}")
        for rank in range(self.ranks):
            self.trainers.append(self._trainer(rank))
        names = list(self.servers)[: self.members or self.engines]
        self.start_controller(names)
        self.start_seconds = time.monotonic() - began

    def _make_model(self) -> None:
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"}
        model, python = str(self.folder / "model"), str(self.python())
        if self.kind == "vllm":
            environment |= {"VLLM_NO_USAGE_STATS": "1", "TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
            command = [python, "-W", "ignore", str(ROOT / "benchmarks" / "vllm_zygote.py")]
            self.zygote = Child(command, None, self.folder / "zygote.log", START_SECONDS, env=environment)
            self.zygote.ask(120.0, checkpoint=model, kind=KIND, sizes=SIZES)
            return
        from weight_sync_integrations.sglang.launch import cpu_environment

        lines = "import sys, json, weight_sync_integrations.checkpoints as c"
        lines += "; c.make_checkpoint(sys.argv[1], sys.argv[2], **json.loads(sys.argv[3]))"
        command = [python, "-c", lines, model, KIND, json.dumps(SIZES)]
        subprocess.run(command, env=environment | cpu_environment(), check=True, capture_output=True, timeout=START_SECONDS)

    def python(self) -> Path:
        return ROOT / ".venvs" / self.kind / "bin" / "python"

    # -- processes -------------------------------------------------------------------------------------------------

    def start_engine(self, name: str) -> Engine:
        """Start a server under this name; an older one of the name must have been ended."""
        log = str(self.folder / f"{name}-{len(list(self.folder.glob(f'{name}-*.log')))}.log")
        common: dict[str, Any] = {
            "model": str(self.folder / "model"), "token": self.token, "name": name, "tp": self.tp, "dtype": "bfloat16",
            "python": str(self.python()), "transport": self.wire, "log": log,
        }  # fmt: skip
        server: Any = None
        if self.kind == "vllm":
            from weight_sync_integrations.vllm import launch as vllm

            assert self.zygote is not None
            spec = vllm.ServerSpec(**common, max_model_len=128, max_num_seqs=4, kv_cache_bytes=16 << 20)
            port = free_port("127.0.0.1")
            url = f"http://127.0.0.1:{port}"
            words = vllm.command(spec, port)
            words = words[words.index("--model") :]
            group = self.zygote.ask(60.0, words=words, environment=vllm.environment(spec), log=log)
            _wait_healthy(url, group, log)
            about: dict[str, Any] = {"kind": "vllm", "name": name, "url": url, "workers": []}
            pids = _titled(group, "VLLM::Worker")
        else:
            from weight_sync_integrations.sglang import launch as sglang

            server = sglang.start(sglang.ServerSpec(**common, max_total_tokens=256), Deadline.after(START_SECONDS))
            group = server.process.process.pid
            workers = [[w.rank, w.host, w.port] for w in server.workers]
            about = {"kind": "sglang", "name": name, "url": server.url, "workers": workers}
            places = sorted(Path(server.rendezvous.name).glob("rank-*.json"))
            pids = [json.loads(file.read_text())["pid"] for file in places]
        assert len(pids) == self.tp, f"{name}: {len(pids)} workers found, not {self.tp}"
        adapter = connect_engine(self.kind, about, self.token)
        engine = Engine(about, group, pids, adapter, adapter.describe(Deadline.after(60.0)), server)
        self.servers[name] = engine
        return engine

    def end(self, engine: Engine) -> None:
        """End a server with all its processes, stopped ones too."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(engine.group, signal.SIGKILL)
        engine.adapter.close()
        if engine.server is not None:
            engine.server.stop(0.0)
        while any(_alive(pid) for pid in engine.workers):
            time.sleep(0.02)

    def _trainer(self, rank: int) -> Child:
        first = {
            "rank": rank,
            "side": asdict(self.sides[0]),
            "step": self.step_number,
            "token": self.token,
            "transport": self.wire,
        }
        return self._own("trainer", first)

    def _own(self, role: str, first: Mapping[str, Any]) -> Child:
        python = str(ROOT / ".venv" / "bin" / "python")
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        return Child(
            [python, "-m", "benchmarks.drill_process", role], first, self.folder / f"{role}.log", 60.0, env=environment
        )

    def restart_trainer(self, rank: int) -> None:
        """The rank is replaced by a new process with the same parameters; the controller is told its new port."""
        self.trainers[rank].kill()
        self.trainers[rank] = self._trainer(rank)
        self.ask("trainers", ports=self._ports())

    def _ports(self) -> list[int]:
        return [child.first["port"] for child in self.trainers]

    def start_controller(self, names: list[str]) -> Child:
        """A new controller for these engines; an older one is left as it is."""
        first = {
            "sides": [asdict(side) for side in self.sides], "ports": self._ports(), "token": self.token, "level": self.level,
            "engines": [self.servers[name].about for name in names], "timeouts": dict(self.timeouts),
            "pause": "keep" if self.kind == "vllm" else "retract",
        }  # fmt: skip
        self.controllers.append(self._own("controller", first))
        return self.controllers[-1]

    @property
    def controller(self) -> Child:
        return self.controllers[-1]

    # -- what is done and seen -------------------------------------------------------------------------------------

    def ask(self, what: str, seconds: float = 240.0, **command: Any) -> dict[str, Any]:
        """A command to the controller, see drill_process.Controller. EOFError, TimeoutError: see Child.reply."""
        return self.controller.ask(seconds, do=what, **command)

    def step(self, number: int) -> None:
        """An optimiser step on every trainer rank. SessionError while a sync holds one of them."""
        self.step_number = number
        trainers = HttpTrainers(self._ports(), self.token)
        try:
            trainers.call("step", {rank: {"step": number} for rank in range(self.ranks)}, Deadline.after(30.0))
        finally:
            trainers.close()

    def wrong(self, name: str, step: int) -> list[str]:
        """Live parameters of an engine that are not those of `step`, as the kernel reads them."""
        engine = self.servers[name]
        return wrong_in_engine(self.held, engine.described, engine.workers, step)

    def stands(self, name: str, seconds: float = 10.0) -> dict[str, Any]:
        """{"answers", "paused", "version" (that it stamps on tokens, None where it generates nothing), "text"}."""
        engine = self.servers[name]
        try:
            about = engine.adapter.describe(engine.soon(seconds))
        except WeightSyncError as error:
            gone = not all(_alive(pid) for pid in engine.workers)
            return {"answers": False, "paused": None, "version": None, "text": "gone" if gone else type(error).__name__}
        engine.described = about
        assert about.state is not None
        found = {"answers": True, "paused": about.state.paused, "version": None, "text": about.state.text()}
        try:
            _, spans = engine.adapter.generate_stamped(PROMPT, 2, engine.soon(0.5 if about.state.paused else 20.0))
        except DeadlineExceeded:
            return found
        if about.state.paused:
            raise RolloutError(f"{name} says that it is paused ({about.state.text()}) and generated {spans}")
        (stamp, _, _) = spans[-1]
        return found | {"version": int(stamp) if stamp.isdecimal() else -1}


def _wait_healthy(url: str, pid: int, log: str) -> None:
    deadline = Deadline.after(START_SECONDS)
    while True:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(url + "/health", timeout=5.0).status_code == 200:
                return
        if not _alive(pid) or not deadline.remaining():
            raise RolloutError(f"a vLLM server did not come up; {log} ends:\n{Path(log).read_text()[-3000:]}")
        time.sleep(0.1)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return False


def _titled(group: int, title: str) -> list[int]:
    """Processes of a group whose title begins so, by title."""
    found: list[tuple[str, int]] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                words = (entry / "cmdline").read_bytes().rstrip(b"\0").decode(errors="replace")
                of = int((entry / "stat").read_text().rpartition(")")[2].split()[2])
                if of == group and words.startswith(title):
                    found.append((words, int(entry.name)))
    return [pid for _, pid in sorted(found)]
