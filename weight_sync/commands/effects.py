"""What a choice is worth: the same sync with other buckets, a relay, other quantisation, another source, without digests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from weight_sync.commands.common import Job, job_of
from weight_sync.errors import ConfigError, WeightSyncError
from weight_sync.layout.table import Layout
from weight_sync.plan.schedule import Schedule, make_schedule
from weight_sync.session.inputs import dropped_names
from weight_sync.simulate import Options, Simulation
from weight_sync.simulate.sources import first_holders

AS_IT_IS = "as it is"
BUCKETS = (1 << 18, 1 << 20, 1 << 22, 1 << 25, 1 << 28)
QUANTISED = "fp8_block"
"""The scheme that a job without one is tried with."""


@dataclass(frozen=True, slots=True)
class Effect:
    """choice: in words. seconds, bytes: of the sync with it, None where it cannot be. limit: what limits it, or why not."""

    choice: str
    seconds: float | None
    bytes: float | None
    limit: str


@dataclass(frozen=True, slots=True)
class Choice:
    """The sync as it is. planned: its schedule with the planner's sources. source: plan or first, as simulate takes it."""

    overrides: Sequence[str]
    job: Job
    layouts: tuple[Layout, Layout]
    planned: Schedule
    options: Options
    source: str


def simulated_schedule(job: Job, layouts: tuple[Layout, Layout]) -> Schedule:
    """The job's schedule. ConfigError where the simulator does not know how it runs."""
    schedule = job.inputs.schedule(layouts)
    if schedule.beside is not None:
        raise ConfigError("weight_sync.landing.to=loader: waves and loaders of engines are not simulated")
    return schedule


def from_first_holders(schedule: Schedule, source: Layout) -> Schedule:
    """The same with the lowest holder of each box as its sender."""
    return make_schedule(first_holders(schedule.plan, source), schedule.costs, schedule.budget)


def effects(base: Choice, now: Simulation, run: Callable[[Schedule, Options], Simulation]) -> list[Effect]:
    """`now` first, then every other choice, each alone. run: simulates a schedule on the same cluster."""
    result = [_effect(AS_IT_IS, now)]
    for label, make in _choices(base):
        try:
            result.append(_effect(label, run(*make())))
        except WeightSyncError as error:
            text = str(error)
            result.append(Effect(label, None, None, text if len(text) <= 160 else text[:159] + "…"))
    return result


def _effect(label: str, simulation: Simulation) -> Effect:
    p = simulation.prediction
    return Effect(label, p.seconds, p.nbytes, simulation.failed or p.limit)


def _choices(base: Choice) -> Iterator[tuple[str, Callable[[], tuple[Schedule, Options]]]]:
    options = base.options

    def schedule() -> Schedule:
        return base.planned if base.source == "plan" else from_first_holders(base.planned, base.layouts[0])

    for size in BUCKETS:
        if size != options.bucket:
            yield f"buckets of {_binary(size)}", lambda size=size: (schedule(), replace(options, bucket=float(size)))
    if options.engines > 1:
        label = "without a relay" if options.relay else "relay from engine to engine"
        yield label, lambda: (schedule(), replace(options, relay=not options.relay))
    scheme = base.job.rollout.quant
    other = "none" if scheme else QUANTISED
    yield ("bf16, not quantised" if scheme else f"quantised: {QUANTISED}"), lambda: (_planned_with(base, other), options)
    if base.source == "plan":
        yield (
            "source: the lowest rank that holds a box",
            lambda: (from_first_holders(base.planned, base.layouts[0]), options),
        )
    else:
        yield "source: the planner's choice", lambda: (base.planned, options)
    yield (
        "without digests" if options.verify else "with digests",
        lambda: (
            schedule(),
            replace(options, verify=not options.verify),
        ),
    )


def _planned_with(base: Choice, scheme: str) -> Schedule:
    """The schedule of the same job with another scheme ("none": what is quantised is left as it is), with the same sources."""
    if scheme == "none":
        job = base.job
        source, target = replace(job.trainer, quant=None), replace(job.rollout, quant=None)
        inputs = replace(job.inputs, source=source, target=target, dropped=sorted(dropped_names(target, "rollout")))
        job = replace(job, trainer=source, rollout=target, inputs=inputs)
    else:
        job = job_of([*base.overrides, f"weight_sync.quant.scheme={scheme}"])
    layouts = job.inputs.layouts()
    found = simulated_schedule(job, layouts)
    return found if base.source == "plan" else from_first_holders(found, layouts[0])


def _binary(size: int) -> str:
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"
