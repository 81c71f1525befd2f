"""What a vLLM worker holds beside the weights that a plan writes, and what of it a sync cannot keep right.

RULES is the table of the inventory (weight_sync_integrations.inventory): which attribute of which module class is derived,
constant or working memory. Run on a CPU (0.32.0): everything of dense and MoE models, of both with weights in fp8 blocks, draft
models, MLA with the plain CPU backend. Read in the source, not run: what only a GPU has.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from weight_sync_integrations.inventory import Found, Policy, Rule, find

if TYPE_CHECKING:
    import torch

RECOMPUTES = "recomputed by its process_weights_after_loading, which our worker runs when the session ends"

_ABSORBED = "absorbed from kv_b_proj"
RULES: tuple[Rule, ...] = (
    Rule("derived", "MLAAttention.W_UV", _ABSORBED),
    Rule("derived", "MLAAttention.W_UK_T*", _ABSORBED),
    Rule("constant", "*RotaryEmbedding*.*", "rotary table: a function of the config"),
    Rule("constant", "*Attention._?_scale*", "1 unless the KV cache is quantised"),
    Rule("constant", "*Attention._prob_scale*", "1 unless the KV cache is quantised"),
    Rule("constant", "*expert_map*", "global to local expert numbers of this rank"),
    Rule("constant", "RoutedExperts.expert_mask", "which experts this rank holds"),
    Rule("constant", "RoutedExperts.routing_tables*", "global to local expert numbers of this rank"),
    Rule("state", "*.kv_cache*", "KV cache, cleared before the commit"),
    Rule("state", "*topk_indices_buffer", "workspace of each step"),
    Rule("state", "*workspace*", "workspace of each step"),
)

_PACKAGES = ("vllm", "weight_sync_integrations")
_WEIGHTLESS = ("ngram", "ngram_gpu", "suffix")
"""Speculation without a model."""
_SKIP = frozenset({"VllmConfig", "CompilationConfig", "GroupCoordinator"})


def models_of(worker: Any) -> list[tuple[str, torch.nn.Module]]:
    """(role, model) of the served model and, if there is one with weights, of the draft model."""
    import torch

    runner = worker.model_runner
    models = [("target", runner.get_model())]
    draft = runner.get_draft_model() if hasattr(runner, "get_draft_model") else None
    return [*models, ("draft", draft)] if isinstance(draft, torch.nn.Module) else models


def find_all(models: list[tuple[str, torch.nn.Module]]) -> list[Found]:
    """Every tensor of these models, for the inventory."""
    return find(models, _PACKAGES, _SKIP)


def derived(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Tensors that RULES call derived, by name, with the module that makes them."""
    policy = Policy(RULES)
    return {
        found.name: found.module
        for found in find_all([("target", model)])
        if (rule := policy.rule(found)) is not None and rule.keep == "derived"
    }


def recompute(models: list[tuple[str, torch.nn.Module]], names: Iterable[str], dtype: torch.dtype) -> None:
    """Make derived tensors of these names anew from their modules' weights, as vLLM does after loading. In place."""
    import torch

    wanted = set(names)
    if not wanted:
        return
    modules = dict.fromkeys(found.module for found in find_all(models) if found.name in wanted)
    with torch.no_grad():
        for module in modules:
            module.process_weights_after_loading(dtype)


def rebuild_kernels(models: list[tuple[str, torch.nn.Module]]) -> list[str]:
    """Have expert kernels read the scales that the model holds now, where they read others. Returns the modules' names.

    vLLM's own reload of a quantised checkpoint makes new kernels, on tensors that it then copies into the parameters: a write
    into the parameters would not reach the kernels. It also offers to make kernels for weights that are in place already.
    """
    import torch
    from vllm.model_executor.utils import weights_already_processed

    found: list[str] = []
    for role, model in models:
        for path, module in model.named_modules():
            method = getattr(module, "quant_method", None)
            config = getattr(method, "moe_quant_config", None)
            own = {p.data_ptr() for p in module._parameters.values() if p is not None}
            read = [getattr(config, name, None) for name in ("w1_scale", "w2_scale")]
            if all(scale is None or scale.data_ptr() in own for scale in read):
                continue
            if not getattr(method, "supports_pre_processed_weights", False):
                continue  # it would pack them again; the inventory refuses what nobody knows
            with weights_already_processed(), torch.no_grad():
                method.process_weights_after_loading(module)
            found.append(path if role == "target" else f"{role}.{path}")
    return found


def refusals(worker: Any) -> list[str]:
    """Why this engine cannot be synced as it runs, each by the name of the setting that causes it. Empty when it can."""
    from weight_sync_integrations.device_memory import virtual_memory

    config = worker.vllm_config
    found: list[str] = []
    parallel = config.parallel_config
    if parallel.enable_eplb:
        found.append(
            f"enable_eplb (redundant experts: {parallel.eplb_config.num_redundant_experts}): experts do not stay where their "
            "numbers say; a plan would write the wrong expert. Start without it"
        )
    if config.model_config.enable_sleep_mode or getattr(config.model_config, "enable_cumem_allocator", False):
        found.append(
            "enable_sleep_mode: weights live in virtual memory that a transport cannot register, and that comes back under "
            "the same address with other pages. Start without it"
        )
    elif where := virtual_memory([p for _, model in models_of(worker) for p in model.parameters()]):
        found.append(where)
    if config.lora_config is not None:
        loaded = sorted(map(str, worker.list_loras()))
        found.append(
            f"LoRA is enabled, adapters loaded: {', '.join(loaded) or 'none'}. Layers are wrapped and generation depends on "
            "adapters that this sync does not write. Start without enable_lora"
        )
    draft = config.speculative_config
    if draft is not None and draft.method not in _WEIGHTLESS and len(models_of(worker)) == 1:
        found.append(f"speculative_config method={draft.method}: this vLLM does not show its draft model. Start without it")
    offload = getattr(config, "offload_config", None)
    if offload is not None and (gib := offload.uva.cpu_offload_gb) > 0:
        found.append(f"cpu_offload_gb={gib}: weights are read from the CPU. Start without it")
    if offload is not None and (group := offload.prefetch.offload_group_size) > 0:
        found.append(f"offload_group_size={group}: weights wander between CPU and device. Start without it")
    return found


def live_tensors(
    models: list[tuple[str, torch.nn.Module]], planned: frozenset[str] | None = None, *, all_of_them: bool = False
) -> dict[str, torch.Tensor]:
    """What a plan may write, drafts' names prefixed with "draft.": the planned ones; or all; or all of the target's.

    One memory has one name; what a draft shares with its target is the target's.
    """
    from weight_sync_integrations.vllm import live

    if planned is not None:  # asked several times while the engine stands still, and nothing has to be found out any more
        named = ((role, name, tensor) for role, model in models for name, tensor in live.weights(model))
        every = {name if role == "target" else f"{role}.{name}": tensor for role, name, tensor in named}
        return {name: tensor for name, tensor in every.items() if name in planned}
    tensors = dict(live.inspect(models[0][1]).tensors)
    if not all_of_them:
        return tensors
    places = {tensor.data_ptr() for tensor in tensors.values()}
    for role, model in models[1:]:
        own = live.inspect(model).tensors
        tensors |= {f"{role}.{name}": tensor for name, tensor in own.items() if tensor.data_ptr() not in places}
    return tensors
