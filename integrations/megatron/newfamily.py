"""Collects what Megatron-Bridge does with a model, and compares a family with it, on a shrunken model made for the purpose.

Runs in the trainer's environment (Megatron-Core, Megatron-Bridge, transformers): python -m
weight_sync_integrations.megatron.newfamily CONFIG NAME FOLDER writes FOLDER/family.yaml and FOLDER/report.json; the command
`python -m weight_sync new-family` starts it. Every rank is a forked process on gloo, so the stack is imported once.
"""

from __future__ import annotations

import json
import multiprocessing
import re
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from weight_sync.errors import BindError, FamilyError, ParallelError, WeightSyncError, listed
from weight_sync.layout.family import apply, mcore_convention, parse_family
from weight_sync.layout.parallel import TrainerDims
from weight_sync.layout.resolve import resolve
from weight_sync_integrations.newfamily_extend import merged_family, shorten
from weight_sync_integrations.newfamily_rules import Facts, Mapped, Proposal, propose

Yaml = dict[str, Any]

_SMALL: dict[str, int] = {
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 48,
    "intermediate_size": 320,
    "vocab_size": 250,
    "max_position_embeddings": 512,
    "moe_intermediate_size": 256,  # SGLang on CPU pads smaller ones to its tile
    "shared_expert_intermediate_size": 384,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 72,
    "kv_lora_rank": 40,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,
    "index_head_dim": 48,
    "index_n_heads": 4,
    "index_topk": 16,
}
"""Sizes of the tiny model, where the config has the key and its value is not 0 or null. Chosen so that products differ."""

_LEFT_OUT = (
    "quantization_config",
    "auto_map",
    "torch_dtype",
    "transformers_version",
    "_name_or_path",
    "dtype",
    "architectures",
)

LAYOUTS: tuple[dict[str, int], ...] = ({}, {"tp": 2, "pp": 2}, {"tp": 2, "ep": 2, "etp": 2}, {"pp": 2, "ep": 2})
"""Trainer layouts that a family is compared on; those with ep or etp only for models with experts."""

SECONDS = 300.0


def shrink(config: Mapping[str, Any]) -> Yaml:
    """The config of a tiny model of the same architecture: sizes small, lists by layer cut, everything else as it was."""
    small = {key: value for key, value in config.items() if key not in _LEFT_OUT}
    small |= {key: size for key, size in _SMALL.items() if isinstance(config.get(key), int) and config[key]}
    if isinstance(config.get("kv_lora_rank"), int):
        small["num_key_value_heads"] = small["num_attention_heads"]
        small.pop("head_dim", None)  # what is rotated; transformers computes it
    layers = config.get("num_hidden_layers")
    for key, value in small.items():
        if isinstance(value, list) and len(value) == layers:
            small[key] = value[: _SMALL["num_hidden_layers"]]
    if isinstance(small.get("mlp_only_layers"), list):
        small["mlp_only_layers"] = [layer for layer in small["mlp_only_layers"] if layer < _SMALL["num_hidden_layers"]]
    if isinstance(small.get("n_group"), int):
        small["n_group"], small["topk_group"] = min(small["n_group"], 2), 1
    return small


def require_known(config: Mapping[str, Any]) -> str:
    """The config's architecture, if Megatron-Bridge has a mapping for it. Raises FamilyError otherwise."""
    from importlib.metadata import version

    from megatron.bridge import AutoBridge

    named = list(config.get("architectures") or [])
    known = AutoBridge.list_supported_models()
    if len(named) != 1 or named[0] not in known:
        raise FamilyError(
            f"Megatron-Bridge {version('megatron-bridge')} has no mapping for architectures={named}, so nothing can be "
            f"proposed; it knows {listed(known, 100)}. A Megatron trainer needs a family written by hand; with trainer=fsdp2 "
            "weight_sync.family=recorded needs none"
        )
    return named[0]


def tiny_checkpoint(folder: Path, config: Mapping[str, Any]) -> Path:
    """A random checkpoint of the shrunken model. Raises FamilyError where transformers does not know the model."""
    from transformers import AutoConfig

    from weight_sync_integrations.checkpoints import write_checkpoint

    small = shrink(config)
    try:
        made = AutoConfig.for_model(small.pop("model_type", ""), **small)
    except ValueError as error:
        raise FamilyError(
            f"transformers does not know model_type={config.get('model_type')!r}, so no tiny model can be made: {error}"
        ) from None
    made.architectures = list(config["architectures"])
    if "n_routed_experts" in small and hasattr(made, "num_experts"):  # GLM-5's second count, which SGLang reads
        made.num_experts = made.n_routed_experts
    return write_checkpoint(folder, made, seed=0, dtype="bfloat16")


# -- ranks -------------------------------------------------------------------------------------------------------------


def on_ranks(world: int, work: Callable[..., Any], *arguments: Any, seconds: float = SECONDS) -> list[Any]:
    """work(*arguments) on every rank of a gloo world of forked processes; results by rank. Raises the first error."""
    fork = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="weight_sync_ranks_") as meeting:
        pool = ProcessPoolExecutor(world, mp_context=fork)
        try:
            futures = [pool.submit(_rank, rank, world, f"{meeting}/meet", work, arguments) for rank in range(world)]
            return [future.result(timeout=seconds) for future in futures]
        finally:
            # A rank that waits for a failed one in a collective would never end by itself.
            for process in list((pool._processes or {}).values()):
                process.kill()
            pool.shutdown(wait=True, cancel_futures=True)


def _rank(rank: int, world: int, meeting: str, work: Callable[..., Any], arguments: Sequence[Any]) -> Any:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
    result = work(*arguments)
    dist.barrier()
    return result


def collect(folder: Path) -> Facts:
    """What the bridge maps to what, of the checkpoint in `folder`. Called by the only rank of a world."""
    from safetensors import safe_open

    from weight_sync_integrations.megatron.model import build
    from weight_sync_integrations.megatron.source import MegatronSource

    trainer = build(folder, {}, optimizer="replicated")
    live = MegatronSource(trainer.chunks, trainer.optimizer).tensors()
    found: dict[str, Mapped] = {}
    for task in trainer.bridge._model_bridge.build_conversion_tasks(trainer.bridge.hf_pretrained, trainer.chunks):
        if task is not None and task.param_weight is not None:
            found[task.param_name] = _mapped(task)
    tensors: dict[str, tuple[tuple[int, ...], str]] = {}
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 (not a dict)
            part = file.get_tensor(name)
            tensors[name] = (tuple(part.shape), str(part.dtype).removeprefix("torch."))
    config = json.loads((folder / "config.json").read_text())
    return Facts(config, tensors, list(found.values()), [name for name in live if name not in found])


def _mapped(task: Any) -> Mapped:
    mapping = task.mapping
    hf = {"": mapping.hf_param} if isinstance(mapping.hf_param, str) else dict(mapping.hf_param)
    kind = type(mapping).__name__
    cut, other = {"ColumnParallelMapping": 0, "RowParallelMapping": 1, "QKVMapping": 0, "GatedMLPMapping": 0}.get(kind), ""
    if kind == "AutoMapping":
        try:
            found = mapping._detect_parallelism_type(task.megatron_module)
        except ValueError as error:
            found, other = "replicated", str(error).splitlines()[0]
        cut = {"column": 0, "row": 1, "replicated": None}[found]
    elif kind not in ("ColumnParallelMapping", "RowParallelMapping", "ReplicatedMapping", "QKVMapping", "GatedMLPMapping"):
        other = "a mapping that is not one of rename, cut, QKV and gated MLP"
    if getattr(mapping, "permute_dims", None):
        other = f"it permutes dims {tuple(mapping.permute_dims)}"
    weight = task.param_weight
    if cut is not None and weight.dim() == 1:
        cut = 0 if cut == 0 else None  # a bias of a row-parallel layer is whole on every rank
    return Mapped(task.param_name, tuple(weight.shape), str(weight.dtype).removeprefix("torch."), kind, hf, cut, other)


# -- the trainer oracle ------------------------------------------------------------------------------------------------


def compare(family: Mapping[str, Any], folder: Path, parallel: Mapping[str, int]) -> dict[str, Any]:
    """A merged family against the bridge's own load mappings, element for element, on forked ranks.

    Returns: {"layout", "parameters": compared, "differing": what differs, by rank and name}.
    """
    import numpy as np

    from weight_sync_integrations.megatron.model import checkpoint_shapes
    from weight_sync_integrations.megatron.oracle import element_ids, ids_of_shards

    sizes = {axis: parallel.get(axis, 1) for axis in ("tp", "pp", "ep", "etp")}
    dims = TrainerDims(ranks=sizes["pp"] * max(sizes["tp"], sizes["ep"] * sizes["etp"]), **sizes)
    config = json.loads((folder / "config.json").read_text())
    parsed = parse_family(family)
    layout = resolve(apply(parsed, config), mcore_convention(parsed), dims, "trainer", vocab_multiple=128 * dims.tp)
    table = element_ids(checkpoint_shapes(folder))
    differing: list[str] = []
    count = 0
    for rank, wanted in enumerate(on_ranks(dims.world, _oracle, folder, dict(parallel))):
        mine = {param.name: param.shape for param in layout.rank_params(rank)}
        for name in sorted(mine.keys() | wanted.keys()):
            if name not in mine or name not in wanted:
                differing.append(f"rank {rank} {name}: only {'the model' if name in wanted else 'the family'} has it")
            elif mine[name] != wanted[name].shape:
                differing.append(f"rank {rank} {name}: {list(mine[name])} here, {list(wanted[name].shape)} live")
        known = {name: shape for name, shape in mine.items() if name in wanted and shape == wanted[name].shape}
        ours = ids_of_shards([s for s in layout.rank_to_json(rank) if s["param"] in known], known, table)
        differing += [f"rank {rank} {name}: other elements" for name in known if not np.array_equal(ours[name], wanted[name])]
        count += len(mine)
    axes = " ".join(f"{axis}{size}" for axis, size in sizes.items() if size > 1) or "tp1"
    return {"layout": axes, "parameters": count, "differing": differing}


def _oracle(folder: Path, parallel: Mapping[str, int]) -> dict[str, Any]:
    from weight_sync_integrations.megatron.model import build, checkpoint_shapes
    from weight_sync_integrations.megatron.oracle import element_ids, oracle_ids

    trainer = build(folder, parallel, optimizer="replicated")
    return oracle_ids(trainer.chunks, trainer.bridge, element_ids(checkpoint_shapes(folder)))


def layouts_for(config: Mapping[str, Any]) -> list[dict[str, int]]:
    """LAYOUTS that this model can have."""
    sparse = any(config.get(key) for key in ("num_experts", "num_local_experts", "n_routed_experts"))
    return [layout for layout in LAYOUTS if sparse or not {"ep", "etp"} & layout.keys()]


# -- the whole ---------------------------------------------------------------------------------------------------------


def new_family(config: Mapping[str, Any], name: str, folder: Path) -> tuple[Proposal, list[dict[str, Any]]]:
    """Propose, shorten, and compare with the trainer oracle. Leaves the tiny checkpoint in folder/model.

    Returns: the proposal (its family may extend a shipped one) and a result of compare() for each layout; none where the
    proposal is incomplete.
    """
    from weight_sync_integrations.megatron import cpu

    cpu.install()
    require_known(config)
    model = tiny_checkpoint(folder / "model", config)
    try:
        facts = on_ranks(1, collect, model)[0]
    except WeightSyncError:
        raise
    except Exception as error:
        if isinstance(error, AttributeError) and (key := re.search(r"Config' object has no attribute '(\w+)'", str(error))):
            raise FamilyError(
                f"the HF config has no key {key[1]!r}, which Megatron-Bridge reads to build {config['architectures'][0]}; give "
                "the command the published config.json, or add the key with the model's value"
            ) from error
        raise FamilyError(
            f"Megatron-Bridge cannot build the shrunken model of {config['architectures'][0]}: {type(error).__name__}: "
            f"{error}. Is the config complete, as the published config.json is?"
        ) from error
    proposal = propose(name, facts)
    if proposal.unmatched:
        return proposal, []
    proposal.family = shorten(proposal.family, facts.config)
    merged = merged_family(proposal.family)
    apply(parse_family(merged), config)  # the full-size config must fit as well
    results: list[dict[str, Any]] = []
    for layout in layouts_for(facts.config):
        try:
            results.append(compare(merged, model, layout))
        except (BindError, ParallelError) as error:
            axes = " ".join(f"{axis}{size}" for axis, size in layout.items()) or "tp1"
            results.append({"layout": axes, "parameters": 0, "differing": [f"{type(error).__name__}: {error}"]})
    return proposal, results


def main(words: Sequence[str]) -> int:
    config, name, folder = json.loads(Path(words[0]).read_text()), words[1], Path(words[2])
    import torch
    import yaml

    torch.set_num_threads(1)
    try:
        proposal, results = new_family(config, name, folder)
    except WeightSyncError as error:
        (folder / "report.json").write_text(json.dumps({"error": f"{type(error).__name__}: {error}"}))
        return 1
    text = yaml.safe_dump(proposal.family, sort_keys=False, width=120)
    (folder / "family.yaml").write_text(text)
    report = {"unmatched": proposal.unmatched, "notes": proposal.notes, "trainer": results}
    (folder / "report.json").write_text(json.dumps(report, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
