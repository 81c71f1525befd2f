"""Runs in vLLM's environment: python -m tests.exact.exact_vllm FOLDER ANSWERS CASES

Each engine is vLLM's own LLM with its real workers, forked (tests/vllm/conftest.py). It holds the checkpoint that the trainers
started from; trainer ranks in the engine's process write into the workers with `cma`. What must come out is what vLLM's own
load_weights makes of the trainer's export, in the same live parameters. A model that vLLM cannot run on a CPU is built rank by
rank instead (exact_replicas.py).
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.exact import exact_replicas
from tests.exact.exact_cases import ENGINES, Engine, runs
from tests.exact.exact_session import answer, read_cases, served
from tests.vllm.conftest import ENVIRONMENT, build_engine, run_forked
from tests.vllm.replica_support import VllmRank, build_rank
from weight_sync.ids import Deadline
from weight_sync.layout.parallel import EngineDims
from weight_sync.session.contracts import Receipt
from weight_sync.session.inprocess import InProcessEngine
from weight_sync.transport import registry
from weight_sync_integrations.inventory import Inventory, Policy

TOKEN = ENVIRONMENT["WEIGHT_SYNC_TOKEN"]
TRANSPORT = {"name": "cma", "any_tracer": True}


def transport() -> Any:
    options = dict(TRANSPORT)
    return registry.create(options.pop("name"), **options)


class _Rank:
    """InProcessEngine lists its agents by rank; the calls go to all workers together."""

    def __init__(self, rank: int) -> None:
        self.rank = rank


class WorkersEngine(InProcessEngine):
    """A vLLM engine in this process: every worker is reached through the worker extension, as over HTTP."""

    def __init__(self, llm: Any, *, model: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
        self._llm = llm
        super().__init__("engine0", [_Rank(r) for r in range(sizes["tp"] * sizes["pp"])], model=model, sizes=sizes)  # type: ignore[misc]

    def _each(self, method: str, payloads: Mapping[int, Mapping[str, Any]], deadline: Deadline) -> dict[int, dict[str, Any]]:
        request = {"method": method, "by_rank": {str(rank): dict(payload) for rank, payload in payloads.items()}}
        replies = [json.loads(text) for text in self._llm.collective_rpc("weight_sync_call", args=(TOKEN, json.dumps(request)))]
        if refused := [f"rank {r['rank']}: {r['error']['type']}: {r['error']['message']}" for r in replies if not r["ok"]]:
            raise RuntimeError(f"{method}: " + "; ".join(refused))
        return {reply["rank"]: reply["reply"] for reply in replies}

    def record(self, tensors: Mapping[str, tuple[list[int], str]], deadline: Deadline) -> dict[int, dict[str, Any]]:
        specs = {name: [list(shape), dtype] for name, (shape, dtype) in tensors.items()}
        replies = self._all("record", deadline, tensors=specs)
        for reply in replies.values():
            unexplained = reply["inexpressible"]
            reply["unexplained"] = {e["tensor"] or f"parameter {e['param']}": e["operation"] for e in unexplained}
        return replies

    def finish(self, session: str, version: int, digest: str, deadline: Deadline) -> Receipt:
        receipt = super().finish(session, version, digest, deadline)
        self._all("commit", deadline, session=session, version=version, digest=digest)
        return receipt


class Workers:
    """The Rollout of one model and layout (see exact_session.py)."""

    def __init__(self, model: Path, case: Engine) -> None:
        options: dict[str, Any] = {"tensor_parallel_size": case.tp, "pipeline_parallel_size": case.pp, "dtype": "bfloat16"}
        if case.moe_ep > 1:
            options["enable_expert_parallel"] = True
        self._llm = build_engine(model, **options)
        config = json.loads((model / "config.json").read_text())
        engine = WorkersEngine(self._llm, model=config, sizes=EngineDims(**case.dims("inner")).sizes)
        self.engines: Sequence[WorkersEngine] = [engine]
        self._constants = {rank: seen["constants"] for rank, seen in engine.record(_shapes(model), Deadline.after(60)).items()}

    def scramble(self) -> None:
        self._llm.collective_rpc(_scramble, args=(self._constants,))

    def differing(self, export: Path) -> tuple[list[str], int]:
        answers = self._llm.collective_rpc(_differing, args=(export, self._constants))
        return [line for lines, _ in answers for line in lines], sum(count for _, count in answers)


def _shapes(folder: Path) -> dict[str, tuple[list[int], str]]:
    from safetensors.torch import load_file

    tensors = load_file(folder / "model.safetensors")
    return {name: (list(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in tensors.items()}


# -- functions that run in the workers; collective_rpc passes the worker first -----------------------------------------


def _live(worker: Any) -> dict[str, Any]:
    from weight_sync_integrations.vllm import live

    found = live.inspect(worker.model_runner.get_model())
    assert not found.not_writable, found.not_writable
    return found.tensors


def _scramble(worker: Any, constants: Mapping[int, list[Any]]) -> None:
    from tests.exact.exact_bytes import scramble

    scramble(_live(worker), constants[worker.rank])


def _differing(worker: Any, export: Path, constants: Mapping[int, list[Any]]) -> tuple[list[str], int]:
    """Keep what the live parameters hold, let vLLM load `export` over them, compare, and put the kept bytes back."""
    from tests.exact.exact_bytes import as_bytes, differing, scramble
    from weight_sync_integrations.vllm.worker import _answer

    live = _live(worker)
    kept = {name: tensor.clone() for name, tensor in live.items()}
    scramble(live, constants[worker.rank])
    _answer(worker, "load", {"path": str(export)})
    lines = differing(kept, live, f"rank {worker.rank}")
    for name, tensor in live.items():
        as_bytes(tensor).copy_(as_bytes(kept[name]))
    return lines, len(live)


@dataclass(frozen=True, eq=False)
class Rank:
    """A rank of vLLM's own model class in this process, for exact_replicas.py."""

    built: VllmRank
    coords: Mapping[str, int]

    @property
    def model(self) -> Any:
        return self.built.model

    def tensors(self) -> dict[str, Any]:
        from weight_sync_integrations.vllm.live import inspect

        return inspect(self.model).tensors

    def load(self, tensors: Mapping[str, Any]) -> None:
        import torch

        with self.scope(), torch.no_grad():
            self.model.load_weights(iter(tensors.items()))
            self.built.postprocess()

    def derived(self) -> dict[str, Any]:
        """Tensors that vLLM computes from weights."""
        from weight_sync_integrations.vllm import tensors

        made = tensors.derived(self.model)
        return {f.name: f.tensor.detach() for f in tensors.find_all([("target", self.model)]) if f.name in made}

    def loadable(self) -> Any:
        from weight_sync_integrations.vllm.record import loadable

        return loadable(self.model)

    def inventory(self) -> Inventory:
        from weight_sync_integrations.vllm import tensors

        models = [("target", self.model)]
        policy = Policy(tensors.RULES, recomputes=tensors.RECOMPUTES)
        return Inventory(lambda: tensors.find_all(models), self.tensors().values(), policy, "a rank")

    def finish(self) -> None:
        """What our worker does when a session ends."""
        from weight_sync_integrations.vllm import tensors

        with self.scope():
            tensors.recompute([("target", self.model)], self.derived(), self.built.config.model_config.dtype)

    def scope(self) -> Any:
        return self.built.scope()


def build_one(model: Path, case: Engine, rank: int) -> Rank:
    coords = EngineDims(**case.dims("inner")).coords(rank)
    return Rank(build_rank(model, case.tp, case.pp, ep=case.moe_ep > 1, rank=rank), coords)


def run_replicas(root: Path, answers: Path, model: Path, engine: str, cases: list[dict[str, str]]) -> None:
    """In the forked child: the ranks of one engine, all its cases."""
    from weight_sync_integrations.vllm import cpu

    cpu.apply()
    rollout = exact_replicas.Replicas(model, ENGINES[engine], build_one, "inner")
    for case in cases:
        answer(answers, case, root, rollout, exact_replicas.transport)


def run_group(root: Path, answers: Path, model: Path, engine: str, cases: list[dict[str, str]]) -> None:
    """In the forked child: one engine, all its cases."""
    rollout = Workers(model, ENGINES[engine])
    for case in cases:
        answer(answers, case, root, rollout, transport)


def main(root: Path, answers: Path, cases: Path) -> None:
    import importlib

    os.environ.update(ENVIRONMENT)
    os.environ["WEIGHT_SYNC_TRANSPORT"] = json.dumps(TRANSPORT)
    import torch

    torch.set_num_threads(1)
    for module in ("vllm.entrypoints.llm", "vllm.v1.engine.llm_engine", "vllm.v1.worker.cpu_worker"):
        importlib.import_module(module)
    for (model, engine, quant), group in read_cases(cases).items():
        run = run_group if runs("vllm", model, engine, quant) else run_replicas
        run_forked(run, root, answers, served(root, model, quant), engine, group, seconds=400)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
