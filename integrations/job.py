"""The stand-alone job: trainer ranks and inference servers on Ray, rounds of {optimizer steps, sync, generate, check}.

The same code runs on one CPU machine and on a cluster (ray.address, per-role placement); only the model may be a tiny one made
on the spot. Everything about config and sizes is checked before the first process starts.
"""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

from weight_sync.config import check_job, declared_sides, delta_spec, failure_policy
from weight_sync.errors import ConfigError, VerifyError
from weight_sync.ids import Deadline
from weight_sync.observe.observer import open_observer
from weight_sync.plan.schedule import Budget, CostModel
from weight_sync.schema import JobConf, PauseChoice, PlacementConf
from weight_sync.session.connect import SyncSpec
from weight_sync.session.contracts import PauseMode, RolloutEngine
from weight_sync.session.inputs import Declared, layout_of
from weight_sync.session.landing import Landing, To
from weight_sync.session.session import Timeouts, WeightSync
from weight_sync.session.verify import Level
from weight_sync.transport import preflight
from weight_sync_integrations.ray.engine import EngineActor, connect_engine, read_config
from weight_sync_integrations.ray.trainer import (
    RayTrainers,
    TrainerActor,
    TrainerSpec,
    gather,
    make_checkpoint,
    reference_tokens,
)
from weight_sync_integrations.served import check_served, published_config, quantise

V = TypeVar("V")

_LONG = 600.0
"""Seconds for one step of the job around a sync (building a model, a training step, an export)."""


def run(job: JobConf) -> int:
    """Run the job. Returns the committed version. Raises the first error; everything started is stopped either way."""
    check_job(job)
    check_served(job)
    if job.model.path is None and job.model.config is not None:
        raise ConfigError(
            f"model.config={job.model.config} is enough to plan; to run, give model.path=DIR, the checkpoint's folder"
        )
    config = read_config(job.model.path) if job.model.path else None
    if config is not None:
        resolve_early(job, config)
    check_machine(job)
    observer = open_observer(
        Path(job.output_dir).absolute(),
        strategy=job.weight_sync.strategy,
        config=plain(job),
        limit=job.weight_sync.observe.limit,
        wandb_mode=job.weight_sync.observe.wandb.value,
        wandb_project=job.weight_sync.observe.project,
        keys=() if job.weight_sync.observe.keys.value == "plain" else (job.weight_sync.observe.keys.value,),
    )
    with observer, ExitStack() as stack:
        folder = observer.report.directory
        stack.enter_context(local_or_cluster(job))
        path = job.model.path or _tiny_model(job, folder)
        config = config or read_config(path)
        spec = resolve_early(job, config)
        quantization = published_config(job, config)
        served = job.rollout.checkpoint or path
        if quantization is not None and not job.rollout.checkpoint:
            served = _quantised(job, path, folder / "quantised", quantization)
        token = secrets.token_urlsafe(32)
        trainers = stack.enter_context(started_trainers(job, path))
        engines = stack.enter_context(started_engines(job, served, token, folder))
        sync = WeightSync(
            trainers,
            engines,
            spec,
            pause=pause_mode(job, engines),
            timeouts=Timeouts(**asdict(job.weight_sync.timeouts)),
            observer=observer,
            failure=failure_policy(job.weight_sync),
            level=Level(job.weight_sync.verify.level.value),
        )
        _rounds(job, trainers, engines, sync, observer, folder, quantization)
        observer.print_table()
    return sync.version


def check_machine(job: JobConf) -> None:
    """Raise ConfigError for a transport this machine does not have, or an interpreter that is not there.

    With a running cluster the interpreters are on its nodes, and the transport is proved by a probe when ranks are bound.
    """
    transport = job.weight_sync.transport
    strategy = preflight.strategy_for(transport.name, transport.options)
    if job.ray.address:
        return
    if strategy is not None:
        preflight.require(strategy)
    for key, python in (("trainer.python", job.trainer.python), ("rollout.python", job.rollout.python)):
        if not _absolute(python).exists():
            raise ConfigError(f"{key}={python}: no such interpreter; envs/build.sh builds the environments of the demo")


def _absolute(python: str) -> Path:
    """Not resolve(): a virtual environment's python is a link, and following it leaves the environment."""
    path = Path(python).expanduser()
    return path if path.is_absolute() else Path.cwd() / path


def _rounds(
    job: JobConf,
    trainers: RayTrainers,
    engines: list[Any],
    sync: WeightSync,
    observer: Any,
    folder: Path,
    quantization: Mapping[str, Any] | None,
) -> None:
    before = _generate(job, engines)
    for version in range(1, job.rounds + 1):
        began = time.monotonic()
        losses = trainers.run("step", job.steps_per_round, deadline=Deadline.after(_LONG))
        shown = next((values for values in losses.values() if values), [])
        print(
            f"round {version}: {job.steps_per_round} optimizer step(s), loss {', '.join(f'{x:.4f}' for x in shown)}", flush=True
        )
        sync.sync(version)
        after = _generate(job, engines)
        if job.check_tokens:
            observer.tokens_match(_same_tokens(job, trainers, engines, before, after, version, folder, quantization))
        observer.step_seconds(time.monotonic() - began)
        before = after


def _generate(job: JobConf, engines: list[Any]) -> list[list[list[int]]]:
    deadline = Deadline.after(_LONG)
    return [[engine.generate(prompt, job.max_new_tokens, deadline) for prompt in job.prompts] for engine in engines]


def _same_tokens(
    job: JobConf,
    trainers: RayTrainers,
    engines: list[Any],
    before: Any,
    after: Any,
    version: int,
    folder: Path,
    quantization: Mapping[str, Any] | None,
) -> bool:
    """Greedy tokens after the sync against those after a disk load of the trainer's own export; and not those before.

    quantization: the export is quantised so before it is loaded. Raises VerifyError, which ends the job: an engine that
    generates from other weights must not go on.
    """
    export = Path(tempfile.mkdtemp(prefix=f"export-{version}-", dir=folder))
    try:
        trainers.run("export_hf", str(export), deadline=Deadline.after(_LONG))
        disk = str(export) if quantization is None else _quantised(job, str(export), export / "quantised", quantization)
        for engine in engines:
            engine.load_from_disk(disk, Deadline.after(_LONG))
        reloaded = _generate(job, engines)
        if after != reloaded:
            raise VerifyError(f"version {version}: tokens after the sync {after} are not those after a disk load {reloaded}")
        if after == before:
            raise VerifyError(
                f"version {version}: tokens did not change by the sync: {after}; was the old version still served?"
            )
        if job.rollout.dtype == "float32" and quantization is None:
            reference = _transformers_tokens(job, export)
            if any(tokens != reference for tokens in after):
                raise VerifyError(f"version {version}: engine tokens {after} are not those of transformers {reference}")
    finally:
        shutil.rmtree(export)
    return True


def _transformers_tokens(job: JobConf, export: Path) -> list[list[int]]:
    arguments = (str(export), job.prompts, job.max_new_tokens, job.rollout.dtype)
    return _beside_the_trainer(job, "reference tokens", reference_tokens, *arguments)


def resolve_early(job: JobConf, config: Mapping[str, Any]) -> SyncSpec:
    """Everything that can be wrong with family and sizes, found with the HF config alone. Returns the sync's spec."""
    conf = job.weight_sync
    trainer, rollout = declared_sides(job, config)
    if isinstance(rollout, Declared):
        layout_of(rollout, "rollout")
    if trainer is not None:
        layout_of(trainer, "trainer")
    costs, budget = CostModel(**asdict(conf.costs)), Budget(**asdict(conf.budget))
    return SyncSpec(
        trainer,
        rollout,
        witness=conf.verify.witness,
        trainer_witness=conf.verify.trainer_witness,
        costs=costs,
        budget=budget,
        casts=tuple(job.trainer.casts),
        straddle=conf.quant.straddle.value,
        finite=conf.quant.check_finite,
        report=conf.quant.report,
        delta=delta_spec(conf),
        landing=Landing(To(conf.landing.to.value), conf.landing.budget),
    )


def pause_mode(job: JobConf, engines: list[RolloutEngine]) -> PauseMode:
    """The mode asked for, if every engine offers it. Raises ConfigError listing what they offer."""
    offered = [engine.describe(Deadline.after(job.weight_sync.timeouts.connect)).pause_modes for engine in engines]
    choice = job.weight_sync.pause
    order: list[Any] = ["retract", "keep", "abort"] if choice is PauseChoice.auto else [choice.value]
    for mode in order:
        if all(mode in modes for modes in offered):
            return mode
    raise ConfigError(f"weight_sync.pause={choice.value}: the engines offer {[list(modes) for modes in offered]}")


@contextmanager
def local_or_cluster(job: JobConf) -> Iterator[None]:
    """A Ray connection: to a running cluster, or a local one that ends with the job."""
    import ray

    common: dict[str, Any] = {"log_to_driver": False, "logging_level": "error", "configure_logging": False}
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # keep CUDA_VISIBLE_DEVICES of roles without GPUs as is
    if job.ray.address:
        ray.init(address=job.ray.address, **common)
    else:
        ray.init(num_cpus=job.ray.num_cpus, object_store_memory=256 << 20, include_dashboard=False, **common)
    try:
        yield
    finally:
        ray.shutdown()


def _options(python: str | None, placement: PlacementConf, environment: Mapping[str, str]) -> dict[str, Any]:
    runtime: dict[str, Any] = {"env_vars": dict(environment)}
    if python is not None:
        runtime["py_executable"] = str(_absolute(python))
    return {
        "num_cpus": placement.num_cpus,
        "num_gpus": placement.num_gpus,
        "resources": dict(placement.resources),
        "runtime_env": runtime,
    }


def _tiny_model(job: JobConf, folder: Path) -> str:
    sizes = {**job.model.sizes, "dtype": job.model.dtype}
    arguments = (str(folder / "model"), job.model.kind, job.model.seed, sizes)
    return _beside_the_trainer(job, "make a checkpoint", make_checkpoint, *arguments)


def _quantised(job: JobConf, source: str, folder: Path, quantization: Mapping[str, Any]) -> str:
    return _beside_the_trainer(job, "quantise a checkpoint", quantise, source, str(folder), dict(quantization))


def _beside_the_trainer(job: JobConf, what: str, call: Callable[..., V], *arguments: Any) -> V:
    """Run a function in the trainer's environment, as a Ray task of its own. what: for errors."""
    import ray

    task = ray.remote(call).options(**_options(job.trainer.python, PlacementConf(), job.trainer.environment))
    return gather({0: task.remote(*arguments)}, Deadline.after(_LONG), what)[0]


@contextmanager
def started_trainers(job: JobConf, path: str) -> Iterator[RayTrainers]:
    """Trainer ranks with the model built. They end with the block."""
    import ray

    t = job.trainer
    environment = {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "HF_HUB_OFFLINE": "1", **t.environment}
    options = _options(t.python, t.placement, environment)
    actors = [ray.remote(TrainerActor).options(**options).remote(rank, t.ranks) for rank in range(t.ranks)]
    trainers = RayTrainers(actors)
    sizes = {a: getattr(t, a) for a in ("tp", "pp", "vpp", "ep", "etp", "cp")}
    transport = {"name": job.weight_sync.transport.name, **job.weight_sync.transport.options}
    spec = TrainerSpec(t.kind, t.ranks, sizes, t.order, t.optimizer, t.learning_rate, t.dtype, t.vocab_multiple, transport)
    try:
        host, port = gather({0: actors[0].rendezvous.remote()}, Deadline.after(_LONG), "rendezvous")[0]
        print(f"building {t.ranks} trainer ranks ({t.kind}: {', '.join(f'{k}{v}' for k, v in sizes.items())})", flush=True)
        trainers.run("build", spec, path, host, port, _LONG, deadline=Deadline.after(_LONG))
        yield trainers
    finally:
        for actor in actors:
            ray.kill(actor)


@contextmanager
def started_engines(job: JobConf, path: str, token: str, folder: Path) -> Iterator[list[Any]]:
    """Ready servers as RolloutEngines. Their process trees end with the block."""
    import ray

    r = job.rollout
    common: dict[str, Any] = {
        "model": str(Path(path).absolute()),
        "token": token,
        "tp": r.tp,
        "pp": r.pp,
        "ep": r.moe_ep,
        "attn_dp": r.attn_dp,
        "device": r.device,
        "dtype": r.dtype or "auto",
        "host": r.host,
        "python": str(_absolute(r.python)),
        "transport": {"name": job.weight_sync.transport.name, **job.weight_sync.transport.options},
        "arguments": tuple(r.arguments),
        "environment": dict(r.environment),
        **r.options,
    }
    actors = [ray.remote(EngineActor).options(**_options(None, r.placement, {})).remote() for _ in range(r.engines)]
    engines: list[Any] = []
    try:
        print(f"starting {r.engines} {r.kind} server(s) with tp{r.tp} pp{r.pp}", flush=True)
        deadline = Deadline.after(r.start_seconds)
        specs = [{**common, "name": f"{r.kind}-{i}", "log": str(folder / f"{r.kind}-{i}.log")} for i in range(r.engines)]
        calls = {i: a.start.remote(r.kind, s, r.start_seconds) for i, (a, s) in enumerate(zip(actors, specs, strict=True))}
        started = gather(calls, replace(deadline, at=deadline.at + 30.0), "server start")
        beside = {"draft": job.weight_sync.draft.value, "declare": dict(job.weight_sync.declare)}
        engines = [connect_engine(r.kind, started[i], token, **beside) for i in range(r.engines)]
        yield engines
    finally:
        for engine in engines:
            engine.close()
        gather({i: actor.stop.remote() for i, actor in enumerate(actors)}, Deadline.after(60.0), "server stop")


def plain(job: JobConf) -> dict[str, Any]:
    """The job's config as plain data, enums by name; no secrets are in it."""
    from enum import Enum

    def walk(value: Any) -> Any:
        if isinstance(value, Enum):
            return value.name
        if isinstance(value, dict):
            return {key: walk(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [walk(item) for item in value]
        return value

    return walk(asdict(job))
