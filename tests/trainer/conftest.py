"""Real trainers for tests: the heavy stack is imported once, every rank is a forked process on gloo."""

from __future__ import annotations

import importlib
import importlib.util
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

import pytest


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """These tests need the environment that the trainers are installed in."""
    return True if importlib.util.find_spec("megatron") is None else None


@pytest.fixture(scope="session")
def stack() -> None:
    """Import Megatron, FSDP and transformers in this process (about 10 s), with one thread so that forking is safe."""
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch

    torch.set_num_threads(1)
    from weight_sync_integrations.megatron import cpu

    assert cpu.install()
    for module in (
        "torch.distributed.fsdp",
        "torch.distributed.tensor.parallel",
        "torch._dynamo",
        "transformers.models.qwen3.modeling_qwen3",
        "transformers.models.qwen3_moe.modeling_qwen3_moe",
        "megatron.core.optimizer",
        "weight_sync_integrations.fsdp.model",
        "weight_sync_integrations.fsdp.source",
        "weight_sync_integrations.megatron.model",
        "weight_sync_integrations.megatron.source",
        "weight_sync_integrations.megatron.oracle",
    ):
        importlib.import_module(module)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, stack: None) -> Callable[..., Path]:
    """checkpoint(kind, **options of make_checkpoint) -> folder, made once."""
    from weight_sync_integrations.checkpoints import make_checkpoint

    root = tmp_path_factory.mktemp("checkpoints")
    made: dict[str, Path] = {}

    def make(kind: str, **options: Any) -> Path:
        key = repr((kind, sorted(options.items())))
        if key not in made:
            made[key] = make_checkpoint(root / str(len(made)), kind, **options)
        return made[key]

    return make


@pytest.fixture(scope="session")
def ranks(stack: None) -> Callable[..., list[Any]]:
    """ranks(world, work, *arguments) -> work(rank, *arguments) of every rank, in forked processes of one gloo world."""
    return run_ranks


def run_ranks(world: int, work: Callable[..., Any], *arguments: Any, seconds: float = 120) -> list[Any]:
    sys.stdout.flush()
    sys.stderr.flush()
    meeting = tempfile.mktemp(prefix="weight_sync_ranks_")
    children: dict[Connection, tuple[int, int]] = {}
    try:
        for rank in range(world):
            reader, writer = Pipe(duplex=False)
            child = os.fork()
            if child == 0:
                _be_rank(rank, world, meeting, writer, work, arguments)
            writer.close()
            children[reader] = (rank, child)
        return _results(children, seconds)
    finally:
        for _, child in children.values():
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        Path(meeting).unlink(missing_ok=True)


def _be_rank(
    rank: int, world: int, meeting: str, writer: Connection, work: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    """The body of a forked child; never returns."""
    try:
        import torch.distributed as dist

        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
        answer = (True, work(rank, *arguments))
    except BaseException:  # noqa: BLE001 (reported to the parent, which fails the test with it)
        answer = (False, traceback.format_exc())
    writer.send_bytes(pickle.dumps(answer))
    # Peers may still be in a collective with this rank; the parent kills everyone when all have answered.
    time.sleep(3600)
    os._exit(0)


def _results(children: dict[Connection, tuple[int, int]], seconds: float) -> list[Any]:
    end = time.monotonic() + seconds
    results: dict[int, Any] = {}
    pending = dict(children)
    while pending:
        ready = wait(list(pending), timeout=max(0.0, end - time.monotonic()))
        if not ready:
            pytest.fail(f"ranks {sorted(rank for rank, _ in pending.values())} gave no result within {seconds} s")
        for reader in ready:
            rank, child = pending.pop(reader)
            try:
                good, result = pickle.loads(reader.recv_bytes())
            except EOFError:
                pytest.fail(f"rank {rank} (process {child}) died without a result")
            if not good:
                pytest.fail(f"on rank {rank}:\n{result}")
            results[rank] = result
    return [results[rank] for rank in sorted(results)]
