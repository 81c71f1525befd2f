"""What is read from verl's Megatron engine, against the layouts of the recipes. In the environment verl-sglang."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from weight_sync.config import recipes
from weight_sync_integrations.megatron import cpu
from weight_sync_integrations.verl import megatron

cpu.install()
ROOT = Path(__file__).resolve().parents[2]


def engine(layers: int, *, padded: bool = False, **config: Any) -> Any:
    """As much of verl's engine as is looked at: mcore's own configuration, and the bridge's provider."""
    from megatron.core.transformer import TransformerConfig

    made = TransformerConfig(num_layers=layers, hidden_size=64, num_attention_heads=4, pipeline_dtype="bf16", **config)
    return SimpleNamespace(tf_config=made, provider=SimpleNamespace(should_pad_vocab=padded, make_vocab_size_divisible_by=32))


@pytest.mark.parametrize("recipe", recipes())
def test_stages_of_every_recipe_are_those_of_train_py(recipe: str) -> None:
    """mcore's reading of the verl recipe's keys against what train.py's recipe declares for the same layout."""
    own = yaml.safe_load((ROOT / "recipes" / f"{recipe}.yaml").read_text())
    theirs = yaml.safe_load((ROOT / "conf/verl/recipes" / f"{recipe}.yaml").read_text())["actor_rollout_ref"]["actor"][
        "megatron"
    ]
    stages = own["trainer"]["pp"]
    model = ROOT / "conf/weight_sync/model_config" / f"{own['model']['config']}.json"
    layers = json.loads(model.read_text())["num_hidden_layers"]
    uneven = theirs.get("override_transformer_config", {})
    found = megatron.built(engine(layers, pipeline_model_parallel_size=stages, **uneven))["pipeline"]
    even = None if stages == 1 else [layers // stages] * stages
    assert found == own["trainer"].get("pipeline", even)


def test_chunks_of_a_virtual_pipeline_are_in_model_order() -> None:
    sizes = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
    assert megatron.built(engine(8, **sizes))["pipeline"] == [2, 2, 2, 2]
    # mcore's own description of a layout: chunk by chunk, stage by stage.
    layout = [["embedding", "decoder"], ["decoder"] * 3, ["decoder"] * 2, ["decoder", "loss"]]
    uneven = megatron.built(engine(7, pipeline_model_parallel_layout=layout, **sizes))
    assert uneven["pipeline"] == [1, 3, 2, 1]


@pytest.mark.parametrize(("padded", "multiple"), [(False, 1), (True, 32)])
def test_the_vocabulary_is_padded_only_where_the_bridge_pads_it(padded: bool, multiple: int) -> None:
    assert megatron.built(engine(4, padded=padded))["vocab_multiple"] == multiple
