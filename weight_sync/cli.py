"""python -m weight_sync: look at a plan without starting anything.

    python -m weight_sync plan    model.path=DIR [overrides] [output=table|json]
    python -m weight_sync explain TENSOR model.path=DIR [overrides]
    python -m weight_sync doctor

Overrides are those of train.py (trainer.tp=2 rollout=vllm ...); DIR needs a config.json only. No weights, no GPU, no engine.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from weight_sync.errors import ConfigError, WeightSyncError

COMMANDS = ("plan", "explain", "doctor")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code. Errors of ours are said once, without a trace."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return _run(words)
    except WeightSyncError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1


def _run(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print((__doc__ or "").strip())
        return 0
    command, rest = words[0], words[1:]
    if command not in COMMANDS:
        raise ConfigError(f"unknown command {command!r}: there are {', '.join(COMMANDS)}")
    if command == "doctor":
        return _doctor()
    if command == "explain":
        if not rest or "=" in rest[0]:
            raise ConfigError("explain needs the HF name of a tensor, e.g. model.layers.0.self_attn.q_proj.weight")
        return _explain(rest[0], rest[1:])
    return _plan(rest)


def _inputs(overrides: list[str]) -> Any:
    """PlanInputs of the job that these overrides describe. Hosts are unknown here: one for each rank's role is assumed."""
    from weight_sync.config import compose_job, declared_sides
    from weight_sync.session.inputs import PlanInputs, dims_of, dropped_names

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


def _plan(words: list[str]) -> int:
    from weight_sync.plan.explain import summary

    output = [word for word in words if word.startswith("output=")]
    if output not in ([], ["output=table"], ["output=json"]):
        raise ConfigError(f"{output[-1]}: must be output=table or output=json")
    schedule = _inputs([word for word in words if word not in output]).schedule()
    facts = {"digest": schedule.digest, **summary(schedule.plan), "methods": schedule.summary(), "rounds": schedule.rounds}
    if output == ["output=json"]:
        print(json.dumps(facts))
        return 0
    from rich.console import Console
    from rich.table import Table

    table = Table("plan", "", show_header=False)
    for key, value in facts.items():
        table.add_row(key, json.dumps(value) if isinstance(value, dict) else f"{value}")
    Console().print(table)
    return 0


def _explain(tensor: str, overrides: list[str]) -> int:
    from weight_sync.plan.explain import explain_tensor
    from weight_sync.session.inputs import layout_of

    inputs = _inputs(overrides)
    schedule = inputs.schedule()
    print(explain_tensor(schedule.plan, tensor, layout_of(inputs.source, "trainer")))
    for row in (schedule.plan.tensor == schedule.plan.catalog.ids[tensor]).nonzero()[0].tolist():
        ranks = int(schedule.plan.source_rank[row]), int(schedule.plan.target_rank[row])
        print(f"  trainer rank {ranks[0]} -> rollout rank {ranks[1]} travels {schedule.reason(row)}")
    return 0


def _doctor() -> int:
    from weight_sync.transport import preflight

    print(preflight.report(preflight.facts()))
    return 0
