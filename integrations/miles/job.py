"""What of miles's arguments a sync depends on: our block, the trainer's sizes, and what cannot be synced.

miles's arguments are a Namespace of a few hundred flags; only those named here are read. Attributes that one of the supported
versions (miles-rl 0.0.2, the main branch of August 2026, slime of the same month) does not have are read with a default.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from weight_sync.config import check_job, strategies, strategy_with
from weight_sync.errors import ConfigError, listed
from weight_sync.schema import JobConf, ModelConf, PauseChoice, RolloutConf, SyncConf, TrainerConf, VerifyLevel
from weight_sync_integrations.sglang.plugin import MARKER

BLOCK = "weight_sync"
"""The key of our block in the file that --custom-config-path names."""


def block_of(args: Any) -> SyncConf:
    """Our block: {"strategy": NAME} and whatever of it shall differ from that strategy's file (docs/config.md lists the keys).

    --check-weight-update-equal raises the level of the first sync, see first_level(). Raises ConfigError.
    """
    block = getattr(args, BLOCK, None)
    if not isinstance(block, Mapping) or "strategy" not in block:
        raise ConfigError(
            f"--custom-config-path must name a YAML file with `{BLOCK}: {{strategy: NAME}}` in it, where NAME is one of "
            f"{', '.join(strategies())}; found {block!r}"
        )
    conf = strategy_with(block)
    if conf.verify.trainer_witness:
        raise ConfigError(
            f"{BLOCK}.verify.trainer_witness: miles's own export is bound to its updaters and is not compared. Leave it out; "
            "train.py has it with trainer=megatron, for the same family and sizes"
        )
    return conf


def first_level(args: Any, conf: SyncConf) -> VerifyLevel:
    """The level of the first sync: with --check-weight-update-equal at least check_weight_equal.

    Every other sync has the level of the block, so `verify: {level: check_weight_equal}` there checks every one. miles's own
    comparison, which its train script asks the engines for after the first update, stays what it is.
    """
    asked = bool(getattr(args, "check_weight_update_equal", False))
    return VerifyLevel.check_weight_equal if asked else conf.verify.level


def refuse(args: Any, *, is_lora: bool) -> None:
    """Raise ConfigError, naming every flag at fault and what to do, for a run that cannot be synced this way."""
    if problems := [*_refusals(args, is_lora)]:
        raise ConfigError("weight_sync cannot take over the weight updates of this run: " + "; ".join(problems))


def _refusals(args: Any, is_lora: bool) -> Iterator[str]:
    def has(name: str) -> Any:
        return getattr(args, name, None)

    if is_lora or (has("lora_rank") or 0) > 0 or has("lora_adapter_path"):
        yield (
            f"--lora-rank {has('lora_rank')}: adapters are not part of the plan, and the weights they sit on do not change. "
            "Use miles's own updater (leave out --custom-megatron-init-path), or merge the adapters"
        )
    if has("colocate"):
        yield "--colocate: engines on the trainer's GPUs hand their memory back and forth. Give engines GPUs of their own"
    for flag in ("offload_train", "offload_rollout", "fsdp_cpu_offload", "rematerialize_param_from_master_weight"):
        if has(flag):
            yield f"--{flag.replace('_', '-')}: weights are not resident under fixed addresses during the update. Leave it out"
    if (mode := has("update_weight_transfer_mode")) not in (None, "broadcast", "p2p"):
        yield f"--update-weight-transfer-mode {mode}: only broadcast and p2p name an updater that can be replaced"
    if (mode := has("update_weight_mode")) not in (None, "full"):
        yield f"--update-weight-mode {mode}: only full"
    pp, pause = int(has("sglang_pp_size") or 1), pause_of(args)
    if pp > 1 and pause != "abort":
        yield (
            f"--sglang-pp-size {pp} with --pause-generation-mode {pause}: SGLang's schedulers do not stand still in one. "
            "Set --pause-generation-mode abort"
        )
    if has("prefill_num_servers") is not None:
        yield "--prefill-num-servers: prefill and decode engines of different shapes in one run are not supported"
    if has("sglang_enable_eplb") or has("sglang_ep_num_redundant_experts"):
        yield "--sglang-enable-eplb, --sglang-ep-num-redundant-experts: experts do not stay where a plan puts them"


def pause_of(args: Any) -> str:
    """--pause-generation-mode; slime, which has no such flag, always uses its engines' default."""
    return str(getattr(args, "pause_generation_mode", None) or "retract")


def check_marker(args: Any) -> None:
    """Raise ConfigError unless engines will be started with our marker (external ones are asked when they are connected)."""
    named = getattr(args, "sglang_custom_weight_loader", None) or ()
    if MARKER not in named and not getattr(args, "rollout_external", False):
        raise ConfigError(
            "engines would start without weight_sync: add the line `sglang_custom_weight_loader: "
            f"[{MARKER}]` to the --custom-config-path file, or --sglang-custom-weight-loader {MARKER} to the command line"
        )


def hf_config_of(args: Any) -> dict[str, Any]:
    """config.json of --hf-checkpoint, which is also what engines are started with."""
    file = Path(str(args.hf_checkpoint)) / "config.json"
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"--hf-checkpoint {args.hf_checkpoint}: {error}") from None


def job_of(
    args: Any, conf: SyncConf, ranks: int, engines: int, rollout: Mapping[str, int], layers: Sequence[Sequence[int]]
) -> JobConf:
    """The job that a sync of this run is planned for, checked as the stand-alone job is.

    ranks: of the trainer. rollout: parallel sizes of one engine, as it runs. layers: decoder layers of each chunk, for each
    pipeline rank (Megatron).

    Raises ConfigError or ParallelError for what cannot be planned.
    """
    megatron = getattr(args, "train_backend", "megatron") == "megatron"
    sizes: dict[str, Any] = {"ranks": ranks}
    if megatron:
        tp = int(args.tensor_model_parallel_size)
        sizes |= {
            "tp": tp,
            "pp": int(args.pipeline_model_parallel_size),
            "vpp": len(layers[0]),
            "cp": int(args.context_parallel_size),
            "ep": int(args.expert_model_parallel_size),
            "etp": int(args.expert_tensor_parallel_size or tp),
            "pipeline": _stages(layers),
            "order": "tp-cp-ep-pp-dp" if getattr(args, "use_tp_pp_dp_mapping", False) else "tp-cp-ep-dp-pp",
            "vocab_multiple": int(args.make_vocab_size_divisible_by),
            "dtype": "bfloat16" if args.bf16 else "float16" if args.fp16 else "float32",
        }
    else:
        sizes["casts"] = ["float32"]  # FSDP may keep float32 masters; equal dtypes are not cast
    served = {"tp": rollout["tp"], "pp": rollout["pp"], "attn_dp": rollout["attn_dp"], "moe_ep": rollout["moe_ep"]}
    job = JobConf(
        weight_sync=conf,
        trainer=TrainerConf(kind="megatron" if megatron else "fsdp2", python="", **sizes),
        rollout=RolloutConf(kind="sglang", python="", engines=engines, device="cuda", **served),
        model=ModelConf(kind="checkpoint"),
    )
    check_job(job)
    return job


def _stages(layers: Sequence[Sequence[int]]) -> list[int] | None:
    """Layers of each virtual stage in the order of the model; None where they are all alike."""
    if len({len(chunks) for chunks in layers}) != 1:
        raise ConfigError(f"pipeline ranks hold different numbers of model chunks: {listed(map(len, layers))}")
    stages = [layers[rank][chunk] for chunk in range(len(layers[0])) for rank in range(len(layers))]
    return None if len(set(stages)) == 1 else stages


def pause_choice(args: Any, conf: SyncConf) -> str:
    """The session's pause mode: the block's, or with auto the one that miles was given."""
    return pause_of(args) if conf.pause is PauseChoice.auto else conf.pause.value
