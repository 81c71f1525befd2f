"""Which jobs may leave a side undeclared, and what is said to the others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from config_support import HF_CONFIG

from weight_sync.commands.common import job_of
from weight_sync.config import compose_job, declared_sides
from weight_sync.errors import ConfigError
from weight_sync.session.inputs import Declared, Recorded, layout_of

UNKNOWN = HF_CONFIG | {"architectures": ["Phi3ForCausalLM"]}


def test_nothing_is_declared_for_an_architecture_that_no_family_knows() -> None:
    job = compose_job(["trainer=fsdp2", "weight_sync.family=recorded", "weight_sync.recorded.untouched=[rotary.*]"])
    trainer, rollout = declared_sides(job, UNKNOWN)
    assert trainer is None
    assert isinstance(rollout, Recorded)
    assert (rollout.family, rollout.config, list(rollout.untouched)) == (None, UNKNOWN, ["rotary.*"])


@pytest.mark.parametrize("trainer", ["megatron", "fsdp2"])
def test_the_engine_side_alone_can_be_recorded(trainer: str) -> None:
    job = compose_job([f"trainer={trainer}", "weight_sync.engine=recorded"])
    source, rollout = declared_sides(job, HF_CONFIG)
    assert isinstance(source, Declared) == (trainer == "megatron")
    assert isinstance(rollout, Recorded)
    assert rollout.family is not None
    assert rollout.family["name"] == "qwen3_moe"


def test_a_megatron_trainer_without_a_family_is_told_how_to_get_one() -> None:
    with pytest.raises(ConfigError, match=r"family=recorded: trainer=megatron .*new-family .*weight_sync\.engine=recorded"):
        compose_job(["weight_sync.family=recorded"])


@pytest.mark.parametrize("key", ["unserved", "untouched"])
def test_a_declared_layout_leaves_nothing_out_by_pattern(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"weight_sync\.recorded\.{key}=.*weight_sync\.engine=recorded"):
        compose_job([f"weight_sync.recorded.{key}=[a.*]"])


def test_planning_from_config_needs_a_declared_engine(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(HF_CONFIG))
    with pytest.raises(ConfigError, match=r"weight_sync\.engine=recorded: .*planning needs a declared one"):
        job_of([f"model.path={tmp_path}", "weight_sync.engine=recorded"])


@pytest.mark.parametrize(("casts", "held"), [("[float32]", {("float32", "bfloat16")}), ("[]", {("float32", "")})])
def test_a_megatron_trainer_in_float32_is_cast_only_where_the_job_says_so(casts: str, held: set[tuple[str, str]]) -> None:
    job = compose_job(["trainer.dtype=float32", f"trainer.casts={casts}"])
    source, rollout = declared_sides(job, HF_CONFIG)
    assert isinstance(source, Declared)
    assert isinstance(rollout, Declared)
    assert {(p.dtype, p.cast_from) for p in layout_of(source, "trainer").params} == held
    assert {(p.dtype, p.cast_from) for p in layout_of(rollout, "rollout").params} == {("bfloat16", "")}
