"""Configuration: Hydra schemas in, frozen core specs out. The only module that knows OmegaConf and Hydra.

The schemas catch unknown keys, wrong types and bad choices when a config is composed. Every field's comment says what it is;
docs/config.md lists them. Nothing here starts, connects or reads anything but YAML shipped with the package.
"""

from __future__ import annotations

import difflib
import inspect
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any, cast, get_type_hints

from weight_sync.delta.spec import DeltaSpec
from weight_sync.errors import ConfigError, FamilyError, listed
from weight_sync.layout.family import merged
from weight_sync.layout.parallel import EngineDims, TrainerDims
from weight_sync.layout.values import CASTS
from weight_sync.quant.emission import Quantisation
from weight_sync.quant.published import Excludes, from_hf
from weight_sync.quant.scheme import load_scheme
from weight_sync.schema import (
    DraftChoice,
    EngineLayout,
    JobConf,
    LandingChoice,
    ModelConf,
    QuantConf,
    RolloutConf,
    SyncConf,
    TrainerConf,
)
from weight_sync.session.failure import FailurePolicy
from weight_sync.session.inputs import Declared, Recorded
from weight_sync.transport import registry
from weight_sync.yamls import read_yaml

RECORDED = "recorded"
"""weight_sync.family: no family is declared; the engines' layout is recorded."""


def register_schemas() -> None:
    """Put the schemas into Hydra's ConfigStore, under the names that the YAML files extend."""
    from hydra.core.config_store import ConfigStore

    store = ConfigStore.instance()
    store.store(name="job_schema", node=JobConf)
    store.store(group="weight_sync", name="schema", node=SyncConf)
    store.store(group="trainer", name="schema", node=TrainerConf)
    store.store(group="rollout", name="schema", node=RolloutConf)
    store.store(group="model", name="schema", node=ModelConf)


def register_host_schemas() -> None:
    """The same where another program's config is the primary one: there weight_sync/schema is a file (conf/<host>) that extends
    these keys and fills the program's own."""
    from hydra.core.config_store import ConfigStore

    ConfigStore.instance().store(group="weight_sync", name="keys", node=SyncConf)


def sync_from(value: Any) -> SyncConf:
    """The `weight_sync` block of another program's config, however that program has turned it into data by now.

    Raises ConfigError naming the key for what does not fit the schema.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    if isinstance(value, SyncConf):
        return value
    if isinstance(value, str) or value is None:
        raise ConfigError(f"weight_sync is {value!r}, not a config group; use +weight_sync=NAME with {', '.join(strategies())}")
    try:
        plain = OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
        return cast("SyncConf", OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(SyncConf), plain)))
    except OmegaConfBaseException as error:
        raise ConfigError(f"weight_sync.{getattr(error, 'full_key', None) or ''}: {str(error).splitlines()[0]}") from None


def strategy_with(block: Mapping[str, Any]) -> SyncConf:
    """A block written by hand for another program: {"strategy": NAME} and what of it shall differ from that strategy's file.

    Raises ConfigError for an unknown strategy, and naming the key for what does not fit the schema.
    """
    from hydra import compose, initialize_config_module
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    name = block.get("strategy")
    if name not in strategies():
        raise ConfigError(f"weight_sync.strategy={name!r}: must be one of {', '.join(strategies())}")
    if unknown := [*_unknown_keys(block, SyncConf, "weight_sync")]:
        raise ConfigError(f"no such key: {listed(unknown)}")
    register_schemas()
    with initialize_config_module("weight_sync_conf", version_base="1.3"):
        base = compose("train", [f"+weight_sync={name}"]).weight_sync
    try:
        return sync_from(OmegaConf.merge(base, dict(block)))
    except OmegaConfBaseException as error:
        raise ConfigError(f"weight_sync.{getattr(error, 'full_key', None) or ''}: {str(error).splitlines()[0]}") from None


def strategies() -> list[str]:
    """Names that +weight_sync= accepts."""
    return sorted(p.name[:-5] for p in _files("weight_sync") if p.name.endswith(".yaml") and not p.name.startswith("_"))


def recipes() -> list[str]:
    """Names that +recipes= accepts."""
    return sorted(p.name[:-5] for p in _files("recipes") if p.name.endswith(".yaml"))


def model_configs() -> list[str]:
    """Names of the shipped HF configs that model.config accepts."""
    return sorted(p.name[:-5] for p in _files("weight_sync", "model_config") if p.name.endswith(".json"))


def hf_config(job: JobConf) -> dict[str, Any]:
    """The HF config of the job's model, without its weights: of model.config, or else config.json of model.path."""
    name, key = (job.model.config, "model.config") if job.model.config is not None else (job.model.path, "model.path")
    if name is None:
        raise ConfigError(
            f"which model? model.path=DIR with a config.json in it, or model.config=NAME with one of "
            f"{', '.join(model_configs())} (weights are not needed)"
        )
    return read_hf_config(name, key)


def read_hf_config(name: str, key: str) -> dict[str, Any]:
    """The HF config in a folder or file. key: the config key that named it; model.config also names shipped ones."""
    path = Path(name).expanduser()
    if key == "model.config" and name in model_configs():
        text = resources.files("weight_sync_conf").joinpath("weight_sync", "model_config", f"{name}.json").read_text()
    else:
        file = path / "config.json" if path.is_dir() else path
        if not file.is_file():
            hint = f"; shipped are {', '.join(model_configs())}" if key == "model.config" else ""
            raise ConfigError(f"{key}={name}: no {'config.json there' if path.is_dir() else 'such file or folder'}{hint}")
        text = file.read_text()
    try:
        config = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{key}={name}: not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{key}={name}: must hold an object, not {type(config).__name__}")
    return cast("dict[str, Any]", config)


def check_arguments(arguments: Sequence[str]) -> None:
    """Raise ConfigError for a strategy that is given in a way in which Hydra would not find it, and say how it is given.

    A recipe brings a strategy; beside one, another is chosen without a plus.
    """
    recipe = any(argument.startswith("+recipes=") for argument in arguments)
    for argument in arguments:
        given = re.fullmatch(r"([+~]*)weight_sync=([\w.-]*)", argument)
        if given and recipe and (given[1] != "" or given[2] in ("", "null")):
            raise ConfigError(
                f"{argument}: the recipe has chosen a strategy; another one is chosen without a plus, weight_sync=NAME; there "
                f"are {', '.join(strategies())}"
            )
        if given and not recipe and (given[1] != "+" or given[2] in ("", "null")):
            raise ConfigError(
                f"{argument}: a strategy is chosen with one plus, +weight_sync=NAME; there are {', '.join(strategies())}"
            )


def job_from(cfg: Any) -> JobConf:
    """The composed Hydra config as a JobConf. Raises ConfigError for what composition cannot see."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    node = OmegaConf.select(cfg, "weight_sync", throw_on_missing=False)
    if node is None:
        raise ConfigError(f"no strategy chosen: add +weight_sync=NAME; there are {', '.join(strategies())}")
    if isinstance(node, str):
        raise ConfigError(
            f"weight_sync is the plain string {node!r}, not a config group: Hydra did not find the group on its search path, "
            f"or ++ was used where + is meant. Use +weight_sync=NAME with one of {', '.join(strategies())}; from another "
            "program add hydra.searchpath=[pkg://weight_sync_conf]"
        )
    if not OmegaConf.is_dict(node):
        raise ConfigError(
            f"weight_sync={node!r} is no config group: use +weight_sync=NAME with one of {', '.join(strategies())}"
        )
    if OmegaConf.get_type(cfg) is not JobConf:
        raise ConfigError("the job's config was composed without its schema; is train.yaml the primary config?")
    # Hydra adds a key given with + to any schema without a word.
    content = cast("dict[str, Any]", OmegaConf.to_container(cfg))
    if unknown := [*_unknown_keys(content["weight_sync"], SyncConf, "weight_sync"), *_unknown_keys(content, JobConf, "")]:
        raise ConfigError(f"no such key: {listed(unknown)}")
    where = ""
    try:
        OmegaConf.resolve(cfg)
        where = "weight_sync."
        sync = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(SyncConf), node))
        where = ""
        job = cast("JobConf", OmegaConf.to_object(cfg))
    except OmegaConfBaseException as error:
        key = where + (getattr(error, "full_key", None) or "")
        hint = "; choose a strategy with +weight_sync=NAME" if key == "weight_sync.strategy" else ""
        raise ConfigError(f"{key or 'config'}: {str(error).splitlines()[0]}{hint}") from None
    job.weight_sync = sync
    return job


def _unknown_keys(value: Mapping[str, Any], schema: type, path: str) -> Iterator[str]:
    """Keys that the schema does not have, each with those it has."""
    hints = get_type_hints(schema)
    known = [item.name for item in fields(schema)]
    for key, item in value.items():
        name = f"{path}.{key}" if path else str(key)
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            yield f"{name} ({path or 'the job'} has {', '.join(known)}{hint})"
        elif is_dataclass(hints[key]) and isinstance(item, Mapping):
            yield from _unknown_keys(cast("Mapping[str, Any]", item), cast("type", hints[key]), name)


def check_job(job: JobConf) -> None:
    """What types cannot say. Raises ConfigError naming the key, its value and the legal ones."""
    if job.weight_sync.draft is DraftChoice.sync and engine_is_recorded(job):
        raise ConfigError("weight_sync.draft=sync needs a declared engine layout: set weight_sync.engine=auto")
    if job.weight_sync.landing.to is LandingChoice.loader:
        for wrong, key in (
            (job.rollout.kind == "sglang", "rollout.kind=sglang: its loaders cannot load a second time; see docs/quant.md"),
            (engine_is_recorded(job), "weight_sync.engine=recorded: it needs a declared engine layout"),
            (job.weight_sync.draft is not DraftChoice.refuse, "weight_sync.draft: drafts are written in place only"),
            (job.weight_sync.delta.enabled, "weight_sync.delta.enabled: a loader takes whole tensors"),
        ):
            if wrong:
                raise ConfigError(f"weight_sync.landing.to=loader does not go with {key}")
    if job.weight_sync.verify.trainer_witness and job.trainer.kind == "miles":
        raise ConfigError("weight_sync.verify.trainer_witness: trainer=miles gives no export; try it with trainer=megatron")
    declarable = ("derived", "constant", "state")
    for key, value, legal in (
        *((f"weight_sync.declare: {pattern}", keep, declarable) for pattern, keep in job.weight_sync.declare.items()),
        ("trainer.kind", job.trainer.kind, ("megatron", "fsdp2", "miles")),
        ("rollout.kind", job.rollout.kind, ("sglang", "vllm")),
        ("trainer.optimizer", job.trainer.optimizer, ("distributed", "replicated")),
        ("rollout.device", job.rollout.device, ("cpu", "cuda")),
        *(("trainer.casts", dtype, sorted({held for held, _ in CASTS})) for dtype in job.trainer.casts),
    ):
        if value not in legal:
            raise ConfigError(f"{key}={value!r}: must be one of {', '.join(legal)}")
    conf: SyncConf = job.weight_sync
    for key, number, least in (
        ("rounds", job.rounds, 1),
        ("steps_per_round", job.steps_per_round, 1),
        ("max_new_tokens", job.max_new_tokens, 1),
        ("rollout.engines", job.rollout.engines, 1),
        ("weight_sync.budget.source", conf.budget.source, 1024),
        ("weight_sync.budget.target", conf.budget.target, 1024),
        ("weight_sync.landing.budget", conf.landing.budget, 1024),
        ("weight_sync.costs.seconds_per_write", conf.costs.seconds_per_write, 0),
    ):
        if number < least:
            raise ConfigError(f"{key}={number}: must be at least {least}")
    for key, number in (
        ("plan.gpus_per_node", job.plan.gpus_per_node),
        ("plan.step_seconds", job.plan.step_seconds),
        ("plan.microbatches", job.plan.microbatches),
        ("plan.microbatch_seconds", job.plan.microbatch_seconds),
    ):
        if number is not None and not number > 0:
            raise ConfigError(f"{key}={number}: must be above 0, or null")
    for key, number in (
        *((f"weight_sync.timeouts.{item.name}", getattr(conf.timeouts, item.name)) for item in fields(conf.timeouts)),
        ("weight_sync.costs.wire", conf.costs.wire),
        ("weight_sync.costs.copy", conf.costs.copy),
        ("rollout.start_seconds", job.rollout.start_seconds),
    ):
        if not number > 0:
            raise ConfigError(f"{key}={number}: must be above 0")
    failure_policy(conf)
    delta_spec(conf)
    if conf.transport.name not in registry.names():
        raise ConfigError(f"weight_sync.transport.name={conf.transport.name!r}: must be one of {', '.join(registry.names())}")
    options = inspect.signature(registry.resolve(conf.transport.name))
    try:
        options.bind(**conf.transport.options)
    except TypeError as error:
        raise ConfigError(
            f"weight_sync.transport.options: {conf.transport.name}: {error}; it takes {', '.join(options.parameters)}"
        ) from None
    if conf.family == RECORDED and job.trainer.kind != "fsdp2":
        raise ConfigError(
            f"weight_sync.family=recorded: trainer={job.trainer.kind} holds tensors in ways that a family must declare; give "
            "one (python -m weight_sync new-family proposes it), and weight_sync.engine=recorded if only the engine side is "
            "undeclared"
        )
    if conf.family not in ("auto", RECORDED):
        family_yaml(conf.family)
    for key in ("unserved", "untouched"):
        if getattr(conf.recorded, key) and not engine_is_recorded(job):
            raise ConfigError(
                f"weight_sync.recorded.{key}={getattr(conf.recorded, key)}: only a recorded engine layout can leave something "
                "out; add weight_sync.engine=recorded, or declare it with a drop rule"
            )
    _trainer_dims(job)
    _engine_dims(job, engine_yaml(job.rollout.kind))
    if job.trainer.kind == "fsdp2":
        cut = {a: getattr(job.trainer, a) for a in ("tp", "pp", "vpp", "ep", "etp", "cp") if getattr(job.trainer, a) != 1}
        if cut:
            raise ConfigError(
                f"trainer=fsdp2 cuts parameters over dp only; remove {listed(f'{k}={v}' for k, v in cut.items())}"
            )
    if not job.prompts or any(not prompt for prompt in job.prompts):
        raise ConfigError("prompts: at least one, and none empty")


def failure_policy(conf: SyncConf) -> FailurePolicy:
    """Raises ConfigError for what does not go together."""
    try:
        return FailurePolicy(**{**asdict(conf.failure), "on_suspect": conf.failure.on_suspect.value})
    except ConfigError as error:
        raise ConfigError(f"weight_sync.{error}") from None


def delta_spec(conf: SyncConf) -> DeltaSpec | None:
    """What weight_sync.delta says, None where deltas are off. Raises ConfigError for values that are not legal."""
    delta = conf.delta
    try:
        spec = DeltaSpec(delta.snapshot.value, delta.max_share, delta.staging)
    except ConfigError as error:
        raise ConfigError(f"weight_sync.{error}") from None
    return spec if delta.enabled else None


def _files(*folder: str) -> list[Any]:
    root = resources.files("weight_sync_conf").joinpath(*folder)
    return [item for item in root.iterdir() if item.is_file()] if root.is_dir() else []


def _read(kind: str, name: str) -> Mapping[str, Any]:
    known = sorted(p.name[:-5] for p in _files("weight_sync", kind) if p.name.endswith(".yaml"))
    path, file = Path(name), name
    if path.suffix in (".yaml", ".yml") and path.is_file():
        text = path.read_text()
    elif name in known:
        text = resources.files("weight_sync_conf").joinpath("weight_sync", kind, f"{name}.yaml").read_text()
        file = f"conf/weight_sync/{kind}/{name}.yaml"
    else:
        whole = [item for item in known if not item.startswith("_")]  # the others are only there to be extended
        near = difflib.get_close_matches(name, whole, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise FamilyError(f"unknown {kind} {name!r}: there are {', '.join(whole)}, or give the path of a YAML file{hint}")
    data = read_yaml(text, file, FamilyError)
    if not isinstance(data, Mapping):
        raise FamilyError(f"{kind} {name}: must be a mapping, is {type(data).__name__}")
    return cast("Mapping[str, Any]", data)


@lru_cache(maxsize=64)
def family_yaml(name: str) -> dict[str, Any]:
    """The merged YAML of a family: its name, or the path of a YAML file (which may extend shipped ones)."""
    return merged(name, lambda item: _read("family", item))


@lru_cache(maxsize=16)
def engine_yaml(name: str) -> dict[str, Any]:
    """The merged YAML of an engine's conventions."""
    return merged(name, lambda item: _read("engine", item))


def quant_yaml(name: str) -> Mapping[str, Any]:
    """One file of conf/weight_sync/quant as it is written, without what it extends."""
    return _read("quant", name)


def quantisation_of(job: JobConf, config: Mapping[str, Any]) -> Quantisation | None:
    """What the engines' checkpoint is quantised with, None where it is not. config: the model's HF config.

    Raises ConfigError for an unknown scheme, and for a quantization_config that no scheme carries out.
    """
    conf: QuantConf = job.weight_sync.quant
    if conf.scheme in ("none", "bf16", "auto") and (conf.options or conf.exclude):
        raise ConfigError(f"weight_sync.quant: options and exclude belong to a named scheme, not to {conf.scheme}")
    if conf.scheme in ("none", "bf16"):
        return None
    if conf.scheme == "auto":
        served = read_hf_config(job.rollout.checkpoint, "rollout.checkpoint") if job.rollout.checkpoint else config
        published = served.get("quantization_config")
        return None if not published else Quantisation(*from_hf(published, quant_yaml))
    return Quantisation(load_scheme(conf.scheme, quant_yaml, conf.options), Excludes("compressed-tensors", tuple(conf.exclude)))


def shipped_families() -> list[str]:
    """Names of the families in the package, without those that are only there to be extended."""
    names = (item.name for item in _files("weight_sync", "family"))
    return sorted(name[:-5] for name in names if name.endswith(".yaml") and not name.startswith("_"))


def family_for(config: Mapping[str, Any]) -> str:
    """The family whose `architectures` holds the HF config's architecture, by exact name. FamilyError for none or two."""
    wanted = set(cast("list[str]", config.get("architectures") or []))
    known: dict[str, list[str]] = {}
    for item in _files("weight_sync", "family"):
        if item.name.endswith(".yaml"):
            name = item.name[:-5]
            for architecture in family_yaml(name).get("architectures", []):
                known.setdefault(architecture, []).append(name)
    found = sorted({name for architecture in wanted for name in known.get(architecture, [])})
    if len(found) != 1:
        raise FamilyError(
            f"family: auto finds {found or 'no family'} for architectures={sorted(wanted)}; declared are "
            f"{listed(sorted(known), 40)}. Set weight_sync.family to a name or to a YAML file of your own; with trainer=fsdp2 "
            "weight_sync.family=recorded needs none"
        )
    return found[0]


def compose_job(overrides: list[str]) -> JobConf:
    """The JobConf that `python train.py overrides` would run, composed without Hydra's main. By default with p2p_tcp."""
    from hydra import compose, initialize_config_module
    from hydra.errors import HydraException

    check_arguments(overrides)
    register_schemas()
    has_strategy = any(o.startswith("+recipes=") or o.lstrip("+").startswith("weight_sync=") for o in overrides)
    chosen = overrides if has_strategy else ["+weight_sync=p2p_tcp", *overrides]
    try:
        with initialize_config_module("weight_sync_conf", version_base="1.3"):
            job = job_from(compose("train", chosen))
    except HydraException as error:
        cause = f": {error.__cause__}" if error.__cause__ is not None else ""
        raise ConfigError(f"{error}{cause}") from None
    check_job(job)
    return job


def engine_is_recorded(job: JobConf) -> bool:
    """Whether the engines' layout is read from their own loaders instead of being declared."""
    return job.weight_sync.family == RECORDED or job.weight_sync.engine is EngineLayout.recorded


def declared_sides(job: JobConf, config: Mapping[str, Any]) -> tuple[Declared | None, Declared | Recorded]:
    """(trainer, rollout) as the job declares them for a model with this HF config. FSDP2 declares nothing: its ranks tell.

    Raises FamilyError, ParallelError or ConfigError for what can be known from config alone.
    """
    conf = job.weight_sync
    engine = engine_yaml(job.rollout.kind)
    dims = _engine_dims(job, engine)
    quantisation = quantisation_of(job, config)
    quant = None if quantisation is None else quantisation.to_json()
    left_out = (tuple(conf.recorded.unserved), tuple(conf.recorded.untouched))
    if conf.family == RECORDED:
        return None, Recorded(dict(config), dims, None, *left_out, quant=quant)
    family = family_yaml(family_for(config) if conf.family == "auto" else conf.family)
    symbols = {"draft": 1} if conf.draft is DraftChoice.sync else {}
    rollout: Declared | Recorded = Declared(family, dict(config), dims, engine, symbols, quant=quant)
    if engine_is_recorded(job):
        rollout = Recorded(dict(config), dims, family, *left_out, quant=quant)
    if job.trainer.kind == "fsdp2":
        return None, rollout
    t = job.trainer
    # A Megatron parameter has the trainer's dtype, whatever the checkpoint says.
    held_as = t.dtype if t.dtype in t.casts else ""
    own = dict(config) | ({"dtype": t.dtype} if t.dtype and not held_as else {})
    symbols = {"vocab_multiple": t.vocab_multiple * t.tp}
    return Declared(family, own, _trainer_dims(job), None, symbols, held_as or "", quant), rollout


def _trainer_dims(job: JobConf) -> dict[str, Any]:
    t = job.trainer
    pipeline = None if t.pipeline is None else list(t.pipeline)
    dims = {a: getattr(t, a) for a in ("ranks", "tp", "pp", "vpp", "ep", "etp", "cp", "order")} | {"pipeline": pipeline}
    TrainerDims(**{**dims, "pipeline": None if pipeline is None else tuple(pipeline)})
    return dims


def _engine_dims(job: JobConf, convention: Mapping[str, Any]) -> dict[str, Any]:
    r = job.rollout
    if r.kind == "vllm" and r.moe_ep not in (1, r.tp):
        raise ConfigError(f"rollout.moe_ep={r.moe_ep}: vLLM spreads experts over all tp ranks or cuts them; legal: 1, {r.tp}")
    if r.kind == "vllm" and r.attn_dp != 1:
        raise ConfigError(
            f"rollout.attn_dp={r.attn_dp}: vLLM has no attention data parallelism inside tp; use 1 and more engines"
        )
    pipeline = None if r.pipeline is None else list(r.pipeline)
    dims = {
        "tp": r.tp, "pp": r.pp, "attn_dp": r.attn_dp, "moe_ep": r.moe_ep, "engines": r.engines,
        "pipeline": pipeline, "remainder": convention.get("remainder", "inner"),
    }  # fmt: skip
    EngineDims(**{**dims, "pipeline": None if pipeline is None else tuple(pipeline)})
    return dims
