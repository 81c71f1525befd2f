"""The places of verl that this integration hooks into, overrides or is called by, and whether the installed verl has them.

Read from verl's source text: nothing is imported, so it costs half a second at most in the driver, before Ray and before an
engine. A hook that no longer fits would otherwise show late (a class without the method, in a worker) or never: a method that
verl has stopped calling refuses nothing.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from weight_sync.errors import ConfigError, listed

WRITTEN_FOR = "0.9.1"


@dataclass(frozen=True, slots=True)
class Seam:
    """file: below verl's folder. owner: a class, "" for the module. name: a function of it, "" for all of the class.

    takes: parameters of the function. order: names that its text uses, in this order, others between them.
    only: the rollout or the actor strategy that it matters for, "" for all. why: what of ours is there.
    """

    file: str
    owner: str
    name: str
    why: str
    takes: tuple[str, ...] = ()
    order: tuple[str, ...] = ()
    only: str = ""

    def __str__(self) -> str:
        return f"{self.file}: {'.'.join(filter(None, (self.owner, self.name)))}"


_BASE, _WORKERS = "checkpoint_engine/base.py", "workers/engine_workers.py"
_VLLM, _SGLANG = "workers/rollout/vllm_rollout/vllm_async_server.py", "workers/rollout/sglang_rollout/async_sglang_server.py"
_ENGINES = "workers/engine/{}/transformer_impl.py"
_BACKEND = "called in our backend"

SEAMS = (
    Seam("utils/device.py", "", "auto_set_device", "the config is checked there", takes=("config",)),
    Seam("workers/config/rollout.py", "CheckpointEngineConfig", "", "filled by the config group",
         order=("backend", "update_weights_bucket_megabytes", "engine_kwargs", "custom_backend_module")),
    Seam(_BASE, "CheckpointEngineRegistry", "register", "knows our backend", takes=("backend",)),
    Seam(_BASE, "CheckpointEngineRegistry", "new", "makes our backend, and the one below", takes=("backend",)),
    Seam(_BASE, "CheckpointEngine", "prepare", _BACKEND),
    Seam(_BASE, "CheckpointEngine", "build_topology", _BACKEND,
         takes=("actor_wg_world_size", "rollout_world_size", "metadata")),
    Seam(_BASE, "CheckpointEngine", "init_process_group", _BACKEND),
    Seam(_BASE, "CheckpointEngine", "finalize", _BACKEND),
    Seam(_BASE, "CheckpointEngine", "send_weights", _BACKEND, takes=("weights", "global_steps")),
    Seam(_BASE, "CheckpointEngine", "receive_weights", _BACKEND, takes=("global_steps",)),
    Seam(_BASE, "CheckpointEngineWorker", "__init__", "whose replica a worker is of",
         order=("server_adapter", "import_external_libs", "custom_backend_module", "CheckpointEngineRegistry")),
    Seam(_BASE, "CheckpointEngineWorker", "update_weights", "nothing arrives that verl would load", takes=("global_steps",)),
    Seam(_BASE, "CheckpointEngineWorker", "execute_checkpoint_engine", "our backend learns its worker", takes=("method",)),
    Seam(_BASE, "CheckpointEngineManager", "build_process_group", "who is asked, and for what", takes=("rollout",),
         order=("prepare", "build_topology", "init_process_group")),
    Seam(_BASE, "CheckpointEngineManager", "update_weights", "engines are resumed after finalize, and only then",
         takes=("global_steps",),
         order=("abort_replicas", "build_process_group", "update_weights", "finalize", "resume_generation_replicas")),
    Seam(_WORKERS, "ActorRolloutRefWorker", "update_weights", "hands over the training engine", takes=("global_steps", "mode"),
         order=("checkpoint_engine", "actor", "engine")),
    Seam(_WORKERS, "ActorRolloutRefWorker", "execute_checkpoint_engine", "our backend learns its worker", takes=("method",)),
    Seam("workers/rollout/replica.py", "RolloutReplicaRegistry", "register", "replicas that start our servers",
         takes=("name", "loader")),
    Seam("workers/rollout/replica.py", "RolloutReplicaRegistry", "", "replicas that start our servers", order=("_registry",)),
    Seam(_VLLM, "vLLMHttpServer", "_get_worker_extension_cls", "our worker extension", only="vllm"),
    Seam(_VLLM, "vLLMHttpServer", "_preprocess_engine_kwargs", "our weight transfer", takes=("engine_kwargs",), only="vllm"),
    Seam(_VLLM, "vLLMHttpServer", "get_server_address", "where its control routes are", only="vllm"),
    Seam(_VLLM, "vLLMHttpServer", "set_global_steps", "told after the commit", takes=("global_steps",), only="vllm"),
    Seam(_VLLM, "vLLMHttpServer", "resume_engine_generation", "refused while bytes are unverified", only="vllm"),
    Seam(_VLLM, "vLLMReplica", "resume_generation", "refused while bytes are unverified", only="vllm",
         order=("resume_engine_generation",)),
    Seam("workers/rollout/vllm_rollout/utils.py", "vLLMColocateWorkerExtension", "", "verl's half of the worker extension",
         only="vllm"),
    Seam(_SGLANG, "SGLangHttpServer", "get_server_address", "where its control routes are", only="sglang"),
    Seam(_SGLANG, "SGLangHttpServer", "set_global_steps", "told after the commit", takes=("global_steps",), only="sglang"),
    Seam(_SGLANG, "SGLangHttpServer", "resume_generation", "refused while bytes are unverified", only="sglang"),
    Seam(_SGLANG, "SGLangReplica", "resume_generation", "refused while bytes are unverified", only="sglang",
         order=("resume_generation",)),
    *(Seam(_ENGINES.format("fsdp"), "FSDPEngine", "", "shards are read from it", order=(name,), only=only)
      for only in ("fsdp", "fsdp2") for name in ("module", "optimizer", "is_param_offload_enabled")),
    *(Seam(_ENGINES.format("megatron"), "MegatronEngine", "", "shards and layout are read from it", order=(name,),
           only="megatron") for name in ("module", "optimizer", "tf_config", "provider", "is_param_offload_enabled")),
)  # fmt: skip


def require(rollout: str, strategy: str, folder: Path | None = None) -> None:
    """rollout, strategy: of the job. folder: verl's; the installed one by default. Raises ConfigError with every difference."""
    place = folder or _installed()
    if found := list(differing(place, (rollout, strategy))):
        version = place / "version/version"
        said = version.read_text().strip() if version.is_file() else "of unknown version"
        raise ConfigError(
            f"verl {said} in {place} differs from verl {WRITTEN_FOR}, which this integration was written for, where it hooks "
            f"in: {listed(found, 12)}. Install verl {WRITTEN_FOR}"
        )


def differing(folder: Path, parts: Sequence[str]) -> Iterator[str]:
    """What of SEAMS is not so in this copy of verl, one text each. parts: the rollout and the strategy in use."""
    for seam in SEAMS:
        if seam.only and seam.only not in parts:
            continue
        node = _find(folder / seam.file, seam.owner, seam.name)
        if node is None:
            yield f"{seam}: is gone ({seam.why})"
            continue
        if lacking := [name for name in seam.takes if name not in _parameters(node)]:
            yield f"{seam}: does not take {', '.join(lacking)} ({seam.why})"
        used = _names(node)
        if lacking := [name for name in seam.order if name not in used]:
            yield f"{seam}: does not use {', '.join(lacking)} ({seam.why})"
        elif not _in_order(seam.order, used):
            yield f"{seam}: does not use {', '.join(seam.order)} in this order ({seam.why})"


def _in_order(wanted: Sequence[str], used: Sequence[str]) -> bool:
    rest = iter(used)
    return all(name in rest for name in wanted)


def _installed() -> Path:
    spec = importlib.util.find_spec("verl")  # called from verl's own entry point: it is there
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


@cache
def _module(file: Path) -> ast.Module:
    return ast.parse(file.read_text()) if file.is_file() else ast.Module([], [])


def _find(file: Path, owner: str, name: str) -> ast.AST | None:
    """A function or class by name. A method that a class inherits within the file is found as well."""
    body = _module(file).body
    classes = {node.name: node for node in body if isinstance(node, ast.ClassDef)}
    if not owner:
        return next((node for node in body if _defines(node, name)), None)
    queue = [owner]
    while queue:
        found = classes.get(queue.pop(0))
        if found is None:
            continue
        if not name:
            return found
        if method := next((node for node in found.body if _defines(node, name)), None):
            return method
        queue += [base.id for base in found.bases if isinstance(base, ast.Name)]
    return None


def _defines(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name


def _parameters(node: ast.AST) -> set[str]:
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return set()
    given = node.args
    return {argument.arg for argument in (*given.posonlyargs, *given.args, *given.kwonlyargs)}


def _names(node: ast.AST) -> list[str]:
    """Names, attributes, functions and string constants in the order of the text."""
    found: list[tuple[int, int, str]] = []
    for inner in ast.walk(node):
        if inner is node:
            continue
        match inner:
            case ast.Name(id=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                found.append((inner.lineno, inner.col_offset, name))
            case ast.Attribute(attr=name):
                found.append((inner.end_lineno or 0, (inner.end_col_offset or 0) - len(name), name))
            case ast.Constant(value=str(name)):
                found.append((inner.lineno, inner.col_offset, name))
            case _:
                pass
    return [name for _, _, name in sorted(found)]
