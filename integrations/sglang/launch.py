"""Start an official SGLang server that takes part in a weight_sync job.

    spec = ServerSpec(model=folder, token=secret, tp=2, python=".venvs/sglang/bin/python", log="sglang.log")
    with start(spec, Deadline.after(180)) as server:
        engine = SglangEngine(server.name, server.url, server.workers, secret)

Nothing of SGLang is edited: our plugin (plugin.py) is found through its entry point because weight_sync is installed in
the server's environment, and acts because WEIGHT_SYNC_TOKEN is set there. SGLang's own HTTP routes have no
authentication unless it is given an API key: bind it to a private address.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from weight_sync.errors import ConfigError, DeadlineExceeded, ParallelError
from weight_sync.ids import Deadline
from weight_sync_integrations.server import Server as ServerProcess
from weight_sync_integrations.server import free_port, start_server
from weight_sync_integrations.sglang.plugin import TOKEN_VARIABLE
from weight_sync_integrations.sglang.worker import BIND_VARIABLE, RENDEZVOUS_VARIABLE, TRANSPORT_VARIABLE

CPU_SITE = Path(__file__).parent / "cpu_site"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSpec:
    """One server on one host.

    model: checkpoint folder. token: the job's secret; reaches the workers through the environment, never the arguments.
    tp, pp, ep, attn_dp: SGLang's sizes; ep and attn_dp cut the tp ranks again. device: "cpu" or "cuda".
    port: None takes a free one. worker_host: address the worker endpoints bind to and announce.
    max_total_tokens: size of the KV pool in tokens; None leaves it to SGLang (not on a CPU, where it would take all
    memory). cpus: core ids for a CPU server, spread over its ranks; None takes those this process may use.
    python: interpreter of the environment SGLang is installed in. transport: what every worker opens, as
    {"name": ..., options}; None opens none (describe and record still work).
    arguments: more command-line arguments, appended last. environment: more variables, these win.
    """

    model: str
    token: str
    name: str = "sglang"
    tp: int = 1
    pp: int = 1
    ep: int = 1
    attn_dp: int = 1
    device: str = "cpu"
    dtype: str = "bfloat16"
    host: str = "127.0.0.1"
    port: int | None = None
    worker_host: str = "127.0.0.1"
    max_total_tokens: int | None = None
    cpus: tuple[int, ...] | None = None
    python: str = sys.executable
    log: str = "sglang-server.log"
    transport: Mapping[str, Any] | None = None
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.token:
            raise ConfigError("an SGLang server needs a token: without one its workers would refuse every call")
        if self.device not in ("cpu", "cuda"):
            raise ConfigError(f"SGLang device {self.device!r}: must be cpu or cuda")
        if not (Path(self.model) / "config.json").is_file():
            raise ConfigError(f"SGLang model {self.model}: no config.json in that folder")
        if self.device == "cpu" and self.max_total_tokens is None:
            raise ConfigError("SGLang on a CPU needs max_total_tokens: it cannot tell how much memory a rank may take")
        for axis, size in (("ep", self.ep), ("attn_dp", self.attn_dp)):
            if size < 1 or self.tp < 1 or self.tp % size:
                legal = [n for n in range(1, self.tp + 1) if self.tp % n == 0]
                raise ParallelError(f"SGLang {axis}={size} does not divide tp={self.tp}; legal: {legal}")

    @property
    def world(self) -> int:
        """Worker processes."""
        return self.tp * self.pp


@dataclass(frozen=True, slots=True)
class WorkerAddress:
    """Where one worker's endpoint listens. Plain data: it travels to the controller. token: its own, where it has one."""

    rank: int
    host: str
    port: int
    token: str | None = field(default=None, repr=False)


@dataclass(slots=True)
class Server:
    """A running server. Use as a context manager, or call stop() in every case."""

    process: ServerProcess
    workers: tuple[WorkerAddress, ...]
    rendezvous: tempfile.TemporaryDirectory[str]

    @property
    def name(self) -> str:
        return self.process.name

    @property
    def url(self) -> str:
        return self.process.url

    def tail(self, lines: int = 30) -> str:
        """The last lines of its log."""
        return self.process.tail(lines)

    def stop(self, grace: float = 10.0) -> None:
        """End the server and all its processes: SIGTERM, then SIGKILL after `grace` seconds. Safe to repeat."""
        self.process.stop(grace)
        self.rendezvous.cleanup()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()


def new_token() -> str:
    """A fresh secret for one job."""
    return secrets.token_urlsafe(32)


def command(spec: ServerSpec, port: int) -> list[str]:
    """The server's command line. Contains no secret."""
    words = [spec.python, "-W", "ignore", "-m", "sglang.launch_server", "--model-path", spec.model]
    words += ["--device", spec.device, "--dtype", spec.dtype, "--host", spec.host, "--port", str(port)]
    words += ["--served-model-name", spec.name, "--skip-tokenizer-init"]  # token ids in and out
    words += ["--tp-size", str(spec.tp), "--pp-size", str(spec.pp), "--ep-size", str(spec.ep)]
    if spec.attn_dp > 1:  # spelt so that SGLang 0.5.16 understands it too
        words += ["--dp-size", str(spec.attn_dp), "--enable-dp-attention"]
    if spec.max_total_tokens is not None:
        words += ["--max-total-tokens", str(spec.max_total_tokens)]
    if spec.device == "cpu":
        words += ["--attention-backend", "torch_native", "--mem-fraction-static", "0.2", "--disable-radix-cache"]
        words += ["--skip-server-warmup"]  # a warm-up compiles kernels on a GPU; here it only costs seconds
    return [*words, *spec.arguments]


def environment(spec: ServerSpec, rendezvous: str) -> dict[str, str]:
    """Variables set over the parent's environment. `rendezvous`: an empty folder for this server alone."""
    variables = {
        TOKEN_VARIABLE: spec.token,
        RENDEZVOUS_VARIABLE: rendezvous,
        BIND_VARIABLE: spec.worker_host,
        "HF_HUB_OFFLINE": "1",
        # Build leftovers in the working directory (an old *.egg-info) would hide our plug-in's entry point.
        "PYTHONSAFEPATH": "1",
    }
    if spec.transport is not None:
        variables[TRANSPORT_VARIABLE] = json.dumps(dict(spec.transport))
    if spec.device == "cpu":
        variables |= cpu_environment()
        # All ranks and the trainer share the host's memory; SGLang would take their ups and downs for a busy GPU.
        variables["SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"] = "0"
        cpus = list(spec.cpus) if spec.cpus is not None else sorted(os.sched_getaffinity(0))
        # SGLang wants one group of cores for each rank; ranks share a core when there are fewer.
        groups = [cpus[rank :: spec.world] or [cpus[rank % len(cpus)]] for rank in range(spec.world)]
        variables["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(",".join(map(str, group)) for group in groups)
    return variables | dict(spec.environment)


def cpu_environment() -> dict[str, str]:
    """What any process needs that imports SGLang on a CPU: its CPU mode, and our stand-ins ahead on the path."""
    inherited = os.environ.get("PYTHONPATH", "")
    paths = [str(CPU_SITE), *(path for path in inherited.split(os.pathsep) if path and path != str(CPU_SITE))]
    return {"SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": os.pathsep.join(paths)}


def start(spec: ServerSpec, deadline: Deadline) -> Server:
    """Start the server; return when it is healthy and every worker has announced its endpoint.

    Raises: RolloutError (it died; the end of its log is in the message), DeadlineExceeded (with the end of the log, and
    which workers are missing). In both cases nothing is left running.
    """
    port = spec.port if spec.port is not None else free_port(spec.host)
    rendezvous = tempfile.TemporaryDirectory(prefix="weight-sync-")
    try:
        process = start_server(
            spec.name,
            f"http://{spec.host}:{port}",
            command(spec, port),
            environment(spec, rendezvous.name),
            Path(spec.log),
            "/health",
            deadline,
        )
    except BaseException:
        rendezvous.cleanup()
        raise
    try:
        workers = _announced(process, Path(rendezvous.name), spec.world, deadline)
    except BaseException:
        process.stop(grace=2.0)
        rendezvous.cleanup()
        raise
    return Server(process, workers, rendezvous)


def _announced(process: ServerProcess, folder: Path, world: int, deadline: Deadline) -> tuple[WorkerAddress, ...]:
    while True:
        found = [json.loads(file.read_text()) for file in sorted(folder.glob("rank-*.json"))]
        ranks = [entry["rank"] for entry in found]
        if ranks == list(range(world)):
            return tuple(WorkerAddress(entry["rank"], entry["host"], entry["port"]) for entry in found)
        process.check()
        if not deadline.remaining():
            raise DeadlineExceeded(
                f"server {process.name} answers, but of its {world} workers only {ranks} announced an endpoint within "
                f"{deadline.seconds:g} s. Is weight_sync installed in the server's environment, and is the plugin not "
                f"excluded by SGLANG_PLUGINS? The log {process.log} ends:\n{process.tail()}"
            )
        time.sleep(0.1)
