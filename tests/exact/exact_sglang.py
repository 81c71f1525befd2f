"""Runs in SGLang's environment: python -m tests.exact.exact_sglang FOLDER ANSWERS CASES

Engines are replicas: SGLang's own model classes, every rank of an engine in this process. One set is synced into; another is
loaded by SGLang's own load_weights from the trainer's export and is what the first must equal.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from tests.exact.exact_cases import ENGINES, Engine
from tests.exact.exact_session import answer, read_cases
from weight_sync.ids import Deadline
from weight_sync.layout.parallel import EngineDims
from weight_sync.session.inprocess import InProcessEngine
from weight_sync.session.target import TargetAgent
from weight_sync.transport.memory import MemoryHub, MemoryTransport

HUB = MemoryHub()


def transport() -> MemoryTransport:
    # Part of every batch lands at once and the rest out of order, as a network does it.
    return MemoryTransport(HUB, landing_seed=7)


class ReplicaEngine(InProcessEngine):
    """All ranks of one engine; its loader is recorded when the session asks for the second witness."""

    def __init__(self, name: str, replicas: list[Any], *, model: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
        self.replicas = replicas
        agents = [
            TargetAgent(rank=rank, host="localhost", coords=r.coords, tensors=r.tensors, transport=transport)
            for rank, r in enumerate(replicas)
        ]
        super().__init__(name, agents, model=model, sizes=sizes)

    def record(self, tensors: Mapping[str, tuple[list[int], str]], deadline: Deadline) -> dict[int, dict[str, Any]]:
        return {rank: self._record(replica, tensors) for rank, replica in enumerate(self.replicas)}

    @staticmethod
    def _record(replica: Any, tensors: Mapping[str, tuple[list[int], str]]) -> dict[str, Any]:
        import torch

        from weight_sync_integrations.recorder import record

        specs = {name: (tuple(shape), getattr(torch, dtype)) for name, (shape, dtype) in tensors.items()}
        with replica.scope():
            seen = record(replica.model, specs, replica.model.load_weights)
        unexplained = {entry["tensor"] or f"parameter {entry['param']}": entry["operation"] for entry in seen.inexpressible}
        return {"shards": seen.shards, "unexplained": unexplained, "constants": seen.constants}


@dataclass
class Replicas:
    """The Rollout of one model and layout (see exact_session.py)."""

    model: Path
    case: Engine
    engines: list[ReplicaEngine] = field(default_factory=list)
    _oracle: tuple[Path | None, list[Any]] = (None, [])

    def __post_init__(self) -> None:
        import json

        config = json.loads((self.model / "config.json").read_text())
        sizes = EngineDims(**self.case.dims("last")).sizes
        for number in range(self.case.engines):
            replicas = loaded(self.model, self.case, self.model)
            self.engines.append(ReplicaEngine(f"engine{number}", replicas, model=config, sizes=sizes))
        tensors = _checkpoint(self.model)
        shapes = {name: (list(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in tensors.items()}
        self.constants = [
            [entry["constants"] for entry in engine.record(shapes, Deadline.after(60)).values()] for engine in self.engines
        ]

    def scramble(self) -> None:
        from tests.exact.exact_bytes import scramble

        for engine, constants in zip(self.engines, self.constants, strict=True):
            for replica, regions in zip(engine.replicas, constants, strict=True):
                scramble(replica.tensors(), regions)

    def differing(self, export: Path) -> tuple[list[str], int]:
        from tests.exact.exact_bytes import differing

        lines, count = [], 0
        if self._oracle[0] != export:
            self._oracle = (export, loaded(self.model, self.case, export))
        for rank, oracle in enumerate(self._oracle[1]):
            wanted = oracle.tensors()
            for engine in self.engines:
                lines += differing(engine.replicas[rank].tensors(), wanted, f"{engine.name} rank {rank}")
                count += len(wanted)
        return lines, count


def loaded(model: Path, case: Engine, weights: Path) -> list[Any]:
    """A new replica of every rank, filled by SGLang's own load_weights from the folder `weights`."""
    from weight_sync_integrations.sglang.replica import EngineSizes, build_replica

    sizes = EngineSizes(tp=case.tp, pp=case.pp, ep=case.moe_ep, attn_dp=case.attn_dp)
    replicas = [build_replica(model, rank, sizes) for rank in range(sizes.world)]
    for replica in replicas:
        replica.load(_checkpoint(weights))
    return replicas


@lru_cache(maxsize=2)
def _checkpoint(folder: Path) -> dict[str, Any]:
    from weight_sync_integrations.sglang.replica import read_checkpoint

    return read_checkpoint(folder)


def main(root: Path, answers: Path, cases: Path) -> None:
    from weight_sync_integrations.sglang.replica import prepare_cpu

    prepare_cpu()
    import torch

    torch.set_num_threads(1)
    for (model, engine), group in read_cases(cases).items():
        rollout = Replicas(root / "models" / model, ENGINES[engine])
        for case in group:
            answer(answers, case, root, rollout, transport)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
