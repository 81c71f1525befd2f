"""Quantised checkpoints in vLLM: the declared layout against its own loader, and what post-processing leaves of weights.

On a CPU without AMX tiles vLLM has no fp8 kernels; those that run here are stand-ins (weight_sync_integrations.vllm.cpu_fp8).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
from conftest import build_engine, greedy
from families_support import CHANNEL, YARN, quantised_model_of, rollout_layout
from replica_support import vllm_rank

from weight_sync.layout.witness import agree
from weight_sync_integrations.quantised import fp8_config, quantise_checkpoint

Quantised = Callable[..., Path]

SIZES: dict[str, dict[str, int]] = {"tp1": {"tp": 1}, "tp2": {"tp": 2}, "tp4": {"tp": 4}, "tp2ep2": {"tp": 2, "moe_ep": 2}}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"vocab_size": 250},
    "deepseek_v3": {"vocab_size": 250, "rope_parameters": YARN},
    "glm4_moe": {"vocab_size": 250},
    "qwen3": {"vocab_size": 250},
}
CASES = [("qwen3_moe", "tp2ep2"), ("deepseek_v3", "tp2"), ("glm4_moe", "tp4")]


@pytest.fixture(scope="module", autouse=True)
def plain_cpu(vllm_imported: None) -> None:
    from weight_sync_integrations.vllm import cpu

    cpu.apply()


@pytest.fixture(scope="module")
def quantised(checkpoints: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Quantised:
    """quantised(kind, quantization_config=None, seed=0) -> folder; None: fp8 in blocks of 32 by 32."""
    made: dict[str, Path] = {}

    def make(kind: str, quantization: Mapping[str, Any] | None = None, seed: int = 0) -> Path:
        source = checkpoints(kind, dtype="bfloat16", num_hidden_layers=2, seed=seed, **MODELS[kind])
        config = json.loads((source / "config.json").read_text())
        quantization = quantization or fp8_config(config, (32, 32))
        key = json.dumps([kind, seed, quantization])
        if key not in made:
            made[key] = quantise_checkpoint(source, tmp_path_factory.mktemp("quantised") / kind, quantization)
        return made[key]

    return make


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_values_and_scales_are_declared_where_vllms_own_loader_puts_them(quantised: Quantised, kind: str, name: str) -> None:
    from safetensors.torch import load_file

    from weight_sync_integrations.recorder import record
    from weight_sync_integrations.vllm.live import weights

    path, parallel = quantised(kind), SIZES[name]
    tensors = load_file(path / "model.safetensors")
    layout, computed = rollout_layout(quantised_model_of(path), "vllm", parallel)
    scales = 0
    for rank in range(layout.world):
        with vllm_rank(path, parallel.get("tp", 1), 1, ep="moe_ep" in parallel, rank=rank) as replica:
            seen = record(replica, tensors, replica.load_weights)
            live: dict[int, tuple[str, tuple[int, ...], str]] = {}
            for weight, tensor in weights(replica):
                live.setdefault(tensor.data_ptr(), (weight, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")))
        assert {p.name: (p.shape, p.dtype) for p in layout.rank_params(rank)} == {n: (s, d) for n, s, d in live.values()}
        agree(layout, rank, seen.shards, {e["tensor"] or e["param"]: e["operation"] for e in seen.inexpressible}, computed)
        assert not seen.rewritten
        assert not set(seen.uncovered) & {name for name, _, _ in live.values()}
        scales += sum(name.endswith("weight_scale_inv") for name, _, _ in live.values())
    assert scales > 0


def reload_in_place(model: Path, other: Path) -> dict[str, Any]:
    """In the forked engine: load other weights into the live parameters, as a sync writes them, and see what vLLM computes."""
    from weight_sync_integrations.vllm.worker import _answer

    llm = build_engine(model, dtype="bfloat16")

    def on_worker(work: Any, *args: Any) -> Any:
        return llm.collective_rpc(work, args=args)[0]

    stuck, entries = on_worker(look)
    found = {"stuck": stuck, "entries": entries, "before": greedy(llm)}
    on_worker(_answer, "load", {"path": str(other)})
    llm.reset_prefix_cache()
    found["in place"] = greedy(llm)
    on_worker(reload_by_vllm, str(other))
    llm.reset_prefix_cache()
    found |= {"reloaded": greedy(llm), "apart": on_worker(look)[1], "rebuilt": on_worker(rebuild), "again": on_worker(look)[1]}
    on_worker(_answer, "load", {"path": str(model)})
    llm.reset_prefix_cache()
    return found | {"first again": greedy(llm)}


def reload_by_vllm(worker: Any, path: str) -> None:
    worker.model_runner.reload_weights(weights_path=path)


def rebuild(worker: Any) -> list[str]:
    from weight_sync_integrations.vllm import tensors

    return tensors.rebuild_kernels(tensors.models_of(worker))


def look(worker: Any) -> tuple[dict[str, str], list[tuple[str, str | None]]]:
    from weight_sync_integrations.vllm import live
    from weight_sync_integrations.vllm.worker import _inventory

    stuck = live.inspect(worker.model_runner.get_model()).not_writable
    return stuck, [(entry["name"], entry["keep"]) for entry in _inventory(worker, {})["entries"]]


def test_scales_written_in_place_are_those_that_vllms_moe_kernel_reads(
    quantised: Quantised, forked: Callable[..., Any]
) -> None:
    found = forked(reload_in_place, quantised("qwen3_moe"), quantised("qwen3_moe", seed=1))

    assert found["stuck"] == {}
    assert kernels(found["entries"]) == ["alias"] * 4
    assert None not in dict(found["entries"]).values()
    assert found["before"] != found["in place"] == found["reloaded"]
    # vLLM's own reload leaves kernels with scales of their own: refused as unknown, unless they can be made anew.
    assert kernels(found["apart"]) == [None] * 4
    assert found["rebuilt"] == [f"model.layers.{layer}.mlp.experts.routed_experts" for layer in range(2)]
    assert found["again"] == found["entries"]
    assert found["first again"] == found["before"]


def kernels(entries: list[tuple[str, str | None]]) -> list[str | None]:
    return [keep for name, keep in entries if ".quant_method." in name and name.endswith(".scale")]


def stuck_of(model: Path) -> dict[str, str]:
    return build_engine(model, dtype="bfloat16").collective_rpc(look)[0][0]


def test_scales_for_rows_make_vllm_transpose_its_linear_weights_which_is_refused(
    quantised: Quantised, forked: Callable[..., Any]
) -> None:
    found = forked(stuck_of, quantised("qwen3", CHANNEL))

    assert {name.split(".", 4)[-1] for name in found} == {f"{name}_proj.weight" for name in ("qkv", "o", "gate_up", "down")}
    assert set(found.values()) == {"post-processing transposed it"}


def test_a_checkpoint_of_ours_with_scales_for_rows_is_what_compressed_tensors_makes_of_the_weights(
    checkpoints: Callable[..., Path], quantised: Quantised
) -> None:
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import quantize
    from compressed_tensors.quantization.utils import calculate_qparams
    from safetensors.torch import load_file

    args = QuantizationArgs.model_validate(CHANNEL["config_groups"]["group_0"]["weights"])
    source = checkpoints("qwen3", dtype="bfloat16", num_hidden_layers=2, seed=0, **MODELS["qwen3"])
    weights, made = load_file(source / "model.safetensors"), load_file(quantised("qwen3", CHANNEL) / "model.safetensors")
    scaled = [name.removesuffix("_scale") for name in made if name.endswith("_scale")]
    assert len(scaled) == 14
    for name in scaled:
        w = weights[name]
        scale, zero = calculate_qparams(w.amin(1, keepdim=True), w.amax(1, keepdim=True), args)
        assert made[f"{name}_scale"].equal(scale), name
        assert made[name].view(torch.uint8).equal(quantize(w, scale, zero, args, torch.float8_e4m3fn).view(torch.uint8)), name
