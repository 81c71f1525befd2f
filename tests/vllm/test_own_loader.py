"""Engines whose live tensors are not the checkpoint's: what a sync brings is placed by vLLM's own loader (loader.py).

The kernels are vLLM's own for CPUs here: they pack weights of linear layers into private memory (with AMX tiles a tensor inside
a function, else an object of oneDNN), leave empty parameters behind, and rearrange experts. Only the one that requantises
weights to one scale is a stand-in, for a CPU lacks it. Two trainer ranks hold the rows of each HF tensor; what comes out must
be what an engine holds that loaded it from disk.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.exact.exact_vllm import TRANSPORT, WorkersEngine, transport
from tests.families_support import CHANNEL, TENSOR
from tests.own_loader_support import trainer_ranks
from tests.vllm.conftest import build_engine, greedy
from weight_sync.config import engine_yaml, family_for, family_yaml, quant_yaml
from weight_sync.errors import BindError, RolloutError, SessionError, VerifyError, WeightSyncError
from weight_sync.ids import Deadline
from weight_sync.layout.parallel import EngineDims
from weight_sync.session.connect import SyncSpec
from weight_sync.session.contracts import EngineDescription
from weight_sync.session.inprocess import InProcessTrainers
from weight_sync.session.inputs import Declared
from weight_sync.session.landing import Landing, To
from weight_sync.session.session import Timeouts, WeightSync
from weight_sync.session.source import SourceAgent
from weight_sync.session.verify import Level
from weight_sync_integrations.quantised import quantise_checkpoint


class Engine(WorkersEngine):
    """Says also what cannot be written, and raises what workers raised, as VllmEngine does."""

    def _each(self, method: str, payloads: Mapping[int, Mapping[str, Any]], deadline: Deadline) -> dict[int, dict[str, Any]]:
        try:
            return super()._each(method, payloads, deadline)
        except RuntimeError as error:
            kind = next((k for k in (BindError, VerifyError, RolloutError) if f"{k.__name__}: " in str(error)), RuntimeError)
            raise kind(str(error)) from None

    def describe(self, deadline: Deadline) -> EngineDescription:
        replies = self._all("describe", deadline)
        stuck = {f"rank {r} {name}": why for r, reply in replies.items() for name, why in reply["not_writable"].items()}
        return replace(super().describe(deadline), not_writable=stuck, no_loader=replies[0]["no_loader"])


def stock_engine(model: Path, **options: Any) -> Any:
    """An engine with vLLM's own CPU kernels, and a stand-in for the one that requantises, which a CPU lacks."""
    from vllm.model_executor.layers import utils
    from vllm.model_executor.layers.quantization.utils import w8a8_utils

    from weight_sync_integrations.vllm import cpu

    assert not hasattr(utils.dispatch_cpu_unquantized_gemm, cpu._MARK), "an earlier test put stand-ins into this process"
    os.environ["WEIGHT_SYNC_TRANSPORT"] = json.dumps(TRANSPORT)
    cpu.apply = lambda: None
    w8a8_utils.ops = SimpleNamespace(scaled_fp8_quant=scaled_fp8_quant_stand_in)
    return build_engine(model, **{"dtype": "bfloat16", **options})


def scaled_fp8_quant_stand_in(weight: Any, scale: Any) -> tuple[Any, Any]:
    """As the kernel does it: division by the scale, numbers out of range become the largest."""
    import torch

    return (weight.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale


def session(llm: Any, model: Path, export: Path, landing: Landing, tp: int = 1, level: Level = Level.DIGEST) -> WeightSync:
    from weight_sync.quant.emission import Quantisation
    from weight_sync.quant.published import from_hf

    config = json.loads((model / "config.json").read_text())
    quantisation = config.get("quantization_config")
    quant = None if quantisation is None else Quantisation(*from_hf(quantisation, quant_yaml)).to_json()
    convention = engine_yaml("vllm")
    dims = {"tp": tp, "remainder": convention["remainder"]}
    rollout = Declared(family_yaml(family_for(config)), config, dims, convention, quant=quant)
    engine = Engine(llm, model=config, sizes=EngineDims(**dims).sizes)
    agents = [SourceAgent(rank, transport) for rank in trainer_ranks(export)]
    spec = SyncSpec(None, rollout, landing=landing)
    limits = Timeouts(connect=60, sync=60, abort=60)
    return WeightSync(InProcessTrainers(agents), [engine], spec, pause="retract", timeouts=limits, level=level)


def state(worker: Any) -> dict[str, int]:
    """Fingerprints of everything that generation depends on, but what is an address."""
    from weight_sync_integrations.fingerprint import fingerprint
    from weight_sync_integrations.vllm import tensors

    found = tensors.find_all(tensors.models_of(worker))
    return {f.name: fingerprint(f.tensor) for f in found if not f.name.endswith((".kv_cache", "handler_tensor"))}


def tokens(llm: Any) -> list[list[int]]:
    llm.reset_prefix_cache()
    return greedy(llm)


def loaded_from_disk(export: Path, options: dict[str, Any]) -> dict[str, Any]:
    llm = stock_engine(export, **options)
    return {"tokens": tokens(llm), "state": llm.collective_rpc(state)}


def synced(model: Path, export: Path, options: dict[str, Any], budget: int, level: Level) -> dict[str, Any]:
    llm = stock_engine(model, **options)
    facts: dict[str, Any] = {"before": tokens(llm)}
    sync = session(llm, model, export, Landing(To.AUTO, budget), options.get("tensor_parallel_size", 1), level)
    connection = sync.connect()
    facts |= {"why": connection.by_loader, "waves": len(connection.schedule.waves), "after connect": tokens(llm)}
    facts["bytes"] = sync.sync(1).bytes
    facts |= {"tokens": tokens(llm), "state": llm.collective_rpc(state), "serving": sync.replicas[0].engine.serving}
    facts["again"] = (sync.check_weight_equal(2).version, tokens(llm))
    with pytest.raises(SessionError, match="live memory does not hold what was verified"):
        sync._lender()
    return facts


CASES: dict[str, tuple[str, dict[str, Any], Any, int, Level, dict[str, Any]]] = {
    "packed for AMX, tied head": ("qwen3", {"tie_word_embeddings": True}, None, 600_000, Level.CHECK_WEIGHT_EQUAL, {}),
    "packed by oneDNN, experts on two ranks": (
        "qwen3_moe", {}, None, 800_000, Level.FULL, {"tensor_parallel_size": 2, "dtype": "float32"},
    ),
    "fp8 with scales for rows, transposed": ("qwen3", {}, CHANNEL, 300_000, Level.DIGEST, {}),
    "fp8 with one scale for the tensor, requantised": ("qwen3", {}, TENSOR, 300_000, Level.DIGEST, {}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_an_engine_whose_weights_are_not_the_checkpoints_holds_what_a_load_from_disk_would_give(
    checkpoints: Any, forked: Callable[..., Any], tmp_path: Path, case: str
) -> None:
    kind, sizes, quantisation, budget, level, options = CASES[case]
    dtype = options.get("dtype", "bfloat16")
    model, export = (checkpoints(kind, seed=seed, dtype=dtype, num_hidden_layers=2, **sizes) for seed in (0, 1))
    served, wanted = model, export
    if quantisation is not None:
        served, wanted = (quantise_checkpoint(path, tmp_path / str(i), quantisation) for i, path in enumerate((model, export)))
    found, want = forked(synced, served, export, options, budget, level), forked(loaded_from_disk, wanted, options)

    assert ("left it empty" if quantisation is None else "transposed it") in found["why"]
    assert found["waves"] > 1
    assert found["after connect"] == found["before"] != want["tokens"]
    assert found["tokens"] == want["tokens"]
    assert found["state"] == want["state"]
    assert found["serving"]
    assert found["again"] == (2, want["tokens"])


def spoil_loader(worker: Any, how: str, name: str) -> None:
    """From now on the model's load_weights leaves `name` out, or fails there; "" puts it right again."""
    model = worker.model_runner.get_model()
    if not how:
        del model.load_weights
        return
    load = type(model).load_weights

    def load_weights(weights: Any) -> Any:
        def some() -> Any:
            for key, tensor in weights:
                if key == name and how == "raise":
                    raise ValueError("no such expert")
                if key != name:
                    yield key, tensor

        return load(model, some())

    model.load_weights = load_weights


def failing(model: Path, export: Path) -> dict[str, Any]:
    llm = stock_engine(model)
    facts: dict[str, Any] = {"before": tokens(llm)}

    def attempt(sync: WeightSync, verb: str = "sync") -> str:
        with pytest.raises(WeightSyncError) as caught:
            sync.sync(1) if verb == "sync" else sync.connect()
        engine = sync.replicas[0].engine
        facts.setdefault("stood", []).append((sync.version, engine.version, engine.serving))
        return str(caught.value)

    facts["live"] = attempt(session(llm, model, export, Landing(To.LIVE)), "connect")
    facts["small"] = attempt(session(llm, model, export, Landing(To.AUTO, 4096)), "connect")
    sync = session(llm, model, export, Landing(To.LOADER, 300_000))
    sync.connect()
    tensor = "model.layers.1.mlp.up_proj.weight"
    llm.collective_rpc(spoil_loader, args=("drop", tensor))
    facts["dropped"] = attempt(sync)
    llm.collective_rpc(spoil_loader, args=("", tensor))
    sync.connect()
    llm.collective_rpc(spoil_loader, args=("raise", tensor))
    facts["raised"] = attempt(sync)
    facts["rehearsed"] = attempt(sync, "connect")
    llm.collective_rpc(spoil_loader, args=("", tensor))
    facts["bytes"] = sync.sync(1).bytes
    return facts | {"tokens": tokens(llm), "serving": sync.replicas[0].engine.serving}


def test_a_loader_that_drops_a_tensor_or_fails_leaves_the_engine_paused_until_a_complete_sync(
    checkpoints: Any, forked: Callable[..., Any]
) -> None:
    model, export = (checkpoints("qwen3", seed=seed, dtype="bfloat16", num_hidden_layers=2) for seed in (0, 1))
    found, want = forked(failing, model, export), forked(loaded_from_disk, export, {})

    assert "weight_sync.landing.to=live writes into live tensors only" in found["live"]
    assert "qkv_proj.weight: post-processing packed it" in found["live"]
    assert "weight_sync.landing.budget=4096" in found["small"]
    assert "model.layers.1.mlp.up_proj.weight: 0 elements were copied" in found["dropped"]
    assert "vLLM's own loader failed: ValueError: no such expert" in found["raised"]
    assert "could not be recorded: ValueError: no such expert" in found["rehearsed"]
    # Refused before anything was paused; then paused by the sync that failed, and never resumed by it.
    assert found["stood"] == [(-1, -1, True)] * 2 + [(-1, -1, False)] * 3
    assert found["tokens"] == want["tokens"] != found["before"]
    assert found["serving"]
