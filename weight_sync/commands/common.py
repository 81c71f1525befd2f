"""What several commands need: the job that some overrides describe, its planning inputs, and words such as output=."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from weight_sync.config import compose_job, declared_sides, hf_config
from weight_sync.errors import ConfigError
from weight_sync.plan.schedule import Budget, CostModel
from weight_sync.schema import JobConf, LandingChoice
from weight_sync.session.inputs import Declared, PlanInputs, dims_of, dropped_names


@dataclass(frozen=True, slots=True)
class Job:
    """A composed job and what planning needs of it. config: the model's HF config."""

    conf: JobConf
    config: dict[str, Any]
    trainer: Declared
    rollout: Declared
    inputs: PlanInputs


def job_of(overrides: Sequence[str]) -> Job:
    """The job that these overrides describe, checked as train.py would check it. No weights, no GPU, no engine.

    Raises ConfigError (and FamilyError, ParallelError) for what can be known from config alone.
    """
    conf = compose_job(list(overrides))
    config = hf_config(conf)
    trainer, rollout = declared_sides(conf, config)
    if trainer is None:
        raise ConfigError("trainer=fsdp2: its layout is read from live ranks; planning from config works for trainer=megatron")
    if not isinstance(rollout, Declared):
        raise ConfigError("weight_sync.engine=recorded: the layout is read from live engines; planning needs a declared one")
    worlds = dims_of(trainer, "trainer").world, dims_of(rollout, "rollout").world
    inputs = PlanInputs(
        trainer,
        rollout,
        *hosts_of(conf.plan.gpus_per_node, *worlds),
        sorted(dropped_names(rollout, "rollout")),
        CostModel(**asdict(conf.weight_sync.costs)),
        Budget(**asdict(conf.weight_sync.budget)),
        straddle=conf.weight_sync.quant.straddle.value,
        loader=conf.weight_sync.landing.budget if conf.weight_sync.landing.to is LandingChoice.loader else 0,
    )
    return Job(conf, config, trainer, rollout, inputs)


def inputs_of(overrides: Sequence[str]) -> PlanInputs:
    """The planning inputs of job_of."""
    return job_of(overrides).inputs


def hosts_of(gpus_per_node: int | None, trainer: int, rollout: int) -> tuple[list[str], list[str]]:
    """The host of every rank of both sides: trainer ranks fill nodes in rank order and rollout ranks follow, one GPU each.

    With gpus_per_node None every host is unknown (""). A live session asks the ranks instead.
    """
    if gpus_per_node is None:
        return [""] * trainer, [""] * rollout
    names = [f"node{index // gpus_per_node}" for index in range(trainer + rollout)]
    return names[:trainer], names[trainer:]


def words_of(words: Iterable[str], *keys: str) -> tuple[dict[str, str], list[str]]:
    """(key -> value of the words key=value with one of these keys, the other words). ConfigError for a key given twice."""
    found: dict[str, str] = {}
    rest: list[str] = []
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or key not in keys:
            rest.append(word)
        elif key in found:
            raise ConfigError(f"{key}= is given twice: {found[key]} and {value}")
        else:
            found[key] = value
    return found, rest


def output_of(words: list[str]) -> tuple[str, list[str]]:
    """("table" or "json", the other words). Raises ConfigError for another output= or more than one."""
    found, rest = words_of(words, "output")
    output = found.get("output", "table")
    if output not in ("table", "json"):
        raise ConfigError(f"output={output}: must be output=table or output=json")
    return output, rest
