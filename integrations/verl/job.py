"""The job that a verl worker group does, in our own words: JobConf from what verl hands to every checkpoint engine.

verl passes checkpoint_engine.engine_kwargs.weight_sync as keyword arguments; conf/verl/weight_sync_host/verl.yaml fills it from
verl's config by interpolation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from weight_sync.config import check_job, sync_from
from weight_sync.errors import ConfigError
from weight_sync.schema import JobConf, ModelConf, RolloutConf, SyncConf, TrainerConf

_TRAINER = {"strategy", "tp", "pp", "vpp", "ep", "etp", "cp", "pipeline", "vocab_multiple"}
_ROLLOUT = {"name", "dtype", "tp", "pp", "dp", "ep"}
_KINDS = {"fsdp": "fsdp2", "fsdp2": "fsdp2", "megatron": "megatron"}  # both FSDPs publish their shards


@dataclass(frozen=True, slots=True)
class Settings:
    """engine_kwargs.weight_sync, checked. fallback: a verl backend to step down to, with its own keyword arguments."""

    sync: SyncConf
    trainer: Mapping[str, Any]
    rollout: Mapping[str, Any]
    fallback: str | None
    fallback_kwargs: Mapping[str, Any]

    @property
    def transport(self) -> dict[str, Any]:
        return {"name": self.sync.transport.name, **self.sync.transport.options}


def settings_from(kwargs: Mapping[str, Any]) -> Settings:
    """Raises ConfigError for a block that did not come from +weight_sync=NAME, or with keys of which nothing is known."""
    known = {"sync", "trainer", "rollout", "fallback", "fallback_kwargs"}
    if missing := sorted(known - set(kwargs)):
        raise ConfigError(
            f"checkpoint_engine.engine_kwargs.weight_sync lacks {', '.join(missing)}; +weight_sync=NAME fills it, not hands"
        )
    for where, block, legal in (
        ("", kwargs, known),
        (".trainer", kwargs["trainer"], _TRAINER),
        (".rollout", kwargs["rollout"], _ROLLOUT),
    ):
        if unknown := sorted(set(block) - legal):
            raise ConfigError(
                f"checkpoint_engine.engine_kwargs.weight_sync{where}: no such key: {', '.join(unknown)}; there are "
                f"{', '.join(sorted(legal))}"
            )
    sync, fallback = sync_from(kwargs["sync"]), kwargs["fallback"]
    if sync.failure.on_suspect.value == "drop":
        raise ConfigError(
            "weight_sync.failure.on_suspect=drop: verl resumes every replica after a sync, also one that was left out with "
            "half of its weights written; use keep"
        )
    if fallback in ("weight_sync", "naive"):
        raise ConfigError(f"engine_kwargs.weight_sync.fallback={fallback}: must be another backend that crosses processes")
    return Settings(
        sync=sync,
        trainer=dict(kwargs["trainer"]),
        rollout=dict(kwargs["rollout"]),
        fallback=fallback,
        fallback_kwargs=dict(kwargs["fallback_kwargs"] or {}),
    )


def job_for(settings: Settings, ranks: int, engines: int, built: Mapping[str, Any] | None = None) -> JobConf:
    """The job of `ranks` actor ranks and `engines` replicas, checked as the stand-alone job is.

    built: what the training engine says of keys that are null in the settings (megatron.built). Raises ConfigError or
    ParallelError for what cannot be planned.
    """
    r = settings.rollout
    t = {key: (built or {}).get(key) if value is None else value for key, value in settings.trainer.items()}
    if t["strategy"] not in _KINDS:
        raise ConfigError(f"actor strategy {t['strategy']} has no shards to publish; there are {', '.join(_KINDS)}")
    tp, dp = int(r["tp"]), int(r["dp"] or 1)
    if r["name"] == "vllm" and dp > 1:
        raise ConfigError(
            f"rollout.data_parallel_size={dp}: only the first of vLLM's internal replicas can be written to; set 1"
        )
    sizes = {axis: int(t[axis] or 1) for axis in ("tp", "pp", "vpp", "ep", "cp")}
    job = JobConf(
        weight_sync=settings.sync,
        trainer=TrainerConf(
            kind=_KINDS[t["strategy"]],
            python="",
            ranks=ranks,
            **sizes,
            etp=int(t["etp"] or (sizes["tp"] if t["strategy"] == "megatron" else 1)),
            pipeline=None if t["pipeline"] is None else [int(layers) for layers in t["pipeline"]],
            vocab_multiple=int(t["vocab_multiple"] or 1),
            # verl keeps float32 masters under bfloat16 engines unless told otherwise; equal dtypes are not cast.
            casts=[] if t["strategy"] == "megatron" else ["float32"],
            dtype=r["dtype"] if t["strategy"] == "megatron" else None,
        ),
        # SGLang's tp counts the ranks of all attention-DP groups, verl's those of one.
        rollout=RolloutConf(
            kind=r["name"], python="", engines=engines, tp=tp * dp, pp=int(r["pp"]), attn_dp=dp, moe_ep=int(r["ep"]),
            dtype=r["dtype"], device="cuda",
        ),
        model=ModelConf(kind="checkpoint"),
    )  # fmt: skip
    check_job(job)
    return job


def served_config(config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """The HF config of the model as engines serve it: verl gives them its own dtype."""
    return {**config, "dtype": dtype, "torch_dtype": dtype}
