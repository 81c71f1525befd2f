"""Trainer ranks as Ray actors: each in the trainer's own Python environment, placed by the cluster's scheduler."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from weight_sync.errors import DeadlineExceeded, SessionError, WeightSyncError
from weight_sync.ids import Deadline


@dataclass(frozen=True, slots=True)
class TrainerSpec:
    """What every rank builds. sizes: tp pp vpp ep etp cp. transport: {"name": ..., options}, for transport.registry.create."""

    kind: str
    ranks: int
    sizes: Mapping[str, int]
    order: str
    optimizer: str
    learning_rate: float
    dtype: str | None
    vocab_multiple: int
    transport: Mapping[str, Any] = field(default_factory=dict)


class TrainerActor:
    """One rank. Runs as a Ray actor; nothing here is called twice at a time."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        self._trainer: Any = None
        self._agent: Any = None

    def rendezvous(self) -> tuple[str, int]:
        """(host, free port) for torch.distributed; asked of rank 0."""
        import ray

        host = ray.util.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind((host, 0))
            return host, probe.getsockname()[1]

    def build(self, spec: TrainerSpec, hf_path: str, host: str, port: int, seconds: float) -> dict[str, Any]:
        """Join the process group, build the model and the source agent. Returns the number of local parameters."""
        import torch

        backend = "nccl" if torch.cuda.is_available() else "gloo"
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        torch.distributed.init_process_group(
            backend,
            init_method=f"tcp://{host}:{port}",
            rank=self.rank,
            world_size=self.world,
            timeout=timedelta(seconds=seconds),
        )
        source = self._megatron(spec, hf_path) if spec.kind == "megatron" else self._fsdp(spec, hf_path)
        from weight_sync.session.source import SourceAgent
        from weight_sync.transport import registry

        options = dict(spec.transport)
        name = options.pop("name")
        self._agent = SourceAgent(source, lambda: registry.create(name, **options), export=self._trainer.exported)
        return {"rank": self.rank, "params": len(source.tensors())}

    def _megatron(self, spec: TrainerSpec, hf_path: str) -> Any:
        from weight_sync.layout.parallel import TrainerDims
        from weight_sync_integrations.megatron.model import build
        from weight_sync_integrations.megatron.source import MegatronSource

        self._trainer = build(
            hf_path,
            TrainerDims(spec.ranks, order=spec.order, **spec.sizes),
            optimizer=spec.optimizer,  # type: ignore[arg-type]
            learning_rate=spec.learning_rate,
            dtype=spec.dtype,
            vocab_multiple=spec.vocab_multiple,
        )
        return MegatronSource(self._trainer.chunks, self._trainer.optimizer, rank_order=spec.order)

    def _fsdp(self, spec: TrainerSpec, hf_path: str) -> Any:
        from weight_sync_integrations.fsdp.model import build
        from weight_sync_integrations.fsdp.source import FsdpSource

        self._trainer = build(hf_path, learning_rate=spec.learning_rate, dtype=spec.dtype)
        return FsdpSource(self._trainer.model, self._trainer.optimizer)

    def call(self, method: str, payload: Mapping[str, Any]) -> dict[str, Any]:
        """SourceAgent.call."""
        return self._agent.call(method, payload)

    def step(self, count: int) -> list[float]:
        """Optimiser steps; the losses (empty on ranks that compute none)."""
        losses = [self._trainer.train_step() for _ in range(count)]
        return [float(loss) for loss in losses if loss is not None]

    def export_hf(self, path: str) -> str:
        """The oracle: a full HF checkpoint by the trainer's own exporter. A collective of all ranks."""
        return str(self._trainer.export_hf(Path(path)))

    def pid(self) -> int:
        return os.getpid()


def make_checkpoint(path: str, kind: str, seed: int, sizes: Mapping[str, Any]) -> str:
    """A tiny random checkpoint, made in the trainer's environment (a Ray task)."""
    from weight_sync_integrations.checkpoints import make_checkpoint as make

    return str(make(path, kind, seed=seed, **sizes))


def reference_tokens(path: str, prompts: Sequence[Sequence[int]], count: int, dtype: str) -> list[list[int]]:
    """Greedy tokens of transformers on an exported checkpoint (a Ray task)."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).eval()
    result: list[list[int]] = []
    with torch.no_grad():
        for prompt in prompts:
            ids = torch.tensor([list(prompt)])
            for _ in range(count):
                ids = torch.cat([ids, model(ids).logits[:, -1].argmax(-1, keepdim=True)], dim=1)
            result.append(ids[0, len(prompt) :].tolist())
    return result


class RayTrainers:
    """A TrainerGroup over Ray actors."""

    def __init__(self, actors: Sequence[Any]) -> None:
        self.actors = list(actors)
        self.world = len(self.actors)

    def call(self, method: str, payloads: Mapping[int, Mapping[str, Any]], deadline: Deadline) -> dict[int, dict[str, Any]]:
        return gather({rank: self.actors[rank].call.remote(method, dict(p)) for rank, p in payloads.items()}, deadline, method)

    def run(self, name: str, *arguments: Any, deadline: Deadline) -> dict[int, Any]:
        """Call actor method `name` on every rank."""
        return gather({rank: getattr(actor, name).remote(*arguments) for rank, actor in enumerate(self.actors)}, deadline, name)


def gather(refs: Mapping[int, Any], deadline: Deadline, what: str) -> dict[int, Any]:
    """All results, by rank. Raises the first rank's own error with the others as notes; waits for all first."""
    import ray

    _, late = ray.wait(list(refs.values()), num_returns=len(refs), timeout=deadline.remaining())
    if late:
        ranks = sorted(rank for rank, ref in refs.items() if ref in late)
        error = DeadlineExceeded(f"trainer ranks {ranks}: {what} not done within {deadline.seconds:g} s")
        # A rank that failed in a collective is why the others are late.
        _, failed = _settled({rank: ref for rank, ref in refs.items() if rank not in ranks}, what)
        for rank, other in failed:
            error.add_note(f"also trainer rank {rank}: {type(other).__name__}: {other}")
        raise error
    results, failed = _settled(refs, what)
    if failed:
        first = failed[0][1]
        for rank, error in failed[1:]:
            first.add_note(f"also trainer rank {rank}: {type(error).__name__}: {error}")
        raise first
    return results


def _settled(refs: Mapping[int, Any], what: str) -> tuple[dict[int, Any], list[tuple[int, BaseException]]]:
    """(results, errors) of calls that are done, by rank."""
    import ray

    results: dict[int, Any] = {}
    failed: list[tuple[int, BaseException]] = []
    for rank, ref in refs.items():
        try:
            results[rank] = ray.get(ref)
        except ray.exceptions.RayTaskError as error:
            failed.append((rank, own_error(error)))
        except ray.exceptions.RayError as error:
            failed.append((rank, SessionError(f"trainer rank {rank}: its process is gone ({what}): {error}")))
    return results, failed


def own_error(error: Any) -> BaseException:
    """The error an actor raised. One of ours comes back as itself; a foreign one keeps Ray's text with the remote trace."""
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, WeightSyncError) else error
