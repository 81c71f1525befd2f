"""What an SGLang scheduler process holds beside the weights that a plan writes, and what of it a sync cannot keep right.

RULES is the table of the inventory (weight_sync_integrations.inventory): which attribute of which module class is derived,
constant or working memory. Run on a CPU (0.5.23): the rotary tables, the absorbed MLA matrices (of fp8 weights too), the
router's second name of its bias. Read in the source, not run: everything that only a GPU has.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from weight_sync.errors import listed
from weight_sync_integrations.inventory import Found, Rule, find

if TYPE_CHECKING:
    import torch

RECOMPUTES = "recomputed by the model's post_load_weights, which /end_weight_update runs"

_ABSORBED = "absorbed from kv_b_proj"
RULES: tuple[Rule, ...] = (
    Rule("derived", "DeepseekV2AttentionMLA.w_kc", _ABSORBED),
    Rule("derived", "DeepseekV2AttentionMLA.w_vc", _ABSORBED),
    Rule("derived", "DeepseekV2AttentionMLA.w_scale*", _ABSORBED),
    Rule("constant", "*RotaryEmbedding.*", "rotary table: a function of the config"),
    Rule("constant", "Qwen3Attention._fused_?_scale", "scale 1 of an unquantised KV cache"),
    Rule("constant", "RadixAttention.?_scale", "scale of the KV cache, set when the server started"),
    Rule("constant", "FusedMoE.quant_method.*strides*", "a function of the shapes"),
    Rule("state", "FusedMoE.quant_method.workspace", "workspace of each step"),
    Rule("state", "FusedMoE.quant_method.*_ptr", "workspace of each step"),
    Rule("state", "FusedMoE.quant_method.expert_offsets", "workspace of each step"),
    Rule("state", "FusedMoE.quant_method.problem_sizes?", "workspace of each step"),
    Rule("constant", "*.local_expert_mapping", "global to local expert numbers of this rank"),
    Rule("constant", "*.expert_map_*", "global to local expert numbers of this rank"),
    Rule("state", "LogitsProcessor.gathered_buffer*", "workspace of each step"),
    Rule("state", "*.dispatcher.*", "workspace of each step"),
    Rule("state", "*.zero_allocator.*", "workspace of each step"),
)

PACKAGES = ("sglang", "weight_sync_integrations")
SKIP = frozenset({"ServerArgs", "ModelConfig", "GroupCoordinator", "RuntimeContext"})


def is_cache_scale(module: torch.nn.Module, attribute: str) -> bool:
    """A parameter that attention has with a quantised checkpoint, for a quantised KV cache: no weight, and kept as it is."""
    return attribute in ("k_scale", "v_scale") and "RadixAttention" in (kind.__name__ for kind in type(module).__mro__)


def models_of(scheduler: Any) -> list[tuple[str, torch.nn.Module]]:
    """(role, model) of every model with weights in this process: the target and, if any, drafts."""
    models = [("target", scheduler.tp_worker.model_runner.model)]
    draft = scheduler.draft_worker
    if draft is None:
        return models
    if hasattr(draft, "weight_update_runners"):
        runners = draft.weight_update_runners()
    else:  # SGLang 0.5.16
        from sglang.srt.managers.scheduler_components.weight_updater import _get_draft_model_runner

        runner = _get_draft_model_runner(draft)
        runners = [] if runner is None else [("draft", runner)]
    return models + [(f"draft{i}" if i else "draft", runner.model) for i, (_, runner) in enumerate(runners)]


def find_all(models: Iterable[tuple[str, torch.nn.Module]]) -> list[Found]:
    """Every tensor of these models, for the inventory."""
    return find(models, PACKAGES, SKIP)


def loader(model: Any) -> Callable[[Any], object]:
    """What feeds HF tensors to a model when its loading is recorded."""

    def load(weights: Any) -> None:
        # What it derives from parameters (absorbed MLA matrices) is not part of where HF tensors go.
        if hasattr(model, "post_load_weights"):
            model.post_load_weights = lambda *args, **kwargs: None
        model.load_weights(weights)

    return load


def refusals(scheduler: Any) -> list[str]:
    """Why this engine cannot be synced as it runs, each by the name of the argument that causes it. Empty when it can."""
    from weight_sync_integrations.device_memory import virtual_memory

    args, runner = scheduler.server_args, scheduler.tp_worker.model_runner
    found: list[str] = []
    if moving := [
        f"{name}={value}"
        for name, still in (("enable_eplb", False), ("ep_num_redundant_experts", 0), ("init_expert_location", "trivial"))
        if (value := getattr(args, name, still)) != still
    ]:
        found.append(
            f"{', '.join(moving)}: experts are not, or do not stay, where their numbers say; a plan would write the wrong "
            "expert. Start without them"
        )
    elif not _experts_in_place():
        found.append("the live map of physical to logical experts is not the identity; restart the server to reset it")
    found += _undeclared_cuts(args)
    saver = getattr(scheduler, "memory_saver_adapter", None)
    if saver is not None and saver.enabled:
        found.append(
            "enable_memory_saver: weights live in virtual memory that a transport cannot register, and that comes back "
            "under the same address with other pages. Start without it"
        )
    elif where := virtual_memory([p for _, model in models_of(scheduler) for p in model.parameters()]):
        found.append(where)
    found += _rebound(scheduler)
    if released := sorted(getattr(getattr(scheduler, "weight_updater", None), "offload_tags", ())):
        found.append(f"/release_memory_occupation has released {', '.join(released)}; call /resume_memory_occupation first")
    if (mode := getattr(args, "weight_cache_mode", "off")) != "off":
        found.append(f"weight_cache_mode={mode}: weights are shared with other engines, which would be written to as well")
    for name in ("cpu_offload_gb", "offload_group_size"):
        if (value := getattr(args, name, 0) or 0) > 0:
            found.append(f"{name}={value}: weights wander between CPU and device. Start without it")
    if (manager := getattr(runner, "lora_manager", None)) is not None:
        names = sorted(ref.lora_name or ref.lora_id for ref in manager.lora_refs.values())
        found.append(
            f"LoRA is enabled, adapters loaded: {', '.join(names) or 'none'}. Layers are wrapped and generation depends on "
            "adapters that this sync does not write. Start without enable_lora"
        )
    if backend := getattr(args, "hicache_storage_backend", None):
        found.append(
            f"hicache_storage_backend={backend} keeps KV of old weights outside the engine, where /flush_cache does not "
            "reach. Start without it"
        )
    return found


def not_writable(scheduler: Any) -> dict[str, str]:
    """Weights that post-processing changed, so that no byte may be written into them: name -> why; a draft's with its role."""
    from weight_sync_integrations.sglang import live

    return {
        name if role == "target" else f"{role}.{name}": why
        for role, model in models_of(scheduler)
        for name, why in live.not_writable(model).items()
    }


def no_loader(scheduler: Any) -> str:
    """Why SGLang's own loader cannot take the weights instead (loader.py); "" where it can."""
    from weight_sync_integrations.sglang import live

    (_, model), *drafts = models_of(scheduler)
    if drafts:
        return f"it runs a draft model ({listed(role for role, _ in drafts)}), which is written in place only"
    return live.no_loader(model)


def _rebound(scheduler: Any) -> list[str]:
    """What depends on the target's weights and is another tensor after a sync."""
    model = models_of(scheduler)[0][1]
    found: list[str] = []
    if captures(scheduler):
        # post_load_weights copies w_kc and w_vc in place, but binds w_scale to a new tensor each time.
        bound = [path for path, m in model.named_modules() if _own_scale(m)]
        if bound:
            found.append(
                f"{listed(f'{path}.w_scale' for path in bound)}: SGLang binds it to a new tensor whenever weights change, and "
                "captured CUDA graphs keep reading the old one. Start with disable_cuda_graph, or serve a checkpoint with "
                "blocks of 128 by 128, which has none"
            )
    return found


def captures(scheduler: Any) -> bool:
    """Whether CUDA graphs read the weights, by the addresses that they had when they were captured."""
    return scheduler.device == "cuda" and not getattr(scheduler.server_args, "disable_cuda_graph", False)


def _own_scale(module: torch.nn.Module) -> bool:
    import torch

    scale = getattr(module, "w_scale", None)
    return isinstance(scale, torch.Tensor) and not any(
        scale.untyped_storage()._cdata == p.untyped_storage()._cdata for p in module.parameters()
    )


def _undeclared_cuts(args: Any) -> list[str]:
    """Arguments that cut parameters otherwise than conf/weight_sync/engine/sglang.yaml says."""
    tp, found = getattr(args, "tp_size", 1), list[str]()
    if (dense := getattr(args, "moe_dense_tp_size", None)) not in (None, tp):
        found.append(
            f"moe_dense_tp_size={dense} with tp_size={tp}: dense layers and shared experts are then not cut over all tensor "
            "ranks, which the engine's conventions do not declare. Start without it"
        )
    older = getattr(args, "dp_size", 1) if getattr(args, "enable_dp_attention", False) else 1  # SGLang 0.5.16
    attn_dp = getattr(args, "attn_dp_size", None) or older
    if getattr(args, "enable_dp_lm_head", False) and attn_dp > 1:
        found.append(
            f"enable_dp_lm_head=True with attn_dp_size={attn_dp}: the head is then cut over the ranks of one attention group, "
            "which the engine's conventions do not declare. Start without it"
        )
    return found


def keeps_prefixes(scheduler: Any) -> bool:
    """Whether finished requests leave KV behind that later requests find."""
    return not getattr(scheduler.server_args, "disable_radix_cache", False)


def _experts_in_place() -> bool:
    module = sys.modules.get("sglang.srt.eplb.expert_location")  # imported by every engine; without it there is no map
    metadata = None if module is None else module.get_global_expert_location_metadata()
    if metadata is None:
        return True
    places = metadata.physical_to_logical_map_cpu
    same = places.new_tensor(range(places.shape[1])).expand_as(places)
    return metadata.num_physical_experts == metadata.num_logical_experts and bool((places == same).all())


def live_tensors(models: Iterable[tuple[str, torch.nn.Module]]) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers, those of drafts prefixed with their role. One memory region has one name."""
    return _walk(models)[0]


def live_aliases(models: Iterable[tuple[str, torch.nn.Module]]) -> dict[str, list[str]]:
    """Other names of the tensors in live_tensors(): tied weights and what a draft shares with its target."""
    return _walk(models)[1]


def _walk(models: Iterable[tuple[str, torch.nn.Module]]) -> tuple[dict[str, torch.Tensor], dict[str, list[str]]]:
    tensors: dict[str, torch.Tensor] = {}
    aliases: dict[str, list[str]] = {}
    first: dict[tuple[Any, ...], str] = {}
    for role, model in models:
        prefix = "" if role == "target" else f"{role}."
        paths = _paths(model)
        for module, names in paths.items():
            own = [*module._parameters.items()]
            # Buffers that no checkpoint has (rotary tables) are not weights.
            own += [pair for pair in module._buffers.items() if pair[0] not in module._non_persistent_buffers_set]
            for leaf, tensor in own:
                if tensor is None or tensor.numel() == 0 or is_cache_scale(module, leaf):
                    continue
                storage = tensor.untyped_storage()._cdata
                key = (storage, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
                for path in names:
                    name = prefix + (f"{path}.{leaf}" if path else leaf)
                    known = first.setdefault(key, name)
                    if known == name:
                        tensors[name] = tensor.detach()
                    else:
                        aliases.setdefault(known, []).append(name)
    return tensors, aliases


def _paths(model: torch.nn.Module) -> dict[torch.nn.Module, list[str]]:
    """Every module with the paths by which its parents hold it, in named_modules() order.

    SGLang's layers refer to their neighbours' modules, so walking all paths would take exponentially long.
    """
    first = {module: path for path, module in model.named_modules()}
    paths = {module: [path] for module, path in first.items()}
    for parent, path in first.items():
        for name, child in parent._modules.items():
            here = f"{path}.{name}" if path else name
            if child is not None and here != first[child]:
                paths[child].append(here)
    return paths
