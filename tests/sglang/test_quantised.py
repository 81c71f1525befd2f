"""Quantised checkpoints in SGLang: the declared layout against its own loader, and what post-processing leaves of weights."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from families_support import CHANNEL, YARN, quantised_model_of, rollout_layout
from sglang_support import same_bytes

from weight_sync.errors import ParallelError, VerifyError
from weight_sync.layout.witness import agree
from weight_sync_integrations.inventory import Inventory, Policy
from weight_sync_integrations.loading import changed, seen
from weight_sync_integrations.quantised import fp8_config, quantise_checkpoint
from weight_sync_integrations.recorder import Recording, record
from weight_sync_integrations.sglang import live
from weight_sync_integrations.sglang import tensors as known
from weight_sync_integrations.sglang.replica import EngineSizes, Replica, as_on_a_gpu, build_replica, read_checkpoint

Make = Callable[..., Path]
Quantised = Callable[..., Path]

SIZES = {
    "tp1": EngineSizes(),
    "tp2": EngineSizes(tp=2),
    "tp4": EngineSizes(tp=4),
    "tp2ep2": EngineSizes(tp=2, ep=2),
    "tp4ep2": EngineSizes(tp=4, ep=2),
    "pp2": EngineSizes(pp=2),
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"vocab_size": 250},
    "deepseek_v3": {"vocab_size": 250, "rope_parameters": YARN},
    "glm4_moe": {"vocab_size": 250},
}
CASES = [("qwen3_moe", "tp4ep2"), ("qwen3_moe", "pp2"), ("deepseek_v3", "tp2"), ("deepseek_v3", "tp2ep2"), ("glm4_moe", "tp4")]
"""In blocks of 32 by 32: KV heads on more ranks than there are, scales of a fused parameter whose last block is short."""


@pytest.fixture(scope="module")
def quantised(checkpoint: Make, tmp_path_factory: pytest.TempPathFactory) -> Quantised:
    """quantised(kind, quantization_config=None) -> folder; None: fp8 in blocks of 32 by 32."""
    made: dict[str, Path] = {}

    def make(kind: str, quantization: Mapping[str, Any] | None = None) -> Path:
        source = checkpoint(kind, num_hidden_layers=2, **MODELS[kind])
        config = json.loads((source / "config.json").read_text())
        quantization = quantization or fp8_config(config, (32, 32))
        key = json.dumps([kind, quantization])
        if key not in made:
            made[key] = quantise_checkpoint(source, tmp_path_factory.mktemp("quantised") / kind, quantization)
        return made[key]

    return make


def recorded(replica: Replica, tensors: Mapping[str, torch.Tensor]) -> Recording:
    with replica.scope():
        return record(replica.model, tensors, replica.model.load_weights)


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_values_and_scales_are_declared_where_sglangs_own_loader_puts_them(quantised: Quantised, kind: str, name: str) -> None:
    path, sizes = quantised(kind), SIZES[name]
    tensors = read_checkpoint(path)
    parallel = {"tp": sizes.tp, "pp": sizes.pp, "moe_ep": sizes.ep}
    layout, computed = rollout_layout(quantised_model_of(path), "sglang", parallel)
    scales = 0
    for rank in range(sizes.world):
        replica = build_replica(path, rank, sizes)
        found = recorded(replica, tensors)
        live = {n: (tuple(t.shape), str(t.dtype).removeprefix("torch.")) for n, t in replica.tensors().items()}
        assert {p.name: (p.shape, p.dtype) for p in layout.rank_params(rank)} == live
        agree(layout, rank, found.shards, {e["tensor"] or e["param"]: e["operation"] for e in found.inexpressible}, computed)
        assert not found.rewritten
        assert not set(found.uncovered) & set(live)
        scales += sum(name.endswith("weight_scale_inv") for name in live)
    assert scales > 0


def served(path: Path) -> Replica:
    """A replica that was loaded as a server that takes part in a job loads it: by SGLang's loader, watched."""
    from sglang.srt.model_loader.loader import DefaultModelLoader

    replica = build_replica(path, 0)
    before = DefaultModelLoader.load_weights_and_postprocess
    with replica.scope(), torch.no_grad(), as_on_a_gpu(), live.watched():
        tensors = iter(read_checkpoint(path).items())
        DefaultModelLoader.load_weights_and_postprocess(replica.model, tensors, torch.device("cpu"))
    assert DefaultModelLoader.load_weights_and_postprocess is before
    return replica


def scheduler_of(replica: Replica, device: str = "cpu", **arguments: Any) -> Any:
    runner = types.SimpleNamespace(model=replica.model)
    args = types.SimpleNamespace(**arguments)
    return types.SimpleNamespace(
        device=device, server_args=args, tp_worker=types.SimpleNamespace(model_runner=runner), draft_worker=None
    )


def test_weights_in_blocks_stay_as_loaded(quantised: Quantised) -> None:
    replica = served(quantised("deepseek_v3"))

    assert live.not_writable(replica.model) == {}
    assert "load_weights" not in vars(replica.model)
    assert known.refusals(scheduler_of(replica)) == []


def test_an_engine_that_transposes_what_it_loaded_says_so_by_the_tensors_names(quantised: Quantised) -> None:
    replica = served(quantised("qwen3_moe", CHANNEL))

    found = live.not_writable(replica.model)
    linear = {n for n in replica.tensors() if n.endswith(("qkv_proj.weight", "o_proj.weight"))}
    assert set(found) == linear
    assert set(found.values()) == {"post-processing transposed it"}
    assert known.not_writable(scheduler_of(replica)) == found
    # Not written in place, but loaded by SGLang's own loader: test_own_loader.py.
    assert known.refusals(scheduler_of(replica)) == []
    assert known.no_loader(scheduler_of(replica)) == ""
    drafted = scheduler_of(replica)
    runner = types.SimpleNamespace(model=replica.model)
    drafted.draft_worker = types.SimpleNamespace(weight_update_runners=lambda: [("draft", runner)])
    assert known.no_loader(drafted) == "it runs a draft model (draft), which is written in place only"


def test_a_quantised_model_whose_loading_nobody_saw_is_refused(quantised: Quantised, checkpoint: Make) -> None:
    unseen = build_replica(quantised("qwen3_moe"), 0).model
    assert set(live.not_writable(unseen).values()) == {live._UNSEEN}
    assert live.no_loader(unseen) == live._UNSEEN
    assert live.not_writable(build_replica(checkpoint("qwen3_moe", num_hidden_layers=2, vocab_size=250), 0).model) == {}


def test_what_post_processing_does_to_a_tensor_is_told_apart() -> None:
    w = torch.arange(12.0).reshape(3, 4)
    names = ("same", "moved", "turned", "swapped", "empty", "gone")
    loaded = seen((name, w) for name in names)
    now = {"same": w, "moved": w.clone(), "turned": w.t(), "swapped": w.flip(0), "empty": w[:0], "new": w}

    reasons = changed(loaded, now)

    assert set(reasons) == {"turned", "swapped", "empty", "gone", "new"}
    assert reasons["turned"] == "post-processing transposed it"
    assert "rearranged or requantised" in reasons["swapped"]
    assert "left it empty" in reasons["empty"]


def inventory_of(replica: Replica, **policy: Any) -> Inventory:
    found = Inventory(
        lambda: known.find_all([("target", replica.model)]),
        replica.tensors().values(),
        Policy(known.RULES, recomputes=known.RECOMPUTES, **policy),
        "rollout rank 0",
    )
    found.require_all()
    found.seal()
    return found


def loaded(path: Path) -> Replica:
    replica = build_replica(path, 0)
    replica.load(read_checkpoint(path))
    return replica


def test_absorbed_matrices_of_fp8_weights_are_made_anew_by_sglangs_own_finish_and_proven(quantised: Quantised) -> None:
    replica = loaded(quantised("deepseek_v3"))
    wanted = {name: tensor.clone() for name, tensor in replica.derived().items()}
    assert {name.rpartition(".")[2] for name in wanted} == {"w_kc", "w_vc", "w_scale"}
    # Quantised for the tensor: the largest magnitude is there, so no finite number of fp8 can be the marker.
    assert any(float(t.float().min()) == -448 for n, t in wanted.items() if not n.endswith("w_scale"))
    inventory = inventory_of(replica)
    inventory.spoil()
    with pytest.raises(VerifyError, match=r"w_kc was not recomputed"):
        inventory.check()
    replica.finish()

    assert inventory.check()["derived"] == len(wanted)
    made = replica.derived()
    assert all(same_bytes(made[name].contiguous(), wanted[name].contiguous()) for name in wanted)


def test_a_scale_that_is_bound_to_another_tensor_is_refused_where_graphs_were_captured(quantised: Quantised) -> None:
    replica = loaded(quantised("deepseek_v3"))
    inventory = inventory_of(replica, captured=True)
    inventory.spoil()
    replica.finish()
    with pytest.raises(
        VerifyError, match=r"w_scale was bound to another tensor, and captured graphs still read the one before"
    ):
        inventory.check()
    live._REASONS[replica.model] = {}

    (refusal,) = known.refusals(scheduler_of(replica, device="cuda"))
    assert "model.layers.0.self_attn.w_scale" in refusal
    assert "disable_cuda_graph" in refusal
    assert known.refusals(scheduler_of(replica, device="cuda", disable_cuda_graph=True)) == []


def test_finishing_leaves_values_and_scales_as_they_were_written(quantised: Quantised) -> None:
    replica = loaded(quantised("glm4_moe"))
    before = {name: tensor.clone() for name, tensor in replica.tensors().items()}
    places = {name: tensor.data_ptr() for name, tensor in replica.tensors().items()}
    for _ in range(2):
        replica.finish()

    now = replica.tensors()
    assert all(same_bytes(now[name], before[name]) for name in before)
    assert {name: tensor.data_ptr() for name, tensor in now.items()} == places


def test_an_engine_shard_that_is_not_whole_blocks_is_named_with_the_sizes_that_are(quantised: Quantised) -> None:
    path = quantised("qwen3_moe", fp8_config({"model_type": "qwen3_moe", "num_hidden_layers": 2}, (64, 64)))

    with pytest.raises(ParallelError, match=r"q_proj\.weight.* 0 to 32 of dim 0 \(size 128\).* of 64; .*legal sizes.*: 1, 2$"):
        rollout_layout(quantised_model_of(path), "sglang", {"tp": 4})


def test_a_checkpoint_of_ours_with_powers_of_two_is_what_sglang_itself_requantises_to(checkpoint: Make, tmp_path: Path) -> None:
    """SGLang's requantisation for DeepGEMM, which is plain torch and needs no GPU: per_block_cast_to_fp8 of 128 by 128."""
    from sglang.srt.layers.quantization.fp8_utils import quant_weight_ue8m0

    source = checkpoint("deepseek_v3", num_hidden_layers=2, **MODELS["deepseek_v3"])
    config = json.loads((source / "config.json").read_text())
    made = read_checkpoint(quantise_checkpoint(source, tmp_path / "made", fp8_config(config, ue8m0=True)))
    weights = read_checkpoint(source)
    scaled = [name.removesuffix("_scale_inv") for name in made if name.endswith("_scale_inv")]
    assert len(scaled) > 20
    for name in scaled:
        values, scales = quant_weight_ue8m0(weights[name], [128, 128])
        assert same_bytes(made[name], values), name
        assert same_bytes(made[f"{name}_scale_inv"], scales), name
    assert any(weights[name].shape[0] % 128 for name in scaled), "no last block is short"
