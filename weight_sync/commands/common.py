"""What several commands need: the planning inputs of the job that some overrides describe, and the output= word."""

from __future__ import annotations

import json
from pathlib import Path

from weight_sync.config import compose_job, declared_sides
from weight_sync.errors import ConfigError
from weight_sync.session.inputs import PlanInputs, dims_of, dropped_names


def inputs_of(overrides: list[str]) -> PlanInputs:
    """PlanInputs of the job that these overrides describe. Hosts are unknown here: one for each rank's role is assumed."""
    job = compose_job(overrides)
    if job.model.path is None:
        raise ConfigError("model.path: give a folder with the model's config.json (weights are not needed)")
    file = Path(job.model.path) / "config.json"
    if not file.is_file():
        raise ConfigError(f"model.path={job.model.path}: no config.json there")
    trainer, rollout = declared_sides(job, json.loads(file.read_text()))
    if trainer is None:
        raise ConfigError("trainer=fsdp2: its layout is read from live ranks; plan and explain work for trainer=megatron")
    worlds = dims_of(trainer, "trainer").world, dims_of(rollout, "rollout").world
    return PlanInputs(trainer, rollout, [""] * worlds[0], [""] * worlds[1], sorted(dropped_names(rollout, "rollout")))


def output_of(words: list[str]) -> tuple[str, list[str]]:
    """("table" or "json", the other words). Raises ConfigError for another output= or more than one."""
    output = [word for word in words if word.startswith("output=")]
    if output not in ([], ["output=table"], ["output=json"]):
        raise ConfigError(f"{output[-1]}: must be output=table or output=json")
    return (output or ["output=table"])[0].removeprefix("output="), [word for word in words if word not in output]
