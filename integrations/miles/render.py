"""A job with trainer=miles as miles's own command line, and the file that carries our block.

Parallel sizes are declared once, as for every other trainer, and become miles's flags here; everything else that miles has
flags for is `miles.arguments`. Nothing is imported from miles: parser.py asks its parser whether it takes the result.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weight_sync.errors import ConfigError, listed
from weight_sync.schema import JobConf
from weight_sync_integrations.sglang.plugin import MARKER

HOOK = "weight_sync_integrations.miles.hook.install"
MODEL_TOOLS = ("miles/utils/external_utils/model_args_utils.py", "scripts/models/{name}.sh")
"""Where a checkout says a model's own flags: the main branch has a program that prints them, 0.0.2 a shell file that sets
MODEL_ARGS."""


@dataclass(frozen=True, slots=True)
class Command:
    """words: flags and values, without those of the model definition. block: content of the --custom-config-path file."""

    words: tuple[str, ...]
    block: Mapping[str, Any]


def render(job: JobConf, block_file: Path) -> Command:
    """block_file: where the block will be written; miles reads it on the node where its train script runs.

    Raises ConfigError for a job that miles has no flags for, or that says the same thing twice.
    """
    own = dict(_sizes(job))
    own |= {"custom-megatron-init-path": HOOK, "custom-config-path": str(block_file)}
    if job.model.path is not None:
        own["hf-checkpoint"] = job.model.path
    given = {str(key).replace("_", "-").lstrip("-"): value for key, value in job.miles.arguments.items()}
    if job.model.path is not None:
        given.pop("hf-checkpoint", None)  # a recipe's place of the checkpoint, and the user's
    if twice := sorted(set(own) & set(given)):
        where = {"hf-checkpoint": "model.path"}
        sizes = "trainer.*, rollout.* and plan.gpus_per_node"
        told = listed(f"{name} (it follows from {where.get(name, sizes)})" for name in twice)
        raise ConfigError(f"miles.arguments: {told}: said already by the job; remove it there")
    own.setdefault("update-weight-transfer-mode", given.pop("update-weight-transfer-mode", "p2p"))
    words = [word for name, value in (own | given).items() for word in _words(name, value)]
    return Command(tuple(words), {"weight_sync": _plain(job.weight_sync), "sglang_custom_weight_loader": [MARKER]})


def _sizes(job: JobConf) -> Iterator[tuple[str, Any]]:
    t, r = job.trainer, job.rollout
    if r.kind != "sglang":
        raise ConfigError(f"rollout={r.kind}: miles's engines are SGLang; use rollout=sglang")
    if r.pp > 1:
        raise ConfigError(
            f"rollout.pp={r.pp}: miles takes as many GPUs for an engine as its tp; pipeline stages would have none"
        )
    if t.order != "tp-cp-ep-dp-pp":
        raise ConfigError(f"trainer.order={t.order}: miles has only tp-cp-ep-dp-pp")
    per_node = min(t.ranks, job.plan.gpus_per_node or 8)
    if t.ranks % per_node:
        raise ConfigError(f"trainer.ranks={t.ranks} do not fill nodes of {per_node} GPUs, which miles wants")
    yield "actor-num-nodes", t.ranks // per_node
    yield "actor-num-gpus-per-node", per_node
    yield "tensor-model-parallel-size", t.tp
    yield "pipeline-model-parallel-size", t.pp
    yield "context-parallel-size", t.cp
    yield "expert-model-parallel-size", t.ep
    yield "expert-tensor-parallel-size", t.etp
    if t.vpp > 1:
        yield "num-virtual-stages-per-pipeline-rank", t.vpp
    yield from _pipeline(job)
    # In this order, as in miles's own examples: its parser reads the first as an abbreviation of the second in one place.
    yield "rollout-num-gpus-per-engine", r.tp
    yield "rollout-num-gpus", r.engines * r.tp
    if r.moe_ep > 1:
        yield "sglang-ep-size", r.moe_ep
    if r.attn_dp > 1:
        yield "sglang-dp-size", r.attn_dp
        yield "sglang-enable-dp-attention", True


def _pipeline(job: JobConf) -> Iterator[tuple[str, int]]:
    """Megatron's flags for a first or last stage with other layers than the rest."""
    stages = job.trainer.pipeline
    if stages is None or len(set(stages)) == 1:
        return
    inner = set(stages[1:-1]) or {stages[0]}
    if len(inner) > 1 or job.trainer.vpp > 1:
        raise ConfigError(f"trainer.pipeline={list(stages)}: miles has flags for another first or last stage only")
    if stages[0] not in inner:
        yield "decoder-first-pipeline-num-layers", stages[0]
    if stages[-1] not in inner:
        yield "decoder-last-pipeline-num-layers", stages[-1]


def _words(name: str, value: Any) -> Iterator[str]:
    if value is None or value is False:
        return
    yield f"--{name}"
    if isinstance(value, Mapping):
        yield json.dumps(value, separators=(",", ":"))
    elif isinstance(value, list | tuple):
        yield from map(str, value)
    elif value is not True:
        yield str(value)


def _plain(conf: Any) -> dict[str, Any]:
    """The strategy as it was composed, so that miles's processes need no config of ours."""
    from dataclasses import asdict
    from enum import Enum

    def walk(value: Any) -> Any:
        if isinstance(value, Enum):
            return value.name
        if isinstance(value, dict):
            return {key: walk(item) for key, item in value.items()}
        return [walk(item) for item in value] if isinstance(value, list | tuple) else value

    return walk(asdict(conf))


def shell(job: JobConf, command: Command) -> str:
    """The same as a person would type it. The model's flags come from miles's own definition."""
    script = job.miles.script or "$MILES/train.py"
    root = str(Path(script).parent) if job.miles.script else "$MILES"
    lines: list[str] = []
    if job.miles.model is not None:
        lines.append(f'read -ra MODEL_ARGS <<< "$({job.trainer.python} {root}/{MODEL_TOOLS[0]} {job.miles.model})"')
    start = f"{job.trainer.python} {script}"
    if job.miles.ray_job is not None:
        runtime = shlex.quote(json.dumps({"env_vars": dict(job.miles.environment)}))
        start = f"ray job submit --address {job.miles.ray_job} --runtime-env-json {runtime} -- {start}"
    else:
        start = " ".join([*(f"{key}={shlex.quote(value)}" for key, value in job.miles.environment.items()), start])
    rows = [start + (' "${MODEL_ARGS[@]}"' if job.miles.model is not None else "")]
    for word in command.words:
        if word.startswith("--"):
            rows.append(f"  {word}")
        else:
            rows[-1] += f" {shlex.quote(word)}"
    return "\n".join([*lines, " \\\n".join(rows)])
