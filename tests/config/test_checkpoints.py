"""A job with a checkpoint: the folder, the model's family and every size are checked before Ray is started."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from config_support import checkpoint, job_with

from weight_sync.errors import ConfigError, WeightSyncError
from weight_sync.schema import WandbMode
from weight_sync_integrations.job import run


class Started(Exception):
    """The job got as far as Ray."""


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """job(path, *overrides) runs the job up to Ray."""
    ray = ModuleType("ray")

    def init(*args: Any, **named: Any) -> None:
        raise Started

    ray.init, ray.shutdown = init, lambda: None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray", ray)

    def call(path: Path, *overrides: str) -> None:
        conf = job_with("+weight_sync=p2p_cma", f"output_dir={tmp_path / 'outputs'}", f"model.path={path}", *overrides)
        conf.weight_sync.observe.wandb = WandbMode.disabled
        conf.trainer.python = conf.rollout.python = sys.executable  # the sides' environments need not be built here
        run(conf)

    return call


def refused(job: Callable[..., None], path: Path, *overrides: str) -> str:
    with pytest.raises(WeightSyncError) as caught:
        job(path, *overrides)
    assert isinstance(caught.value, ConfigError)
    return str(caught.value)


def test_a_whole_checkpoint_gets_as_far_as_ray(job: Callable[..., None], tmp_path: Path) -> None:
    with pytest.raises(Started):
        job(checkpoint(tmp_path / "model"))


def test_a_folder_that_is_not_there_is_refused(job: Callable[..., None], tmp_path: Path) -> None:
    assert refused(job, tmp_path / "nosuch") == f"model.path={tmp_path / 'nosuch'}: no such folder"
    file = tmp_path / "file"
    file.write_text("")
    assert "no such folder" in refused(job, file)


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("config.json", None, "no config.json in it"),
        ("config.json", b"{", "config.json is not JSON"),
        ("config.json", b"\xff\xfe", "config.json is not JSON"),
        ("config.json", b"[]", "config.json must hold an object, not list"),
        ("model.safetensors", None, r"no \*.safetensors in it"),
        ("model.safetensors", b"", "truncated: 0 bytes"),
        ("model.safetensors", b"abc", "truncated: 3 bytes"),
        (
            "model.safetensors",
            (1 << 40).to_bytes(8, "little") + b"{}",
            "truncated: 10 bytes, its header alone needs 10995116277",
        ),
        ("model.safetensors", (2).to_bytes(8, "little") + b"{x", "not a safetensors file"),
        ("model.safetensors", (2).to_bytes(8, "little") + b"[]", "not a safetensors file"),
        ("model.safetensors", (8).to_bytes(8, "little") + b'{"a":{}}', "not a safetensors file: KeyError"),
        ("model.safetensors.index.json", b"{", "no index of a checkpoint"),
        ("model.safetensors.index.json", b"{}", "no index of a checkpoint: KeyError: 'weight_map'"),
        (
            "model.safetensors.index.json",
            b'{"weight_map": {"a": "model-2.safetensors"}}',
            "the index names model-2.safetensors",
        ),
    ],
)
def test_a_checkpoint_that_is_not_whole_is_refused(
    job: Callable[..., None], tmp_path: Path, file: str, content: bytes | None, said: str
) -> None:
    path = checkpoint(tmp_path / "model") / file
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)
    assert re.search(said, refused(job, path.parent))


@pytest.mark.parametrize("cut", [1, 100, 64_000])
def test_a_safetensors_file_that_was_cut_short_is_refused_with_both_sizes(
    job: Callable[..., None], tmp_path: Path, cut: int
) -> None:
    path = checkpoint(tmp_path / "model") / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    assert f"{path}: {len(whole) - cut} bytes, but its header describes {len(whole)}: truncated or damaged" == refused(
        job, path.parent
    )


def test_bytes_after_the_data_are_refused_as_well(job: Callable[..., None], tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "model") / "model.safetensors"
    path.write_bytes(path.read_bytes() + b"x")
    assert "truncated or damaged" in refused(job, path.parent)


# -- the model's sizes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["trainer.ranks=6", "trainer.pp=3"],
            "4 layers do not divide into pp * vpp = 3 * 1 = 3 equal stages; choose sizes that",
        ),
        (["trainer.vpp=3"], "4 layers do not divide into pp * vpp = 2 * 3 = 6 equal stages"),
        (["trainer.ranks=3", "trainer.tp=3", "trainer.pp=1", "trainer.ep=1"], "256 elements do not divide over 3 ranks; legal"),
        (["trainer.ranks=6", "trainer.pp=1", "trainer.ep=3"], "8 experts do not divide over ep=3; legal sizes: [1, 2, 4, 8]"),
        (["trainer.pipeline=[1,1]"], "trainer.pipeline [1, 1] adds up to 2, the model has 4"),
        (["rollout.tp=3"], "over attn_tp=3: 4 units do not divide over 3 ranks; legal sizes: 1, 2, 4"),
        (["rollout=vllm", "rollout.tp=3"], "over attn_tp=3: 4 units do not divide over 3 ranks; legal sizes: 1, 2, 4"),
        (["trainer=fsdp2", "rollout.tp=3"], "over attn_tp=3: 4 units do not divide over 3 ranks"),
        (["rollout.tp=16", "rollout.moe_ep=16"], "8 experts do not divide over moe_ep=16; legal sizes: [1, 2, 4, 8]"),
        (["rollout.pp=5"], "4 layers cannot fill rollout pp=5 stages; legal: 1 to 4"),
        (
            ["weight_sync.family=qwen3"],
            "family qwen3 is for Qwen3ForCausalLM, but the HF config says architectures=['Qwen3MoeFor",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_sizes_that_do_not_divide_the_model_are_refused_with_the_number_and_the_legal_ones(
    job: Callable[..., None], tmp_path: Path, overrides: list[str], said: str
) -> None:
    assert said in refused(job, checkpoint(tmp_path / "model"), *overrides)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"architectures": ["FooForCausalLM"]}, "finds no family for architectures=['FooForCausalLM']"),
        ({"hidden_size": None}, "the HF config has hidden_size=None; hidden needs an integer"),
        ({"num_key_value_heads": "two"}, "the HF config has num_key_value_heads='two'; kv_heads needs an integer"),
        ({"num_experts": 7}, "7 experts do not divide over ep=2; legal sizes: [1, 7]"),
        ({"num_experts": 0}, "must be at least 1|needs at least 1"),
        ({"mlp_only_layers": "x"}, "mlp_only_layers of the HF config must be a list of layers, got 'x'"),
        ({"dtype": "int3"}, "unknown dtype 'int3'; known: float64"),
    ],
)
def test_a_hf_config_that_makes_no_sense_is_refused_by_key(
    job: Callable[..., None], tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    text = refused(job, checkpoint(tmp_path / "model", **changes))
    assert any(part in text for part in said.split("|")), text


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ({"mcore": {"final_norm": None}}, "no rule for model.norm.weight; add one, or a drop rule with the reason"),
        (
            {
                "mcore": {
                    "again": {"rule": "rename", "hf": "model.norm.weight", "param": "x.weight", "place": {"pp": "own last"}}
                }
            },
            "model.norm.weight is placed by two rules, ",
        ),
        (
            {"mcore": {"stray": {"rule": "rename", "hf": "model.nosuch.weight", "param": "x.weight"}}},
            "rule stray matches nothing: the model has no model.nosuch.weight",
        ),
        ({"mcore": {"odd": {"rule": "rotate", "hf": "model.norm.weight"}}}, "mcore.odd"),
    ],
    ids=["unmatched parameter", "two rules for one", "rule without a match", "unknown rule"],
)
def test_a_family_of_ones_own_that_does_not_fit_the_model_is_refused_by_rule_and_tensor(
    job: Callable[..., None], tmp_path: Path, rules: dict[str, Any], said: str
) -> None:
    family = tmp_path / "mine.yaml"
    family.write_text(json.dumps({"extends": ["qwen3_moe"], "name": "mine", **rules}))  # JSON is YAML
    assert said in refused(job, checkpoint(tmp_path / "model"), f"weight_sync.family={family}")


def test_nothing_is_left_behind_by_a_job_that_was_refused(job: Callable[..., None], tmp_path: Path) -> None:
    refused(job, tmp_path / "nosuch")
    refused(job, checkpoint(tmp_path / "model"), "rollout.tp=3")
    assert not (tmp_path / "outputs").exists()
