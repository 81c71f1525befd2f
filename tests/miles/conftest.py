"""Real SGLang servers on the CPU, miles's engine actors in front of them, a rollout manager's hooks, and trainer ranks.

Run in miles's environment (envs/build.sh miles). Servers run in SGLang's, started as miles-rl finds external engines: by
somebody else, with our marker as their only argument of ours.
"""

from __future__ import annotations

import importlib.util
import json
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from miles_support import CPU_SITE, HERE, ROOT, SETTINGS, VENV, environment


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """These tests need the environment that miles is installed in."""
    return True if importlib.util.find_spec("miles") is None else None


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("miles")


@pytest.fixture(scope="session")
def model(folder: Path) -> Path:
    """A tiny random Qwen3-MoE."""
    code = "import sys; from weight_sync_integrations import checkpoints as c; c.make_checkpoint(sys.argv[1], 'qwen3_moe')"
    subprocess.run([ROOT / ".venvs/trainer/bin/python", "-c", code, folder / "model"], env=environment(), check=True)
    return folder / "model"


@pytest.fixture(scope="session")
def rank_host(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """See rank_host.py. Not waited for here: it imports while servers start."""
    with (folder / "ranks.log").open("w") as log:
        process = subprocess.Popen(
            [VENV / "bin" / "python", HERE / "rank_host.py"], cwd=ROOT, env=environment(VENV / "fork"), text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, start_new_session=True,
        )  # fmt: skip
        yield process
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


WORDS = """\
--train-backend megatron --num-layers 4 --num-experts 8 --moe-ffn-hidden-size 128 --moe-router-topk 2 --kv-channels 32
--qk-layernorm --hidden-size 128 --num-attention-heads 4 --group-query-attention --num-query-groups 2 --ffn-hidden-size 256
--swiglu --seq-length 128 --max-position-embeddings 512 --normalization RMSNorm --norm-epsilon 1e-6 --rotary-base 10000
--untie-embeddings-and-output-weights --position-embedding-type rope --disable-bias-linear --micro-batch-size 1
--global-batch-size 8 --rollout-batch-size 8 --n-samples-per-prompt 1 --num-rollout 2 --actor-num-nodes 1
--actor-num-gpus-per-node 2 --rollout-num-gpus 2 --rollout-num-gpus-per-engine 1 --lr 1e-6 --tokenizer-type NullTokenizer
--vocab-size 256 --prompt-data none.jsonl --distributed-backend gloo --bf16 --disable-weights-backuper
--update-weight-transfer-mode p2p --use-distributed-optimizer --tensor-model-parallel-size 2
"""
"""A miles command line for that model. What weight_sync needs is added to it in `parsing`: two flags."""

BLOCK = """
weight_sync:
  strategy: p2p_tcp
  timeouts: {connect: 60, sync: 12, abort: 8}
sglang_custom_weight_loader: [weight_sync_integrations.sglang.entry.activate]
"""


@pytest.fixture(scope="session")
def parsing(folder: Path, model: Path) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """miles's own parser, with all its checks, over that command line; started, not waited for."""
    block, out = folder / "weight_sync.yaml", folder / "args.pickle"
    block.write_text(BLOCK)
    words = [*WORDS.split(), "--hf-checkpoint", str(model), "--load", str(model), "--ref-load", str(model)]
    words += ["--custom-megatron-init-path", "weight_sync_integrations.miles.hook.install", "--custom-config-path", str(block)]
    with (folder / "parse.log").open("w") as log:
        process = subprocess.Popen(
            [VENV / "bin" / "python", HERE / "parse.py", "args", out, *words], cwd=ROOT, env=environment(VENV / "miles-rl"),
            stdout=log, stderr=log,
        )  # fmt: skip
        yield process, out
        process.kill()


@dataclass(frozen=True)
class Engines:
    urls: list[str]
    processes: list[Any]


@pytest.fixture(scope="session")
def servers(folder: Path, model: Path) -> Iterator[Engines]:
    """Three servers of one rank."""
    from weight_sync.ids import Deadline
    from weight_sync_integrations.server import free_port, start_server
    from weight_sync_integrations.sglang import launch
    from weight_sync_integrations.sglang.plugin import MARKER

    spec = launch.ServerSpec(
        model=str(model), token="unused", max_total_tokens=512, python=str(ROOT / ".venvs" / "sglang" / "bin" / "python"),
        arguments=("--custom-weight-loader", MARKER),
    )  # fmt: skip
    variables = {key: value for key, value in launch.environment(spec, "").items() if not key.startswith("WEIGHT_SYNC")}
    deadline = Deadline.after(240)
    ports = [free_port("127.0.0.1") for _ in range(3)]

    def start(number: int) -> Any:
        url, log = f"http://127.0.0.1:{ports[number]}", folder / f"engine{number}.log"
        return start_server(f"engine{number}", url, launch.command(spec, ports[number]), variables, log, "/health", deadline)

    with ThreadPoolExecutor(3) as pool:
        started = [pool.submit(start, number) for number in range(3)]
    try:
        running = [future.result() for future in started]
        yield Engines([server.url for server in running], [server.process for server in running])
    finally:
        for future in started:
            if future.exception() is None:
                future.result().stop(grace=2.0)


@pytest.fixture(scope="session")
def args(parsing: tuple[subprocess.Popen[bytes], Path], folder: Path) -> Path:
    process, out = parsing
    assert process.wait(240) == 0, (folder / "parse.log").read_text()[-4000:]
    return out


@pytest.fixture(scope="session")
def cluster(rank_host: Any, parsing: Any, servers: Engines, args: Path) -> Iterator[str]:
    """Ray, with miles's own engine actors and the manager under the name "manager". Returns its address."""
    import engine_actors
    import ray

    paths = os.pathsep.join(map(str, (CPU_SITE, VENV / "fork", HERE)))
    ray.init(
        num_cpus=16, namespace="miles", include_dashboard=False, object_store_memory=100 << 20, log_to_driver=False,
        logging_level="error", runtime_env={"env_vars": SETTINGS | {"PYTHONPATH": paths}},
    )  # fmt: skip
    try:
        manager = ray.remote(num_cpus=0)(engine_actors.Manager).options(name="manager").remote()
        pids = [process.pid for process in servers.processes]
        ray.get(manager.start.remote(str(args), servers.urls, pids), timeout=400)
        yield ray.get_runtime_context().gcs_address
    finally:
        ray.shutdown()


Ask = Callable[..., list[Any]]


@pytest.fixture(scope="session")
def ranks(rank_host: subprocess.Popen[str], cluster: str, args: Path, folder: Path) -> Ask:
    """ranks(work, **given) -> what each of two ranks gave back."""
    from weight_sync_integrations.server import free_port

    assert rank_host.stdin is not None
    assert rank_host.stdout is not None
    assert rank_host.stdout.readline().strip() == "ready", (folder / "ranks.log").read_text()[-4000:]

    def ask(work: str, **given: Any) -> list[Any]:
        request = {"world": 2, "port": free_port("127.0.0.1"), "work": work}
        request["given"] = {"file": str(args), "address": cluster} | given
        rank_host.stdin.write(json.dumps(request) + "\n")
        rank_host.stdin.flush()
        results = pickle.loads(Path(rank_host.stdout.readline().strip()).read_bytes())
        if wrong := [result for good, result in results if not good]:
            pytest.fail("\n".join(wrong) + (folder / "ranks.log").read_text()[-3000:], pytrace=False)
        return [result for _, result in results]

    return ask
