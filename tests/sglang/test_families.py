"""Every shipped family as SGLang's own loaders place it, against the layout that the YAML declares."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
from families_support import MODELS, model_of, record_result, rollout_layout

from weight_sync.config import family_yaml
from weight_sync.errors import BindError, FamilyError
from weight_sync.layout.family import Model, apply, parse_family
from weight_sync.layout.witness import agree
from weight_sync_integrations.recorder import record
from weight_sync_integrations.sglang.replica import EngineSizes, build_replica, read_checkpoint

Make = Callable[..., Path]

SIZES = {
    "tp1": EngineSizes(),
    "tp2": EngineSizes(tp=2),
    "tp4": EngineSizes(tp=4),
    "tp2ep2": EngineSizes(tp=2, ep=2),
    "tp4ep2": EngineSizes(tp=4, ep=2),
    "pp2": EngineSizes(pp=2),
    "tp2pp2": EngineSizes(tp=2, pp=2),
    "attn-dp2": EngineSizes(tp=2, attn_dp=2),
}
FEW = {"glm47_flash": ("tp4ep2", "tp2pp2", "attn-dp2")}
"""Models of which CI compares a few layouts only: built like another one. The rest was compared once, during development."""
CASES = [
    pytest.param(model, name, id=f"{model} {name}")
    for model in MODELS
    # SGLang knows Kimi-K2 by the architecture its published config names, DeepSeek-V3's.
    for name in SIZES
    if model != "kimi_k2"
    and not (name == "attn-dp2" and model.split()[0] in ("llama", "qwen2"))
    and name in FEW.get(model, SIZES)
]
WITHOUT_CUDA = {"indexer_fused": 0}


def compare(path: Path, name: str, model: Model | None = None) -> int:
    """Raise BindError unless every rank of the engine agrees with the declaration. Returns the parameters compared."""
    sizes, tensors, count = SIZES[name], read_checkpoint(path), 0
    parallel = {"tp": sizes.tp, "pp": sizes.pp, "attn_dp": sizes.attn_dp, "moe_ep": sizes.ep}
    layout, computed = rollout_layout(model or model_of(path), "sglang", parallel, **WITHOUT_CUDA)
    for rank in range(sizes.world):
        replica = build_replica(path, rank, sizes)
        with replica.scope():
            seen = record(replica.model, tensors, replica.model.load_weights)
        live = {n: (tuple(t.shape), str(t.dtype).removeprefix("torch.")) for n, t in replica.tensors().items()}
        assert {p.name: (p.shape, p.dtype) for p in layout.rank_params(rank)} == live
        unexplained = {entry["tensor"] or entry["param"]: entry["operation"] for entry in seen.inexpressible}
        agree(layout, rank, seen.shards, unexplained, computed)
        assert not seen.rewritten
        assert not seen.uncovered
        count += len(live)
    return count


@pytest.mark.parametrize(("model", "name"), CASES)
def test_the_declared_layout_is_what_sglangs_own_loader_does(checkpoint: Make, model: str, name: str) -> None:
    kind, sizes = MODELS[model]
    count = compare(checkpoint(kind, num_hidden_layers=3, **sizes), name)
    record_result("sglang", model, name, "recorder agrees", count)


@pytest.mark.parametrize("name", ["tp2", "pp2"])
def test_a_family_that_only_extends_llamas_needs_no_rule_of_its_own(checkpoint: Make, name: str, tmp_path: Path) -> None:
    """CONTRIBUTING's example: MistralForCausalLM, which SGLang builds with a head on every stage, as it does Llama."""
    path = tmp_path / "mistral"
    shutil.copytree(checkpoint("llama", num_hidden_layers=3, vocab_size=250), path)
    config = json.loads((path / "config.json").read_text())
    config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    (path / "config.json").write_text(json.dumps(config))
    file = tmp_path / "mistral.yaml"
    file.write_text("name: mistral\nextends: [llama]\narchitectures: [MistralForCausalLM]\n")

    assert compare(path, name, apply(parse_family(family_yaml(str(file))), config)) > 0


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_attention_data_parallelism_is_refused_by_name_where_sglang_has_none(checkpoint: Make, kind: str) -> None:
    model = model_of(checkpoint(kind, num_hidden_layers=1))

    with pytest.raises(FamilyError, match=f"family {kind} .*attn_dp > 1"):
        rollout_layout(model, "sglang", {"tp": 2, "attn_dp": 2})


def test_the_fp32_router_of_glm45_is_declared_as_a_cast_and_not_passed_off_as_a_copy(checkpoint: Make) -> None:
    path = checkpoint("glm4_moe", num_hidden_layers=2)
    layout, computed = rollout_layout(model_of(path), "sglang", {})

    assert computed == {"model.layers.1.mlp.gate.weight": "cast from bfloat16 to float32"}
    replica, tensors = build_replica(path, 0), read_checkpoint(path)
    with replica.scope():
        seen = record(replica.model, tensors, replica.model.load_weights)
    unexplained = {entry["tensor"]: entry["operation"] for entry in seen.inexpressible}
    agree(layout, 0, seen.shards, unexplained, computed)
    with pytest.raises(BindError, match=r"model\.layers\.1\.mlp\.gate\.weight: the loader applies cast from bfloat16"):
        agree(layout, 0, seen.shards, unexplained)
