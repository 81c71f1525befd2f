"""Start a vLLM OpenAI server that takes part in a weight_sync job.

    spec = ServerSpec(model=folder, token=secret, tp=2, python=".venvs/vllm/bin/python", kv_cache_bytes=64 << 20)
    with start(spec, Deadline.after(180)) as server:
        engine = VllmEngine(server.name, server.url, secret)

VLLM_SERVER_DEV_MODE=1 turns on the control routes (/pause, /collective_rpc, /start_weight_update, ...). They have no
authentication of their own: whoever reaches the port can pause the engine. Bind to a private address.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weight_sync.errors import ConfigError, ParallelError
from weight_sync.ids import Deadline
from weight_sync_integrations.server import Server, free_port, start_server
from weight_sync_integrations.vllm.plugin import BACKEND, TOKEN_VARIABLE

EXTENSION = "weight_sync_integrations.vllm.worker.WeightSyncWorkerExtension"

# What a CPU server needs beside the plain-weight stand-ins (cpu.py). Dynamo is off because a few helpers are compiled
# even in eager mode, for minutes. OpenMP threads are not bound, so that several servers can share a machine.
_CPU_ENVIRONMENT = {
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSpec:
    """One server.

    model: checkpoint folder. token: the job's secret; reaches the server through its environment, never its arguments.
    tp, pp, ep: sizes; vLLM spreads experts over all tp ranks or none, so ep is 1 or tp. port: None takes a free one.
    kv_cache_bytes: None leaves the size to vLLM (not on a CPU, where it would take most of the memory).
    python: interpreter of the environment vLLM is installed in. transport: what weight_sync.transport opens in every
    worker, as {"name": ..., options}; None opens none (describe, load and record still work).
    arguments: more command-line arguments, appended last. environment: more variables, these win.
    """

    model: str
    token: str
    name: str = "vllm"
    tp: int = 1
    pp: int = 1
    ep: int = 1
    device: str = "cpu"
    dtype: str = "auto"
    host: str = "127.0.0.1"
    port: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    kv_cache_bytes: int | None = None
    python: str = sys.executable
    log: str = "vllm-server.log"
    transport: Mapping[str, Any] | None = None
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.token:
            raise ConfigError("a vLLM server needs a token: without one its workers would refuse every call")
        if self.device not in ("cpu", "cuda"):
            raise ConfigError(f"vLLM device {self.device!r}: must be cpu or cuda")
        if not (Path(self.model) / "config.json").is_file():
            raise ConfigError(f"vLLM model {self.model}: no config.json in that folder")
        if self.device == "cpu" and self.kv_cache_bytes is None:
            raise ConfigError("vLLM on a CPU needs kv_cache_bytes: left alone it takes most of the machine's memory")
        if self.ep not in (1, self.tp):
            raise ParallelError(f"vLLM ep={self.ep}: its expert-parallel size is tp or 1; legal here: 1, {self.tp}")

    @property
    def world(self) -> int:
        """Worker processes."""
        return self.tp * self.pp


def command(spec: ServerSpec, port: int) -> list[str]:
    """The server's command line. Contains no secret."""
    words = [spec.python, "-m", "vllm.entrypoints.openai.api_server"]
    words += ["--model", spec.model, "--served-model-name", spec.name, "--host", spec.host, "--port", str(port)]
    words += ["--tensor-parallel-size", str(spec.tp), "--pipeline-parallel-size", str(spec.pp), "--dtype", spec.dtype]
    words += ["--skip-tokenizer-init", "--enable-scale-out"]  # token ids in and out, through /inference/v1/generate
    words += ["--weight-transfer-config", json.dumps({"backend": BACKEND}), "--worker-extension-cls", EXTENSION]
    if spec.ep > 1:
        words.append("--enable-expert-parallel")
    for flag, value in (
        ("--max-model-len", spec.max_model_len),
        ("--max-num-seqs", spec.max_num_seqs),
        ("--kv-cache-memory-bytes", spec.kv_cache_bytes),
    ):
        if value is not None:
            words += [flag, str(value)]
    if spec.device == "cpu":
        # vLLM's native rotary kernel rounds differently from torch; without it fp32 tokens equal transformers' exactly.
        words += ["--enforce-eager", "--compilation-config", json.dumps({"custom_ops": ["-rotary_embedding"]})]
    return [*words, *spec.arguments]


def environment(spec: ServerSpec) -> dict[str, str]:
    """Variables set over the parent's environment."""
    from weight_sync_integrations.vllm.transport import TRANSPORT_VARIABLE

    variables = {
        TOKEN_VARIABLE: spec.token,
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        # The working directory stays off sys.path: build leftovers in it (an old *.egg-info) hide the installed
        # package's entry points, and vLLM would start without our plug-in.
        "PYTHONSAFEPATH": "1",
    }
    if spec.transport is not None:
        variables[TRANSPORT_VARIABLE] = json.dumps(dict(spec.transport))
    if spec.device == "cpu":
        variables |= _CPU_ENVIRONMENT
    return variables | dict(spec.environment)


def start(spec: ServerSpec, deadline: Deadline) -> Server:
    """Start the server and wait until it is healthy. Raises what start_server raises; nothing is left running then."""
    port = spec.port if spec.port is not None else free_port(spec.host)
    url = f"http://{spec.host}:{port}"
    return start_server(spec.name, url, command(spec, port), environment(spec), Path(spec.log), "/health", deadline)
