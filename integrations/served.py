"""What a job's engines load: the trainer's checkpoint, or a quantised one; and quantised exports to compare a sync with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weight_sync.config import quantisation_of, read_hf_config
from weight_sync.errors import ConfigError
from weight_sync.schema import JobConf

_PUBLISHED = {"fp8_block": False, "fp8_block_ue8m0": True}
"""Schemes of which the tiny model is quantised on the spot, and whether their scales are powers of two."""


def check_served(job: JobConf) -> None:
    """Raise ConfigError where engines would load weights that the job says are quantised, and are not."""
    scheme = job.weight_sync.quant.scheme
    if scheme in ("auto", "none", "bf16") or job.rollout.checkpoint:
        return
    if job.rollout.dtype == "float32":
        raise ConfigError(
            f"weight_sync.quant.scheme={scheme} with rollout.dtype=float32: engines take quantised weights in bfloat16; set "
            "rollout.dtype=bfloat16"
        )
    if job.model.path is not None:
        raise ConfigError(
            f"weight_sync.quant.scheme={scheme}: the engines would load model.path={job.model.path}, the trainer's checkpoint; "
            "give rollout.checkpoint=DIR, the quantised one, whose config.json then says the scheme (quant.scheme=auto)"
        )
    if scheme not in _PUBLISHED:
        raise ConfigError(f"weight_sync.quant.scheme={scheme}: a tiny model can be served as {' or '.join(_PUBLISHED)}")
    if job.weight_sync.quant.exclude:
        raise ConfigError("weight_sync.quant.exclude: a tiny model's quantised checkpoint excludes what published ones do")


def published_config(job: JobConf, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The quantization_config of what the engines load; None where it is not quantised. config: the trainer's HF config."""
    if job.rollout.checkpoint:
        return read_hf_config(job.rollout.checkpoint, "rollout.checkpoint").get("quantization_config")
    scheme = job.weight_sync.quant.scheme
    if scheme not in _PUBLISHED:
        return None
    from weight_sync_integrations.quantised import fp8_config

    found = quantisation_of(job, config)
    assert found is not None
    return fp8_config(config, found.scheme.group, ue8m0=_PUBLISHED[scheme])


def quantise(source: str, folder: str, quantization: Mapping[str, Any]) -> str:
    """Write a quantised copy of a checkpoint (a Ray task: it needs the trainer's environment)."""
    from weight_sync_integrations.quantised import quantise_checkpoint

    return str(quantise_checkpoint(source, folder, quantization))
