"""Engines whose ranks are all models in one process: an engine's own classes, each rank built by itself.

One set of ranks is synced into; another is loaded by the engine's own load_weights from the trainer's export and is what the
first must equal.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from tests.exact.exact_cases import Engine
from weight_sync.ids import Deadline
from weight_sync.layout.parallel import EngineDims
from weight_sync.session.contracts import Receipt
from weight_sync.session.inprocess import InProcessEngine
from weight_sync.session.target import TargetAgent
from weight_sync.transport.memory import MemoryHub, MemoryTransport
from weight_sync_integrations.inventory import Inventory

HUB = MemoryHub()


def transport() -> MemoryTransport:
    # Part of every batch lands at once and the rest out of order, as a network does it.
    return MemoryTransport(HUB, landing_seed=7)


class Replica(Protocol):
    """One rank's model. scope(): inside it the engine takes this rank for its own.

    tensors(): what a plan writes. derived(): what the engine computes of it, anew in finish(). inventory(): of all there is.
    """

    model: Any
    coords: Mapping[str, int]

    def tensors(self) -> Mapping[str, Any]: ...

    def derived(self) -> Mapping[str, Any]: ...

    def load(self, tensors: Mapping[str, Any]) -> None: ...

    def loadable(self) -> AbstractContextManager[None]: ...

    def inventory(self) -> Inventory: ...

    def finish(self) -> None: ...

    def scope(self) -> AbstractContextManager[None]: ...


Build = Callable[[Path, Engine, int], Replica]
"""(checkpoint folder, sizes, rank) -> that rank of a new engine, not loaded."""


class ReplicaEngine(InProcessEngine):
    """All ranks of one engine; its loader is recorded when the session asks for the second witness."""

    def __init__(self, name: str, replicas: Sequence[Replica], *, model: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
        self.replicas = replicas
        agents = [
            TargetAgent(rank=rank, host="localhost", coords=r.coords, tensors=r.tensors, transport=transport)
            for rank, r in enumerate(replicas)
        ]
        super().__init__(name, agents, model=model, sizes=sizes)

    def record(self, tensors: Mapping[str, tuple[list[int], str]], deadline: Deadline) -> dict[int, dict[str, Any]]:
        return {rank: self._record(replica, tensors) for rank, replica in enumerate(self.replicas)}

    def finish(self, session: str, version: int, digest: str, deadline: Deadline) -> Receipt:
        receipt = super().finish(session, version, digest, deadline)
        for replica in self.replicas:
            with replica.scope():
                inventory = replica.inventory()
                inventory.require_all()
                inventory.seal()
                inventory.spoil()
            replica.finish()
            with replica.scope():
                inventory.check()
        return receipt

    @staticmethod
    def _record(replica: Replica, tensors: Mapping[str, tuple[list[int], str]]) -> dict[str, Any]:
        import torch

        from weight_sync_integrations.recorder import record

        specs = {name: (tuple(shape), getattr(torch, dtype)) for name, (shape, dtype) in tensors.items()}
        with replica.scope(), replica.loadable():
            seen = record(replica.model, specs, replica.model.load_weights)
        unexplained = {entry["tensor"] or f"parameter {entry['param']}": entry["operation"] for entry in seen.inexpressible}
        return {"shards": seen.shards, "unexplained": unexplained, "constants": seen.constants, "rewritten": seen.rewritten}


@dataclass
class Replicas:
    """The Rollout of one model and layout (see exact_session.py). remainder: of EngineDims."""

    model: Path
    case: Engine
    build: Build
    remainder: str
    engines: list[ReplicaEngine] = field(default_factory=list)
    _oracle: tuple[Path | None, list[Replica]] = (None, [])

    def __post_init__(self) -> None:
        config = json.loads((self.model / "config.json").read_text())
        sizes = EngineDims(**self.case.dims(self.remainder)).sizes
        for number in range(self.case.engines):
            replicas = self._loaded(self.model)
            self.engines.append(ReplicaEngine(f"engine{number}", replicas, model=config, sizes=sizes))
        tensors = _checkpoint(self.model)
        shapes = {name: (list(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in tensors.items()}
        self.constants = [
            [entry["constants"] for entry in engine.record(shapes, Deadline.after(60)).values()] for engine in self.engines
        ]

    def _loaded(self, weights: Path) -> list[Replica]:
        """A new replica of every rank, filled by the engine's own load_weights from the folder `weights`."""
        replicas = [self.build(self.model, self.case, rank) for rank in range(self.case.tp * self.case.pp)]
        for replica in replicas:
            replica.load(_checkpoint(weights))
        return replicas

    def scramble(self) -> None:
        from tests.exact.exact_bytes import scramble, spoil

        for engine, constants in zip(self.engines, self.constants, strict=True):
            for replica, regions in zip(engine.replicas, constants, strict=True):
                scramble(replica.tensors(), regions)
                spoil(replica.derived().values())

    def differing(self, export: Path) -> tuple[list[str], int]:
        from tests.exact.exact_bytes import differing

        lines, count = [], 0
        if self._oracle[0] != export:
            self._oracle = (export, self._loaded(export))
        for rank, oracle in enumerate(self._oracle[1]):
            wanted = {**oracle.tensors(), **oracle.derived()}
            for engine in self.engines:
                replica = engine.replicas[rank]
                lines += differing({**replica.tensors(), **replica.derived()}, wanted, f"{engine.name} rank {rank}")
                count += len(wanted)
        return lines, count


@lru_cache(maxsize=2)
def _checkpoint(folder: Path) -> dict[str, Any]:
    from weight_sync_integrations.sglang.replica import read_checkpoint

    return read_checkpoint(folder)
