"""Families proposed from Megatron-Bridge's registry: the shipped ones come out again, the rest is listed, never guessed."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
from families_support import MODELS, model_of

from weight_sync.errors import ConfigError, FamilyError
from weight_sync.layout.family import apply, parse_family
from weight_sync_integrations.newfamily import described, run
from weight_sync_integrations.newfamily_extend import merged_family, placed, shorten
from weight_sync_integrations.newfamily_rules import Facts, propose

CONFIGS = Path(__file__).parents[2] / "conf" / "weight_sync" / "model_config"


@pytest.fixture(scope="session")
def facts(checkpoint: Callable[..., Path], ranks: Callable[..., list[Any]]) -> Callable[[str], tuple[Path, Facts]]:
    """facts(model) -> (tiny checkpoint, what Megatron-Bridge maps to what in it), collected once."""
    found: dict[str, tuple[Path, Facts]] = {}

    def of(model: str) -> tuple[Path, Facts]:
        if model not in found:
            kind, sizes = MODELS[model]
            found[model] = (checkpoint(kind, **sizes), ranks(1, _collect, checkpoint(kind, **sizes))[0])
        return found[model]

    return of


def _collect(rank: int, folder: Path) -> Facts:
    from weight_sync_integrations.megatron.newfamily import collect

    return collect(folder)


@pytest.mark.parametrize("model", ["llama", "qwen3_moe", "deepseek_v3"])
def test_a_proposal_from_the_bridge_alone_places_everything_as_the_shipped_family_does(
    model: str, facts: Callable[[str], tuple[Path, Facts]]
) -> None:
    folder, known = facts(model)
    shipped = model_of(folder)

    proposal = propose("proposed", known)

    assert proposal.unmatched == []
    assert "extends" not in proposal.family
    ours = apply(parse_family(proposal.family), known.config)
    assert set(ours.catalog.patterns) == set(shipped.catalog.patterns)
    assert placed(ours) == placed(shipped)
    short = shorten(proposal.family, known.config)
    assert short == {"name": "proposed", "extends": [model], "architectures": known.config["architectures"]}


def test_a_proposal_says_what_differs_from_the_family_it_extends(facts: Callable[[str], tuple[Path, Facts]]) -> None:
    _, known = facts("qwen3_moe")
    flat = propose("proposed", known).family

    short = shorten(flat, known.config, bases=["qwen3"])

    assert short["extends"] == ["qwen3"]
    assert set(short["mcore"]) >= {"router", "experts_in", "experts_out"}
    assert "qkv" not in short["mcore"]
    assert "model.layers.{l}.self_attn.q_proj.weight" not in short["tensors"]
    assert placed(apply(parse_family(merged_family(short)), known.config)) == placed(apply(parse_family(flat), known.config))


def test_an_mtp_layer_that_the_bridge_does_not_build_is_left_out_by_name(
    facts: Callable[[str], tuple[Path, Facts]],
) -> None:
    folder, known = facts("glm5")
    assert known.config["num_nextn_predict_layers"] == 1

    proposal = propose("proposed", known)

    assert proposal.unmatched == []
    assert proposal.family["mcore"]["mtp"]["rule"] == "drop"
    assert any("MTP layer" in note for note in proposal.notes)
    short = shorten(proposal.family, known.config)
    assert short == {"name": "proposed", "extends": ["glm5"], "architectures": known.config["architectures"]}
    assert placed(apply(parse_family(proposal.family), known.config)) == placed(model_of(folder))


def test_a_key_of_the_config_that_the_bridge_misses_is_named(stack: None, tmp_path: Path) -> None:
    from weight_sync_integrations.megatron.newfamily import new_family

    config = json.loads((CONFIGS / "glm_5.json").read_text())  # sizes only
    with pytest.raises(FamilyError, match=r"the HF config has no key 'indexer_rope_interleave', which Megatron-Bridge reads"):
        new_family(config, "glm5", tmp_path)


def test_what_is_in_no_rule_is_listed_with_its_mapping_and_never_guessed(facts: Callable[[str], tuple[Path, Facts]]) -> None:
    _, known = facts("llama")
    strange = [
        replace(p, mapping="GDNLinearMapping", other="a mapping of another kind")
        if p.name.endswith("linear_proj.weight")
        else p
        for p in known.params
    ]
    lost = [p for p in strange if p.name != "decoder.final_layernorm.weight"]

    proposal = propose("proposed", replace(known, params=lost, unmapped=["decoder.final_layernorm.weight"]))

    text = "\n".join(proposal.unmatched)
    assert (
        "decoder.layers.{n}.self_attention.linear_proj.weight: GDNLinearMapping of model.layers.{l}.self_attn.o_proj.weight"
        in text
    )
    assert "model.norm.weight: Megatron-Bridge maps it to no parameter" in text
    assert "decoder.final_layernorm.weight: Megatron-Bridge has no mapping" in text
    lines, good = described({"unmatched": proposal.unmatched, "notes": [], "trainer": []}, [], "the proposal is incomplete")
    assert not good
    assert lines[0] == "could not be matched:"


def test_a_size_that_no_expression_gives_is_listed(facts: Callable[[str], tuple[Path, Facts]]) -> None:
    _, known = facts("llama")
    tensors = {n: ((s[0] + 7, *s[1:]) if n.endswith("o_proj.weight") else s, d) for n, (s, d) in known.tensors.items()}

    proposal = propose("proposed", replace(known, tensors=tensors))

    assert any("o_proj.weight: no expression over the config's sizes gives 135" in line for line in proposal.unmatched)


def test_a_model_with_no_family_is_shrunken_proposed_and_agrees_with_live_ranks(stack: None, tmp_path: Path) -> None:
    from weight_sync_integrations.megatron.newfamily import new_family

    config = {
        "architectures": ["MistralForCausalLM"], "model_type": "mistral", "hidden_size": 4096, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 14336, "vocab_size": 32768,
        "tie_word_embeddings": False, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "sliding_window": None, "dtype": "bfloat16",
    }  # fmt: skip

    proposal, results = new_family(config, "mistral", tmp_path)

    assert proposal.family == {"name": "mistral", "extends": ["llama"], "architectures": ["MistralForCausalLM"]}
    assert [(r["layout"], r["differing"]) for r in results] == [("tp1", []), ("tp2 pp2", [])]
    assert all(result["parameters"] for result in results)


def test_a_wrong_family_differs_from_the_live_ranks_by_name(checkpoint: Callable[..., Path]) -> None:
    from weight_sync_integrations.megatron.newfamily import compare

    family = merged_family({"name": "wrong", "extends": ["llama"], "architectures": ["LlamaForCausalLM"]})
    family["mcore"]["mlp_in"]["parts"].reverse()

    found = compare(family, checkpoint("llama", vocab_size=250), {})

    assert found["differing"]
    assert all("mlp.linear_fc1.weight: other elements" in line for line in found["differing"])


def test_an_architecture_that_megatron_bridge_does_not_know_is_one_clear_error(stack: None, tmp_path: Path) -> None:
    from weight_sync_integrations.megatron.newfamily import new_family

    with pytest.raises(
        FamilyError, match=r"no mapping for architectures=\['NoSuchForCausalLM'\].*LlamaForCausalLM.*family=recorded"
    ):
        new_family({"architectures": ["NoSuchForCausalLM"]}, "x", tmp_path)


@pytest.mark.parametrize("file", sorted(path.stem for path in CONFIGS.glob("*.json")))
def test_published_configs_are_shrunken_to_models_of_a_few_megabytes(file: str) -> None:
    from weight_sync_integrations.megatron.newfamily import shrink

    config = json.loads((CONFIGS / f"{file}.json").read_text())
    small = shrink(config)

    numbers = {key: value for key, value in small.items() if isinstance(value, int) and not isinstance(value, bool)}
    assert {key: value for key, value in numbers.items() if value > 512} == {}
    assert small.keys() >= {"hidden_size", "num_hidden_layers", "vocab_size", "model_type"}


def test_the_command_says_what_it_needs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "config.json"
    with pytest.raises(ConfigError, match=r"--hf-config config\.json"):
        run([])
    with pytest.raises(ConfigError, match="no such file"):
        run(["--hf-config", str(file)])
    file.write_text('{"architectures": ["LlamaForCausalLM"]}')
    with pytest.raises(ConfigError, match=r"trainer\.python=.*megatron-bridge.*envs/build\.sh trainer"):
        run(["--hf-config", str(file), f"trainer.python={tmp_path / 'none'}"])
