"""The installed verl's own configs with our override: what composes, and what is refused, by which message."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import verl
import yaml
from hydra.errors import HydraException
from omegaconf import OmegaConf, open_dict

from benchmarks.verl_rig import compose_config
from weight_sync.config import recipes, strategies, sync_from
from weight_sync.errors import ConfigError, WeightSyncError
from weight_sync.layout.parallel import EngineDims
from weight_sync_integrations.verl import backend, patch
from weight_sync_integrations.verl.check import check
from weight_sync_integrations.verl.job import job_for, settings_from

ROOT = Path(__file__).resolve().parents[2]
ROLLOUT = "actor_rollout_ref.rollout"
GOOD = [
    "trainer.v1.trainer_mode=separate_async",
    "actor_rollout_ref.actor.strategy=fsdp2",
    f"{ROLLOUT}.name=vllm",
    f"{ROLLOUT}.nnodes=1",
    f"{ROLLOUT}.n_gpus_per_node=2",
    "trainer.n_gpus_per_node=2",
]


@pytest.fixture(autouse=True)
def _cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "a-cluster:6379")  # whose GPUs are not this machine's


def composed(*overrides: str) -> Any:
    return compose_config(overrides)


@pytest.fixture(scope="module")
def base() -> Any:
    return composed("+weight_sync=p2p_tcp", *GOOD)


def changed(base: Any, *overrides: str) -> Any:
    """The same as composing with these overrides too, without reading 80 files again."""
    config = copy.deepcopy(base)
    for key, _, value in (override.lstrip("+").partition("=") for override in overrides):
        OmegaConf.update(config, key, yaml.safe_load(value), force_add=True)
    return config


def settings_of(config: Any) -> Any:
    from verl.utils.config import omega_conf_to_dataclass

    engine = omega_conf_to_dataclass(config.actor_rollout_ref.rollout.checkpoint_engine)  # as every worker of verl reads it
    return settings_from(engine.engine_kwargs[engine.backend])


MEGATRON = ["model_engine=megatron", *(override for override in GOOD if "strategy=" not in override)]


@pytest.mark.parametrize(
    ("strategy", "sides"), [*((name, GOOD) for name in strategies()), ("p2p_rdma", MEGATRON)], ids=lambda value: str(value)[:12]
)
def test_every_strategy_composes_with_main_ppo_and_fills_its_checkpoint_engine(strategy: str, sides: Sequence[str]) -> None:
    config = composed(f"+weight_sync={strategy}", *sides)
    check(config)
    chosen = config.actor_rollout_ref.rollout.checkpoint_engine
    assert (chosen.backend, chosen.custom_backend_module) == ("weight_sync", backend.__name__)
    settings = settings_of(config)
    assert settings.sync.strategy == strategy
    assert settings.transport == {"name": settings.sync.transport.name, **settings.sync.transport.options}
    job = job_for(settings, ranks=2, engines=1)
    assert (job.rollout.kind, job.rollout.tp, job.trainer.ranks) == ("vllm", 2, 2)


@pytest.mark.parametrize("recipe", recipes())
def test_every_recipe_composes_with_main_ppo_and_is_the_same_layout_as_in_train_py(recipe: str) -> None:
    config = composed(f"+recipes={recipe}")
    check(config)
    own = yaml.safe_load((ROOT / "recipes" / f"{recipe}.yaml").read_text())
    engines = own["rollout"]["engines"]
    job = job_for(settings_of(config), ranks=own["trainer"]["ranks"], engines=engines)
    assert config.trainer.nnodes * config.trainer.n_gpus_per_node == job.trainer.ranks
    rollout = config.actor_rollout_ref.rollout
    assert rollout.nnodes * rollout.n_gpus_per_node == engines * job.rollout.tp * job.rollout.pp
    for block, conf in (("trainer", job.trainer), ("rollout", job.rollout)):
        same = {key: value for key, value in own[block].items() if key in ("tp", "pp", "cp", "ep", "etp", "attn_dp", "moe_ep")}
        assert {key: getattr(conf, key) for key in same} == same
    # What verl's engine says once it is built (tests/verl/test_megatron.py); its bridge pads no vocabulary.
    assert (job.trainer.pipeline, job.trainer.vocab_multiple) == (None, 1)
    assert job.weight_sync.budget.target == own.get("weight_sync", {}).get("budget", {}).get("target", 64 << 20)


def test_sizes_and_model_are_declared_once_in_verls_own_keys(base: Any) -> None:
    sizes = {"tensor_model_parallel_size": 4, "data_parallel_size": 2, "name": "sglang"}
    config = changed(base, *(f"{ROLLOUT}.{key}={value}" for key, value in sizes.items()))
    job = job_for(settings_of(config), ranks=2, engines=1)
    # verl counts SGLang's tensor parallelism within an attention-DP group, SGLang and we over all of them
    assert (job.rollout.tp, job.rollout.attn_dp) == (8, 2)
    assert EngineDims(tp=8, attn_dp=2).sizes["attn_tp"] == 4


def test_keys_of_the_group_can_be_overridden_as_in_train_py() -> None:
    config = composed("+weight_sync=p2p_tcp", *GOOD, "weight_sync.verify.level=full", "weight_sync.timeouts.sync=12")
    sync = settings_of(config).sync
    assert (sync.verify.level.value, sync.timeouts.sync) == ("full", 12.0)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["+weight_sync=p2p_rdmx"], "Could not find 'weight_sync/p2p_rdmx'"),
        (["weight_sync=p2p_rdma"], "use \\+weight_sync"),
        (["++weight_sync=p2p_rdma"], "force-add of config groups is not supported"),
        (["+weight_sync=p2p_rdma", "weight_sync.transport.streams=9"], "weight_sync.transport.streams"),
        (["+weight_sync=p2p_rdma", "weight_sync.verify.level=most"], "most"),
    ],
)
def test_a_wrong_override_is_refused_by_hydra(overrides: list[str], says: str) -> None:
    with pytest.raises(HydraException, match=says):
        composed(*GOOD, *overrides)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["trainer.v1.trainer_mode=sync"], "silently replace the backend by naive. Set trainer.v1.trainer_mode=separate_async"),
        (["trainer.v1.trainer_mode=colocate_async"], "silently replace the backend by naive"),
        (["trainer.use_v1=False"], "runs rollout inside the actors"),
        ([f"{ROLLOUT}.nnodes=0"], "rollout engines need GPUs of their own"),
        ([f"{ROLLOUT}.checkpoint_engine.backend=nccl"], "another override has taken the backend back"),
        ([f"{ROLLOUT}.checkpoint_engine.custom_backend_module=other"], "no worker knows the backend"),
        ([f"+{ROLLOUT}.checkpoint_manager_class=x.Y"], "only verl's own manager"),
        ([f"{ROLLOUT}.name=hf"], "must be vllm or sglang"),
        (["actor_rollout_ref.actor.strategy=veomni"], "must be fsdp, fsdp2 or megatron"),
        (["actor_rollout_ref.hybrid_engine=True"], "It must be False"),
        ([f"{ROLLOUT}.free_cache_engine=True"], "sleep discards weights"),
        (["actor_rollout_ref.model.lora_rank=8"], "adapters are not the weights"),
        ([f"{ROLLOUT}.quantization=fp8"], "quantization=fp8: quantised rollout is not supported in verl"),
        (["actor_rollout_ref.actor.fsdp_config.qat.enable=True"], "quantised rollout is not supported in verl"),
        (["weight_sync.quant.scheme=fp8_block"], "quant.scheme=fp8_block: quantised rollout is not supported in verl"),
        (["actor_rollout_ref.actor.fsdp_config.param_offload=True"], "not on the device"),
        ([f"{ROLLOUT}.data_parallel_size=2"], "vLLM hides such replicas"),
        ([f"{ROLLOUT}.tensor_model_parallel_size=4"], "2 rollout GPUs are no multiple"),
        (["weight_sync.failure.attempts=2", "weight_sync.failure.on_suspect=drop"], "verl resumes every replica"),
        (
            ["weight_sync.verify.trainer_witness=true", "actor_rollout_ref.actor.strategy=fsdp"],
            "trainer_witness: verl's export of actor_rollout_ref.actor.strategy=fsdp moves the model; use fsdp2",
        ),
    ],
)
def test_what_cannot_work_is_refused_with_what_to_set(overrides: list[str], says: str, base: Any) -> None:
    check(base)
    with pytest.raises(ConfigError, match=says):
        check(changed(base, *overrides))


@pytest.fixture(scope="module")
def megatron() -> Any:
    return composed("+weight_sync=p2p_tcp", *MEGATRON)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["use_megatron_fsdp=True"], "Megatron-FSDP's shards are not planned for"),
        (["dtype=float16"], "dtype=float16 and actor_rollout_ref.rollout.dtype=bfloat16: .* not cast. Make them equal"),
        (["qat.enable=True"], "quantised rollout is not supported in verl"),
        (["param_offload=True"], "not on the device"),
        (["tensor_model_parallel_size=4"], "2 trainer GPUs are no multiple"),
    ],
)
def test_what_cannot_work_with_megatron_actors_is_refused_too(overrides: list[str], says: str, megatron: Any) -> None:
    check(megatron)
    with pytest.raises(ConfigError, match=says):
        check(changed(megatron, *(f"actor_rollout_ref.actor.megatron.{override}" for override in overrides)))


def test_a_quantised_checkpoint_is_refused_before_anything_starts(base: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    config = changed(base, f"actor_rollout_ref.model.path={tmp_path}")
    check(config)
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(ConfigError, match=r"has quantization_config fp8: quantised rollout is not supported in verl"):
        check(config)


def test_what_the_engine_has_built_fills_what_the_config_leaves_open_and_nothing_else(megatron: Any) -> None:
    built = {"pipeline": [3, 5], "vocab_multiple": 64}
    trainer = "actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.weight_sync.trainer"
    sizes = ["actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2", "trainer.n_gpus_per_node=4"]
    left_open = changed(megatron, *sizes)
    job = job_for(settings_of(left_open), 4, 1, built)
    assert (job.trainer.pipeline, job.trainer.vocab_multiple) == ([3, 5], 64)
    job = job_for(settings_of(changed(left_open, f"{trainer}.pipeline=[4, 4]", f"{trainer}.vocab_multiple=128")), 4, 1, built)
    assert (job.trainer.pipeline, job.trainer.vocab_multiple) == ([4, 4], 128)


def test_verls_fully_async_trainer_takes_the_group_too() -> None:
    overrides = ["+weight_sync=p2p_rdma", "actor_rollout_ref.rollout.name=vllm", "trainer.n_gpus_per_node=8"]
    config = compose_config(overrides, "fully_async_ppo_trainer", "experimental/fully_async_policy")
    check(config)
    assert settings_of(config).sync.strategy == "p2p_rdma"


def test_a_plain_string_is_refused_with_the_way_to_give_the_group(base: Any) -> None:
    config = copy.deepcopy(base)
    with open_dict(config):
        config.weight_sync = "p2p_rdma"  # what +weight_sync=p2p_rdma makes where the group is not on the search path
    with pytest.raises(ConfigError, match=r"plain string 'p2p_rdma'.*search-path plug-in was not found"):
        check(config)


def test_our_backend_without_a_strategy_is_refused() -> None:
    with pytest.raises(ConfigError, match="no strategy is chosen"):
        check(composed(*GOOD, f"{ROLLOUT}.checkpoint_engine.backend=weight_sync"))


def test_missing_gpus_are_counted_before_ray_starts(monkeypatch: pytest.MonkeyPatch, base: Any) -> None:
    monkeypatch.delenv("RAY_ADDRESS")
    with pytest.raises(ConfigError, match=r"takes 2 GPUs and rollout 2, in sum 4; this machine has 0"):
        check(base)


def test_a_backend_to_step_down_to_lifts_what_only_shard_to_shard_cannot_do(base: Any) -> None:
    down = f"{ROLLOUT}.checkpoint_engine.engine_kwargs.weight_sync.fallback=nccl"
    config = composed("+weight_sync=p2p_tcp", *GOOD, "actor_rollout_ref.model.lora_rank=8", down)
    check(config)
    assert settings_of(config).fallback == "nccl"
    with pytest.raises(ConfigError, match="must be another backend"):
        settings_of(changed(base, down.replace("nccl", "naive")))


def test_a_config_that_does_not_ask_for_us_is_left_alone() -> None:
    config = composed(f"{ROLLOUT}.name=vllm")
    check(config)
    assert config.actor_rollout_ref.rollout.checkpoint_engine.backend == "naive"


def test_a_block_that_was_written_by_hand_is_refused() -> None:
    with pytest.raises(ConfigError, match="lacks"):
        settings_from({"kind": "tcp"})
    with pytest.raises(ConfigError, match="config group"):
        sync_from("p2p_tcp")


@pytest.mark.parametrize(
    ("policy", "says"), [("none", "keeps verl from loading"), ("other", "keeps verl from loading"), ("auto", "")]
)
def test_a_plug_in_that_verl_was_told_to_skip_is_no_secret(
    policy: str, says: str, monkeypatch: pytest.MonkeyPatch, base: Any
) -> None:
    monkeypatch.setenv("VERL_USE_EXTERNAL_PLUGINS", policy)
    settings = base.actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.weight_sync
    if says:
        with pytest.raises(ConfigError, match=says):
            backend.WeightSyncEngine(bucket_size=1, **settings)
    else:
        backend.WeightSyncEngine(bucket_size=1, **settings)


def test_a_plug_in_that_failed_in_this_process_is_no_secret(monkeypatch: pytest.MonkeyPatch, base: Any) -> None:
    settings = base.actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.weight_sync
    monkeypatch.setattr(patch, "applied", lambda owner: False)  # verl swallowed the plug-in's exception
    with pytest.raises(ConfigError, match="verl has not loaded our plug-in"):
        backend.WeightSyncEngine(bucket_size=1, **settings)


def test_a_transport_that_the_machine_lacks_is_refused_where_the_worker_is() -> None:
    settings = composed("+weight_sync=p2p_rdma", *GOOD).actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.weight_sync
    with pytest.raises(WeightSyncError, match="p2p_rdma"):
        backend.WeightSyncEngine(bucket_size=1, **settings)


def test_verls_own_entry_point_says_our_message_and_ends_before_it_starts_anything() -> None:
    words = [sys.executable, "-m", "verl.trainer.main_ppo", "+weight_sync=p2p_rdma", f"{ROLLOUT}.name=vllm", "hydra.run.dir=."]
    words += ["hydra.output_subdir=null", "hydra/job_logging=none"]
    environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"} | {"PYTHONSAFEPATH": "1"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode != 0
    assert "ConfigError: +weight_sync=p2p_rdma: trainer.v1.trainer_mode=sync would silently" in done.stderr, done.stderr[-2000:]
    assert "ray" not in done.stdout.lower()


def test_the_search_path_is_only_ours_where_verl_is() -> None:
    assert verl.__version__.startswith("0.9")
    from hydra.core.plugins import Plugins
    from hydra.plugins.search_path_plugin import SearchPathPlugin

    names = [plugin.__name__ for plugin in Plugins.instance().discover(SearchPathPlugin)]
    assert "WeightSyncSearchPath" in names
    code = "from hydra import compose, initialize_config_module as i\nwith i('weight_sync_conf', version_base='1.3'):\n"
    code += " from weight_sync.config import register_schemas; register_schemas()\n"
    code += " print(compose('train', ['+weight_sync=p2p_tcp']).weight_sync.strategy)"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "p2p_tcp"
