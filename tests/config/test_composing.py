"""What a config may say, and the one error for everything else."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from config_support import HF_CONFIG, job_with
from omegaconf import OmegaConf

from weight_sync.config import (
    check_arguments,
    check_job,
    compose_job,
    engine_yaml,
    family_for,
    family_yaml,
    job_from,
    strategies,
)
from weight_sync.errors import ConfigError, FamilyError, WeightSyncError
from weight_sync.schema import JobConf, PauseChoice, SyncConf


@pytest.mark.parametrize("name", strategies())
def test_every_shipped_strategy_composes_and_names_itself(name: str) -> None:
    job = compose_job([f"+weight_sync={name}"])
    assert isinstance(job.weight_sync, SyncConf)
    assert job.weight_sync.strategy == name


@pytest.mark.parametrize("trainer", ["megatron", "fsdp2"])
@pytest.mark.parametrize("rollout", ["sglang", "vllm"])
def test_every_pair_of_sides_composes(trainer: str, rollout: str) -> None:
    job = compose_job([f"trainer={trainer}", f"rollout={rollout}"])
    assert (job.trainer.kind, job.rollout.kind, job.model.dtype) == (trainer, rollout, job.rollout.dtype)


def test_overrides_arrive_with_their_types() -> None:
    job = compose_job(["+weight_sync=p2p_cma", "weight_sync.pause=abort", "weight_sync.budget.target=4096", "rounds=5",
                       "weight_sync.timeouts.sync=12", "trainer.pipeline=[2,2]", "+model.sizes.hidden_size=64"])  # fmt: skip
    conf = job.weight_sync
    assert (conf.pause, conf.budget.target, conf.timeouts.sync, job.rounds) == (PauseChoice.abort, 4096, 12.0, 5)
    assert (job.trainer.pipeline, job.model.sizes) == ([2, 2], {"hidden_size": 64})


def refused(*overrides: str) -> str:
    with pytest.raises(WeightSyncError) as caught:
        compose_job(list(overrides))
    assert isinstance(caught.value, ConfigError), type(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    "key",
    ["weight_sync.stategy", "weight_sync.transport.nme", "weight_sync.verify.levl", "weight_sync.timeouts.sinc",
     "weight_sync.costs.wires", "weight_sync.budget.sauce", "weight_sync.observe.wandbb", "trainer.tpp",
     "trainer.placement.cpus", "rollout.enginess", "rollout.placement.gpu", "model.layers", "ray.adress", "round"],
)  # fmt: skip
def test_an_unknown_key_is_refused_in_every_group_even_when_it_is_added_with_a_plus(key: str) -> None:
    text = refused(f"+{key}=1")
    group = key.rpartition(".")[0] or "the job"
    assert text.startswith(f"no such key: {key} ({group} has ")


@pytest.mark.parametrize("key", ["weight_sync.timeouts.sinc", "trainer.tpp"])
def test_an_unknown_key_is_refused_without_a_plus(key: str) -> None:
    assert f"Key '{key.rpartition('.')[2]}' not in '" in refused(f"{key}=1")


def test_an_unknown_key_comes_with_the_nearest_known_one() -> None:
    assert "; did you mean timeouts?" in refused("+weight_sync.timeout=3")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("trainer.tp=two", "Value 'two' of type 'str' could not be converted to Integer"),
        ("weight_sync.timeouts.sync=soon", "could not be converted to Float"),
        ("weight_sync.verify.witness=maybe", "is not a valid bool"),
        ("weight_sync.transport.options=3", "Cannot assign int to Dict"),
        ("weight_sync.pause=later", "expected one of [auto, abort, retract, in_place, wait, keep]"),
        ("weight_sync.verify.level=none", "expected one of [off, digest, full, check_weight_equal]"),
        ("weight_sync.observe.wandb=yes", "expected one of [auto, offline, online, disabled]"),
        ("weight_sync.observe.keys=mine", "expected one of [plain, verl, miles]"),
        ("rollout.placement.num_cpus=many", "could not be converted to Float"),
        ("model.dtype=${rollout.dtyp}", "Interpolation key 'rollout.dtyp' not found"),
    ],
)
def test_a_value_of_the_wrong_type_or_choice_is_refused_with_the_legal_ones(override: str, said: str) -> None:
    text = refused(override)
    assert said in text
    if "Interpolation" not in said:
        assert override in text


def senseless(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        check_job(job_with(*overrides))
    return str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["trainer.kind=deepspeed"], "trainer.kind='deepspeed': must be one of megatron, fsdp2"),
        (["rollout.kind=trt"], "rollout.kind='trt': must be one of sglang, vllm"),
        (["rollout.device=tpu"], "rollout.device='tpu': must be one of cpu, cuda"),
        (["trainer.casts=[float16]"], "trainer.casts='float16': must be one of bfloat16, float32"),
        (["trainer.optimizer=adam"], "trainer.optimizer='adam': must be one of distributed, replicated"),
        (
            ["trainer=miles", "weight_sync.verify.trainer_witness=true"],
            "weight_sync.verify.trainer_witness: trainer=miles gives no export",
        ),
        (["rounds=0"], "rounds=0: must be at least 1"),
        (["rollout.engines=0"], "rollout.engines=0: must be at least 1"),
        (["weight_sync.budget.source=4"], "weight_sync.budget.source=4: must be at least 1024"),
        (["weight_sync.delta.max_share=1.5"], "weight_sync.delta.max_share=1.5: must be above 0 and at most 1"),
        (["weight_sync.delta.staging=8"], "weight_sync.delta.staging=8: must be at least 1024"),
        (["weight_sync.timeouts.sync=0"], "weight_sync.timeouts.sync=0: must be above 0"),
        (["weight_sync.timeouts.abort=.nan"], "weight_sync.timeouts.abort=nan: must be above 0"),
        (["weight_sync.costs.wire=-1"], "weight_sync.costs.wire=-1: must be above 0"),
        (["weight_sync.transport.name=tcp"], "transport.name='tcp': must be one of cma, cuda_ipc, memory, mooncake"),
        (
            ["weight_sync.transport.options={protocol: tcp, protocl: tcp}"],
            "mooncake: got an unexpected keyword argument 'protocl'",
        ),
        (["weight_sync.transport.name=memory"], "weight_sync.transport.options: memory: .*it takes hub, address"),
        (["trainer=fsdp2", "trainer.tp=2", "trainer.ep=2"], "trainer=fsdp2 cuts parameters over dp only; remove tp=2, ep=2"),
        (["prompts=[]"], "prompts: at least one, and none empty"),
        (["prompts=[[]]"], "prompts: at least one, and none empty"),
        (["rollout=vllm", "rollout.attn_dp=2"], "rollout.attn_dp=2: vLLM has no attention data parallelism inside tp"),
        (["rollout=vllm", "rollout.tp=4", "rollout.moe_ep=2"], "rollout.moe_ep=2: vLLM .*; legal: 1, 4"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_value_that_types_allow_and_sense_does_not_is_refused_by_key(overrides: list[str], said: str) -> None:
    text = senseless(*overrides)
    assert re.search(said if ".*" in said else re.escape(said), text), text


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["trainer.tp=3"], "trainer world of 4 ranks is not a multiple of tp * cp * pp = 3 * 1 * 2 = 6; legal worlds: 6, 12"),
        (["trainer.ep=4"], "trainer world of 4 ranks is not a multiple of etp * ep * pp = 1 * 4 * 2 = 8; legal worlds: 8, 16"),
        (["trainer.ranks=0"], "parallel size ranks=0: must be an integer of at least 1"),
        (["trainer.pp=-1"], "parallel size pp=-1: must be an integer of at least 1"),
        (["trainer.pipeline=[1,2,3]"], "trainer.pipeline [1, 2, 3] gives 3 virtual stages, but pp * vpp = 2 * 1 = 2"),
        (["trainer.order=pp-tp"], "trainer rank order 'pp-tp': must be one of tp-cp-ep-dp-pp, tp-cp-ep-pp-dp"),
        (["rollout.moe_ep=3"], "rollout moe_ep=3 does not divide tp=2; legal: [1, 2]"),
        (["rollout.attn_dp=5"], "rollout attn_dp=5 does not divide tp=2; legal: [1, 2]"),
        (["rollout.pipeline=[4]", "rollout.pp=2"], "rollout.pipeline [4] gives 1 stages, but pp=2"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_parallel_sizes_are_checked_before_there_is_a_model(overrides: list[str], said: str) -> None:
    assert said in senseless(*overrides)


# -- strategies --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "argument", ["++weight_sync=p2p_tcp", "weight_sync=p2p_tcp", "~weight_sync=p2p_tcp", "+weight_sync=null", "+weight_sync="]
)
def test_a_strategy_given_in_another_way_is_told_how_it_is_given(argument: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"{argument}: a strategy is chosen with one plus, +weight_sync=NAME")):
        check_arguments(["trainer.tp=2", argument])


def test_arguments_that_only_look_like_a_strategy_are_left_alone() -> None:
    check_arguments(
        ["+weight_sync=p2p_tcp", "weight_sync.pause=abort", "++weight_sync.verify.witness=false", "x=weight_sync=1"]
    )


def test_a_strategy_that_names_no_file_is_refused_with_those_there_are() -> None:
    text = refused("+weight_sync=nosuch")
    assert "Could not find 'weight_sync/nosuch'" in text
    assert all(name in text for name in strategies())


def test_the_schema_alone_is_no_strategy_and_a_side_that_was_taken_out_is_missed() -> None:
    text = refused("+weight_sync=schema")
    assert text.startswith("weight_sync.strategy: ")
    assert text.endswith("choose a strategy with +weight_sync=NAME")
    assert refused("~trainer").startswith("trainer.kind: ")


@pytest.mark.parametrize(
    ("node", "said"),
    [
        ("p2p_tcp", r"weight_sync is the plain string 'p2p_tcp', not a config group: .*pkg://weight_sync_conf"),
        (None, "no strategy chosen"),
        (["p2p_tcp"], "is no config group"),
        (3, "is no config group"),
    ],
)
def test_a_group_that_was_not_found_is_told_apart_from_no_group(node: Any, said: str) -> None:
    # What another program's config looks like when our group is not on its search path.
    with pytest.raises(ConfigError, match=said):
        job_from(OmegaConf.create({"weight_sync": node, "actor_rollout_ref": {}}))


def test_a_config_without_the_jobs_schema_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"without its schema; is train.yaml the primary config\?"):
        job_from(OmegaConf.create({"weight_sync": {"strategy": "p2p_tcp"}, "rounds": 3}))


def test_the_default_config_is_complete() -> None:
    assert isinstance(compose_job([]), JobConf)


# -- families ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen33", "Qwen3", "", "qwen3.yml"])
def test_an_unknown_family_is_refused_with_the_known_ones(name: str) -> None:
    text = senseless(f"weight_sync.family='{name}'")
    assert f"unknown family {name!r}: there are " in text
    assert "qwen3, qwen3_moe" in text
    assert " _" not in text.partition(" or give")[0], "parts that are only extended are no families"


def test_a_near_miss_gets_the_family_it_may_have_meant() -> None:
    assert "did you mean qwen3_moe?" in senseless("weight_sync.family=qwen3_mo")


def test_an_architecture_that_no_family_declares_is_refused_with_those_that_are() -> None:
    for architectures in (["FooForCausalLM"], [], None):
        with pytest.raises(FamilyError, match=r"finds no family for architectures=.*Qwen3MoeForCausalLM.*of your own"):
            family_for({"architectures": architectures})
    assert family_for(HF_CONFIG) == "qwen3_moe"


def own_family(folder: Path, text: str) -> str:
    path = folder / "mine.yaml"
    path.write_text(text)
    return str(path)


def test_a_family_file_of_ones_own_may_extend_a_shipped_one(tmp_path: Path) -> None:
    path = own_family(tmp_path, "extends: [qwen3_moe]\nname: mine\narchitectures: [MineForCausalLM]\n")
    assert compose_job([f"weight_sync.family={path}"]).weight_sync.family == path
    merged = family_yaml(path)
    assert (merged["name"], merged["architectures"]) == ("mine", ["MineForCausalLM"])
    assert merged["tensors"] == family_yaml("qwen3_moe")["tensors"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{broken", "not readable as YAML"),
        ("- a\n- b\n", "must be a mapping, is list"),
        ("extends: [nosuch]\nname: mine\n", "unknown family 'nosuch'"),
        ("extends: qwen3\nname: mine\n", "must be a list of names"),
    ],
)
def test_a_family_file_that_is_none_is_refused(text: str, said: str, tmp_path: Path) -> None:
    assert said in senseless(f"weight_sync.family={own_family(tmp_path, text)}")


def test_shipped_files_parse_and_engines_are_found() -> None:
    assert engine_yaml("sglang")["name"] == "sglang"
    with pytest.raises(FamilyError, match="unknown engine 'trt': there are sglang, vllm"):
        engine_yaml("trt")
