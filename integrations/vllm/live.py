"""Which live tensors of a vLLM model may be overwritten in place.

After loading, a layer may turn its parameters into what its kernel likes, or copy them into a derived tensor. Which ones a
write would miss or corrupt is observed (loading.py): watch_loading() takes a fingerprint of every tensor between loading and
post-processing, and inspect() says what was found.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

from weight_sync.errors import ConfigError, listed
from weight_sync_integrations.fingerprint import fingerprint
from weight_sync_integrations.loading import changed, seen
from weight_sync_integrations.vllm.tensors import derived, find_all

if TYPE_CHECKING:
    import torch

# Attention registers these as persistent buffers. They are constants unless the KV cache itself is quantised.
_RUNTIME_BUFFERS = frozenset({"_k_scale", "_v_scale", "_q_scale", "_prob_scale"})
# With a quantised checkpoint attention has these parameters while it loads: post-processing turns them into the buffers above.
_CACHE_SCALES = frozenset({"k_scale", "v_scale", "q_scale", "prob_scale", "k_zero_point", "v_zero_point", "q_zero_point"})
_MARK = "weight_sync_watch"


@dataclass(frozen=True, slots=True)
class Live:
    """The weights of one process.

    tensors: parameters and persistent buffers by vLLM's name; one name for each piece of memory. Without those that a sync
    derives anew (tensors.py).
    aliases: other names of the same memory (tied embeddings) -> the name in `tensors`.
    not_writable: name -> why writing it in place would not change, or would corrupt, what the engine computes.
    """

    tensors: dict[str, torch.Tensor]
    aliases: dict[str, str]
    not_writable: dict[str, str]


@dataclass(slots=True)
class _Witness:
    """What was seen while a model was loaded: fingerprints after load_weights, and reasons found after post-processing.

    made: plain attributes (also inside functions and kernels) that post-processing bound to new tensors.
    """

    loaded: dict[str, int]
    reasons: dict[str, str] = field(default_factory=dict)
    made: frozenset[str] = frozenset()


_WITNESSES: WeakKeyDictionary[torch.nn.Module, _Witness] = WeakKeyDictionary()


def watch_loading() -> None:
    """Observe every model this process loads from now on. Safe to call again.

    Raises: ConfigError when this vLLM has no `process_weights_after_loading` in its base loader (seen in 0.32.0).
    """
    from vllm.model_executor.model_loader import base_loader

    process = getattr(base_loader, "process_weights_after_loading", None)
    if process is None:
        import vllm

        raise ConfigError(
            f"vLLM {vllm.__version__} has no process_weights_after_loading in model_loader.base_loader; weight_sync "
            "observes it (written for 0.32.0) to know which parameters stay as loaded"
        )
    if getattr(process, _MARK, False):
        return

    def process_and_compare(model: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        witness = _Witness(seen(weights(model)))
        private = {id(tensor) for _, tensor in _private_tensors(model)}
        before = {found.name: ref(found.tensor) for found in find_all([("target", model)])}
        process(model, *args, **kwargs)
        witness.reasons = _compare(model, witness.loaded, private)
        witness.made = frozenset(
            found.name
            for found in find_all([("target", model)])
            if found.kind == "attribute" and (found.name not in before or before[found.name]() is not found.tensor)
        )
        _WITNESSES[model] = witness

    setattr(process_and_compare, _MARK, True)
    base_loader.process_weights_after_loading = process_and_compare


def inspect(model: torch.nn.Module) -> Live:
    """Look at a loaded model. Cheap: nothing is read but names and addresses."""
    tensors: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    seen: dict[tuple[int, int, tuple[int, ...], tuple[int, ...]], str] = {}
    made = derived(model)
    for name, tensor in weights(model):
        if name in made:
            continue
        place = (tensor.data_ptr(), tensor.nbytes, tuple(tensor.shape), tensor.stride())
        if tensor.numel() and place in seen:
            aliases[name] = seen[place]
            continue
        seen[place] = name
        tensors[name] = tensor
    witness = _WITNESSES.get(model)
    if witness is None:
        reason = "its loading was not observed: the server was started without WEIGHT_SYNC_TOKEN in its environment"
        return Live(tensors, aliases, dict.fromkeys(tensors, reason))
    reasons = dict(witness.reasons)
    for name, tensor in tensors.items():
        if name not in reasons and tensor.numel() == 0 and witness.loaded.get(name) != fingerprint(tensor):
            reasons[name] = "its memory was released after loading (sleep mode, or a later packing)"
        elif name not in witness.loaded and name not in reasons:
            reasons[name] = "it was made after the checkpoint was loaded"
    return Live(tensors, aliases, reasons)


def made_by_loading(model: torch.nn.Module) -> frozenset[str]:
    """Plain attributes that held new tensors when post-processing had run, by the inventory's names."""
    witness = _WITNESSES.get(model)
    return frozenset() if witness is None else witness.made


def no_loader(model: torch.nn.Module) -> str:
    """Why vLLM's own loader cannot be used again for this model; "" where it can (integrations/vllm/loader.py)."""
    if model not in _WITNESSES:
        return "its loading was not observed: the server was started without WEIGHT_SYNC_TOKEN in its environment"
    if online := _online_quantised(model):
        return f"vLLM quantises while it loads ({listed(online)}), which was never tried with its reload"
    try:
        from vllm.model_executor.model_loader.reload import layerwise
    except ImportError:
        layerwise = None
    names = ("initialize_layerwise_reload", "finalize_layerwise_reload", "get_layerwise_info", "_place_kernel_tensors")
    if missing := [name for name in names if not hasattr(layerwise, name)]:
        return f"this vLLM has no {listed(missing)} in model_loader.reload.layerwise (written for 0.32.0)"
    return ""


def weights(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and persistent buffers under every name they have, as plain tensors."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name.rpartition(".")[2] not in _CACHE_SCALES:
            yield name, parameter.data
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is None or name in module._non_persistent_buffers_set or name in _RUNTIME_BUFFERS:
                continue
            yield f"{prefix}.{name}" if prefix else name, buffer


def _compare(model: torch.nn.Module, loaded: dict[str, int], private: set[int]) -> dict[str, str]:
    """Reasons by name, after post-processing."""
    online = _online_quantised(model)
    made = derived(model)
    now = {name: tensor for name, tensor in weights(model) if name not in made}
    reasons = changed(loaded, now)
    for name in now:
        if any(name.startswith(f"{prefix}.") for prefix in online):
            reasons.setdefault(name, "it is quantised by vLLM while loading: its bytes are not the checkpoint's")
    memory = {tensor.untyped_storage().data_ptr() for tensor in now.values()}
    for owner, tensor in _private_tensors(model):
        if owner in made:
            continue
        # A floating-point tensor that appeared during post-processing and shares no weight's memory was computed from
        # weights (MLA's absorbed projections of a quantised model, a split router weight): a raw write leaves it stale.
        if id(tensor) in private or not tensor.is_floating_point() or tensor.numel() < 2:
            continue
        if tensor.untyped_storage().data_ptr() not in memory:
            module, _, attribute = owner.rpartition(".")
            for name in now:
                if name.startswith(f"{module}."):
                    reasons.setdefault(name, f"{module} also holds {attribute}, derived from its weights while loading")
            reasons.setdefault(owner, "it is derived from weights while loading and in no parameter list")
    return reasons


def _private_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors a module holds outside its parameters and persistent buffers."""
    import torch

    for prefix, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                yield f"{prefix}.{name}", value
        for name in module._non_persistent_buffers_set:
            buffer = module._buffers.get(name)
            if buffer is not None:
                yield f"{prefix}.{name}", buffer


def _online_quantised(model: torch.nn.Module) -> list[str]:
    # These methods quantise inside the weight loaders, before post-processing, so fingerprints cannot see it.
    return [
        name
        for name, module in model.named_modules()
        if name and getattr(getattr(module, "quant_method", None), "uses_meta_device", False)
    ]
