"""What of a miles run cannot be synced is refused by the flag that asks for it, before a model is built."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from weight_sync.errors import BindError, ConfigError
from weight_sync.schema import VerifyLevel
from weight_sync_integrations.miles import hook
from weight_sync_integrations.miles.job import block_of, check_marker, first_level, job_of, pause_choice, refuse
from weight_sync_integrations.miles.updater import Updater
from weight_sync_integrations.sglang.plugin import MARKER


def args(**changes: Any) -> Any:
    """miles's arguments, as far as they are read."""
    values = {
        "weight_sync": {"strategy": "p2p_tcp"}, "update_weight_transfer_mode": "p2p", "pause_generation_mode": "retract",
        "sglang_custom_weight_loader": [MARKER], "rollout_external": False, "lora_rank": 0, "lora_adapter_path": None,
        "colocate": False, "offload_train": False, "offload_rollout": False, "sglang_pp_size": 1, "prefill_num_servers": None,
        "train_backend": "megatron", "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2,
        "context_parallel_size": 1, "expert_model_parallel_size": 1, "expert_tensor_parallel_size": 1,
        "use_tp_pp_dp_mapping": False, "make_vocab_size_divisible_by": 128, "bf16": True, "fp16": False,
    }  # fmt: skip
    return SimpleNamespace(**(values | changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lora_rank": 16}, "--lora-rank 16"),
        ({"lora_adapter_path": "adapters"}, "adapters are not part of the plan"),
        ({"colocate": True}, "--colocate"),
        ({"offload_train": True}, "--offload-train"),
        ({"offload_rollout": True}, "--offload-rollout"),
        ({"rematerialize_param_from_master_weight": True}, "--rematerialize-param-from-master-weight"),
        ({"update_weight_transfer_mode": "disk-delta"}, "--update-weight-transfer-mode disk-delta"),
        ({"update_weight_mode": "delta"}, "--update-weight-mode delta"),
        ({"sglang_pp_size": 2}, "--pause-generation-mode abort"),
        ({"prefill_num_servers": 1}, "--prefill-num-servers"),
        ({"sglang_enable_eplb": True}, "--sglang-enable-eplb"),
    ],
)
def test_what_cannot_be_synced_is_refused_by_its_flag(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        refuse(args(**changes), is_lora=False)


def test_a_plain_run_and_one_with_pipelined_engines_that_abort_are_taken() -> None:
    refuse(args(), is_lora=False)
    refuse(args(sglang_pp_size=2, pause_generation_mode="abort"), is_lora=False)


def test_the_updater_itself_refuses_lora_too_for_miles_tells_it_only_there() -> None:
    with pytest.raises(ConfigError, match="--lora-rank"):
        Updater(args(), None, is_lora=True)


@pytest.mark.parametrize("block", [None, "p2p_tcp", {}, {"strategy": "pigeon"}, {"strategy": "p2p_tcp", "verfy": 1}])
def test_a_block_that_is_missing_or_wrong_is_refused_with_what_it_should_be(block: Any) -> None:
    with pytest.raises(ConfigError, match=r"p2p_tcp|verfy \(weight_sync has"):
        block_of(args(weight_sync=block))


def test_a_witness_of_the_trainer_is_refused_by_its_key() -> None:
    with pytest.raises(ConfigError, match=r"weight_sync\.verify\.trainer_witness: miles's own export .* Leave it out"):
        block_of(args(weight_sync={"strategy": "p2p_tcp", "verify": {"trainer_witness": True}}))


def test_a_block_takes_its_strategys_values_and_changes_what_it_names() -> None:
    conf = block_of(args(weight_sync={"strategy": "p2p_rdma", "timeouts": {"sync": 7}}))
    assert conf.transport.options == {"protocol": "rdma"}
    assert (conf.timeouts.sync, conf.timeouts.connect) == (7.0, 300.0)


def test_engines_that_would_start_without_our_marker_are_found_before_they_start() -> None:
    with pytest.raises(ConfigError, match="sglang_custom_weight_loader"):
        check_marker(args(sglang_custom_weight_loader=None))
    check_marker(args(sglang_custom_weight_loader=None, rollout_external=True))


def test_check_weight_update_equal_raises_the_level_of_the_first_sync_and_the_block_that_of_every_one() -> None:
    conf = block_of(args())
    assert first_level(args(check_weight_update_equal=True), conf) is VerifyLevel.check_weight_equal
    assert first_level(args(check_weight_update_equal=False), conf) is VerifyLevel.digest
    every = block_of(args(weight_sync={"strategy": "p2p_tcp", "verify": {"level": "check_weight_equal"}}))
    assert every.verify.level is VerifyLevel.check_weight_equal


def test_the_pause_mode_is_miles_own_unless_the_block_says_another() -> None:
    assert pause_choice(args(pause_generation_mode="in_place"), block_of(args())) == "in_place"
    assert pause_choice(args(), block_of(args(weight_sync={"strategy": "p2p_tcp", "pause": "abort"}))) == "abort"


def test_a_job_has_the_trainers_sizes_its_engines_sizes_and_an_uneven_pipeline_as_it_was_built() -> None:
    sizes = {"tp": 4, "pp": 1, "attn_dp": 2, "moe_ep": 4}
    job = job_of(args(), block_of(args()), 8, 3, sizes, [[3], [1]])
    assert (job.trainer.ranks, job.trainer.tp, job.trainer.pp, job.trainer.pipeline) == (8, 2, 2, [3, 1])
    assert (job.rollout.engines, job.rollout.tp, job.rollout.attn_dp, job.rollout.moe_ep) == (3, 4, 2, 4)
    assert job_of(args(), block_of(args()), 8, 3, sizes, [[1, 1], [1, 1]]).trainer.vpp == 2


def test_engines_of_different_sizes_cannot_share_a_plan() -> None:
    updater = Updater.__new__(Updater)
    with pytest.raises(BindError, match="different sizes"):
        updater.connect_rollout_engines([object(), object()], None, engine_gpu_counts=[2, 4])
    with pytest.raises(BindError, match="no engine is alive"):
        updater.connect_rollout_engines([None], None)


class _Theirs:
    pass


@pytest.mark.parametrize("name", hook.ACTORS)
def test_the_hook_replaces_every_updater_that_miles_or_slime_could_choose(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType(name)
    module.UpdateWeightFromDistributed = module.UpdateWeightFromTensor = _Theirs  # type: ignore[attr-defined]
    monkeypatch.setattr(hook, "ACTORS", (name,))
    monkeypatch.setitem(hook.sys.modules, name, module)
    hook.install(args())
    assert module.UpdateWeightFromDistributed is module.UpdateWeightFromTensor is Updater


def test_the_hook_says_so_where_no_actor_is_loaded_or_none_that_it_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hook, "ACTORS", ("nothing.of.the.kind",))
    with pytest.raises(ConfigError, match=r"nothing\.of\.the\.kind"):
        hook.install(args())
    with pytest.raises(ConfigError, match="is not known"):
        hook.replace_in(ModuleType("other"), Updater)
