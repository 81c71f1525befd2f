"""The built-in Megatron trainer: exact load and export, real steps, clear refusals."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from weight_sync.errors import ParallelError

LAYOUTS = [
    pytest.param("qwen3", {"vocab_size": 200}, 1, {}, id="one rank, padded vocabulary"),
    pytest.param(
        "qwen3", {"vocab_size": 200, "tie_word_embeddings": True}, 4, {"tp": 2, "pp": 2}, id="tied, padded vocabulary"
    ),
    pytest.param("qwen3", {"vocab_size": 200}, 4, {"tp": 4}, id="tp cuts inside a KV group"),
    pytest.param("qwen3_moe", {}, 4, {"tp": 2, "pp": 2, "ep": 2}, id="the demo's layout"),
    pytest.param("qwen3_moe", {}, 4, {"pp": 2, "vpp": 2, "etp": 2}, id="virtual stages, cut experts, dp 2"),
    pytest.param("qwen3_moe", {"dtype": "float32"}, 2, {"ep": 2}, id="float32"),
]


def round_trip(rank: int, source: Path, parallel: dict[str, int], out: Path) -> list[float]:
    from weight_sync_integrations.megatron.model import build

    trainer = build(source, parallel)
    trainer.export_hf(out / "loaded")
    losses = [trainer.train_step() for _ in range(3)]
    trainer.export_hf(out / "trained")
    return losses


@pytest.mark.parametrize(("kind", "sizes", "world", "parallel"), LAYOUTS)
def test_a_checkpoint_survives_loading_and_export_bit_for_bit_and_a_step_changes_it(
    kind: str,
    sizes: dict[str, Any],
    world: int,
    parallel: dict[str, int],
    checkpoint: Callable[..., Path],
    ranks: Callable[..., list[Any]],
    tmp_path: Path,
) -> None:
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    source = checkpoint(kind, **sizes)
    results = ranks(world, round_trip, source, parallel, tmp_path)

    original = load_file(source / "model.safetensors")
    loaded = load_file(tmp_path / "loaded" / "model.safetensors")
    assert loaded.keys() == original.keys()
    wrong = [n for n in original if loaded[n].dtype != original[n].dtype or not torch.equal(loaded[n], original[n])]
    assert wrong == []

    assert all(math.isfinite(loss) for losses in results for loss in losses)
    assert len({tuple(losses) for losses in results}) == 1, "every rank reports the same loss"
    trained = load_file(tmp_path / "trained" / "model.safetensors")
    assert [n for n in original if torch.equal(trained[n], original[n])] == []
    assert all(torch.isfinite(tensor).all() for tensor in trained.values())
    # The exported folder is complete: transformers loads it by itself, and nothing is missing or left over.
    _, report = AutoModelForCausalLM.from_pretrained(tmp_path / "trained", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]


def first_loss(rank: int, source: Path, parallel: dict[str, int]) -> float:
    from weight_sync_integrations.megatron.model import build

    return build(source, parallel).train_step()


def test_the_first_loss_is_that_of_transformers_on_the_same_tokens(
    checkpoint: Callable[..., Path], ranks: Callable[..., list[Any]]
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    source = checkpoint("qwen3_moe", dtype="float32")
    model = AutoModelForCausalLM.from_pretrained(source)
    tokens = torch.randint(0, 256, (2, 2, 33), generator=torch.Generator().manual_seed(0)).flatten(0, 1)
    logits = model(input_ids=tokens[:, :-1]).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).item()
    for parallel in ({}, {"tp": 2, "ep": 2}, {"pp": 2}):
        world = 2 if parallel else 1
        assert ranks(world, first_loss, source, parallel)[0] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    ("parallel", "world", "says"),
    [
        ({"tp": 2, "ep": 1}, 3, "tp"),
        ({"ep": 4}, 2, "ep"),
        ({"vpp": 2}, 1, "vpp=2"),
        ({"xp": 2}, 2, "xp"),
        ({"tp": 0}, 1, "tp=0"),
    ],
)
def test_parallel_sizes_that_do_not_fit_the_world_are_refused_by_name(
    parallel: dict[str, int], world: int, says: str, stack: None
) -> None:
    from weight_sync_integrations.megatron.model import trainer_dims

    with pytest.raises(ParallelError, match=says):
        trainer_dims(parallel, world)


def refused_cp(rank: int, source: Path) -> str:
    from weight_sync_integrations.megatron.model import build

    with pytest.raises(ParallelError) as caught:
        build(source, {"cp": 2})
    return str(caught.value)


def test_context_parallelism_without_transformer_engine_is_refused(
    checkpoint: Callable[..., Path], ranks: Callable[..., list[Any]]
) -> None:
    assert all("cp=2" in text for text in ranks(2, refused_cp, checkpoint("qwen3")))


def test_the_stand_ins_leave_no_fake_package_behind_and_never_touch_a_machine_with_cuda(
    stack: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from weight_sync_integrations.megatron import cpu

    assert [name for name in sys.modules if name.partition(".")[0] in ("triton", "transformer_engine")] == []
    assert not [h for h in logging.getLogger().handlers if type(h).__module__.startswith("megatron")]
    assert cpu.install() is True, "idempotent"

    monkeypatch.setattr(cpu, "_installed", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(cpu, "_harmless_cuda", lambda: pytest.fail("touched torch.cuda although CUDA is available"))
    assert cpu.install() is False
    with cpu.device_mode():
        assert torch.zeros(1).type() == "torch.FloatTensor"


ROUTED: dict[str, Any] = {
    "vocab_size": 200,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_experts_per_tok": 2,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "num_nextn_predict_layers": 0,
}
MLA: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}


def other_family(rank: int, source: Path, parallel: dict[str, int], out: Path) -> dict[str, str]:
    from weight_sync_integrations.megatron.model import build
    from weight_sync_integrations.megatron.source import MegatronSource

    trainer = build(source, parallel)
    trainer.export_hf(out)
    assert math.isfinite(trainer.train_step())
    return {param.name: param.dtype for param in MegatronSource(trainer.chunks, trainer.optimizer).describe().params}


@pytest.mark.parametrize(
    ("config", "sizes", "has"),
    [
        ("DeepseekV3Config", {**ROUTED, **MLA}, "self_attention.linear_kv_down_proj.weight"),
        ("Glm4MoeConfig", {**ROUTED, "num_key_value_heads": 2, "head_dim": 16}, "mlp.shared_experts.linear_fc1.weight"),
    ],
)
def test_families_with_latent_attention_shared_experts_and_router_biases_build_on_the_stand_ins(
    config: str, sizes: dict[str, Any], has: str, ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    import torch
    import transformers
    from safetensors.torch import load_file

    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, config)(**sizes, dtype="bfloat16"))
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_()
    model.save_pretrained(tmp_path / "source")
    results = ranks(2, other_family, tmp_path / "source", {"tp": 2, "ep": 2}, tmp_path / "out")
    original, exported = (load_file(tmp_path / name / "model.safetensors") for name in ("source", "out"))
    assert exported.keys() == original.keys()
    assert [name for name in original if not torch.equal(exported[name].float(), original[name].float())] == []
    for dtypes in results:
        assert any(name.endswith(has) for name in dtypes)
        assert dtypes["decoder.layers.1.mlp.router.expert_bias"] == "float32", "a buffer, kept in float32"
