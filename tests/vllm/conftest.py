"""Real vLLM engines for tests: vLLM is imported once, every engine lives in a forked child and dies with it.

A forked engine is vLLM's own LLM with its multi-process executor, whose workers are forked too (vLLM insists on spawn on
a CPU, which would import everything again in every worker). So collective_rpc, tensor, expert and pipeline parallelism
are the real thing; only the HTTP server in front and the engine-core process are missing, and test_server.py has those.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import multiprocessing
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine core in the child itself: no third process to start
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # tests send functions to workers
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCHDYNAMO_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
    "WEIGHT_SYNC_TOKEN": "test-token",
}
PROMPTS = [[5, 6, 7, 8, 9, 10], [50, 60, 70]]
NEW_TOKENS = 16
_BUILT: list[Any] = []


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """These tests need the environment that vLLM is installed in."""
    return True if importlib.util.find_spec("vllm") is None else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests whose module puts stand-ins for kernels into this process (`plain_cpu`) come last: the others need vLLM's own."""
    items.sort(key=lambda item: "plain_cpu" in getattr(item, "fixturenames", ()))


@pytest.fixture(scope="session")
def vllm_imported() -> None:
    """Import vLLM (about 10 s) in this process, with one thread so that forking is safe."""
    os.environ.update(ENVIRONMENT)
    import torch

    torch.set_num_threads(1)
    for module in ("vllm.entrypoints.llm", "vllm.v1.engine.llm_engine", "vllm.v1.worker.cpu_worker"):
        importlib.import_module(module)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory, vllm_imported: None) -> Callable[..., Path]:
    """checkpoint(kind, seed=..., dtype=..., **sizes) -> folder, made once."""
    made: dict[str, Path] = {}
    root = tmp_path_factory.mktemp("checkpoints")

    def make(kind: str, **options: Any) -> Path:
        from weight_sync_integrations.checkpoints import make_checkpoint

        key = repr((kind, sorted(options.items())))
        if key not in made:
            options.setdefault("dtype", "float32")
            made[key] = make_checkpoint(root / str(len(made)), kind, **options)
        return made[key]

    return make


@pytest.fixture(scope="session")
def forked(vllm_imported: None) -> Callable[..., Any]:
    return run_forked


def run_forked(work: Callable[..., Any], *arguments: Any, seconds: float = 120) -> Any:
    """Call `work` in a forked child; its result, or its failure as AssertionError. The child's group is killed at the end."""
    reader, writer = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        os.close(reader)
        os.setpgid(0, 0)
        try:
            answer = (True, work(*arguments))
        except BaseException:  # noqa: BLE001 - the parent fails the test with it
            answer = (False, traceback.format_exc())
        for engine in _BUILT:  # ends its workers and gives their shared memory back
            engine.llm_engine.engine_core.shutdown()
        with os.fdopen(writer, "wb") as stream:
            pickle.dump(answer, stream)
        os._exit(0)
    os.close(writer)
    try:
        good, result = _receive(reader, child, seconds)
    finally:
        for number in (child, -child):
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        os.waitpid(child, 0)
    if not good:
        pytest.fail(f"in the forked engine:\n{result}")
    return result


def _receive(reader: int, child: int, seconds: float) -> tuple[bool, Any]:
    import select

    end = time.monotonic() + seconds
    data = b""
    with os.fdopen(reader, "rb", buffering=0) as stream:
        while True:
            ready, _, _ = select.select([stream], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                return False, f"no result within {seconds} s"
            part = stream.read(1 << 20)
            if not part:
                break
            data += part
    return pickle.loads(data) if data else (False, f"child {child} died without a result")


def build_engine(model: Path, **options: Any) -> Any:
    """A vLLM LLM in this (forked) process, with our plug-in, worker extension and transfer engine."""
    import vllm.v1.executor.multiproc_executor as executor
    from vllm import LLM

    executor.get_mp_context = lambda: multiprocessing.get_context("fork")
    defaults: dict[str, Any] = {
        "enforce_eager": True,
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "max_model_len": 128,
        "max_num_seqs": 4,
        "kv_cache_memory_bytes": 32 << 20,
        "compilation_config": {"custom_ops": ["-rotary_embedding"]},
        "disable_log_stats": True,
        "weight_transfer_config": {"backend": "weight_sync"},
        "worker_extension_cls": "weight_sync_integrations.vllm.worker.WeightSyncWorkerExtension",
    }
    llm = LLM(model=str(model), **{**defaults, **options})
    _BUILT.append(llm)
    return llm


def greedy(llm: Any) -> list[list[int]]:
    """NEW_TOKENS greedy tokens for each of PROMPTS."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, detokenize=False, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], sampling, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def greedy_transformers(model: Path) -> list[list[int]]:
    """The same from Hugging Face transformers in float32, with the attention kernel that is plain matrix products."""
    import torch
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager").eval()
    result = []
    with torch.no_grad():
        for prompt in PROMPTS:
            ids = torch.tensor([prompt])
            for _ in range(NEW_TOKENS):
                ids = torch.cat([ids, reference(ids).logits[0, -1].argmax()[None, None]], dim=1)
            result.append(ids[0, len(prompt) :].tolist())
    return result
