"""Which live tensors of an SGLang model may be overwritten in place: those that its post-processing left as they were loaded.

SGLang runs process_weights_after_loading of every layer when load_weights has returned (DefaultModelLoader), and again at each
/end_weight_update. What it leaves as it was loaded the first time, it leaves the second time too; what it transposes (fp8 with
a scale for each row or one for the tensor), packs (Marlin, AMX) or requantises (UE8M0 scales for DeepGEMM on Blackwell), no
plan may write: see docs/quant.md. Such a model can take its weights through its own load_weights (loader.py), for which its
layers are remembered as they were built.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from weight_sync.errors import listed
from weight_sync_integrations.loading import changed, seen

if TYPE_CHECKING:
    import torch

    from weight_sync_integrations.sglang.built import Built

_BUILT: WeakKeyDictionary[torch.nn.Module, tuple[torch.dtype, list[Built]]] = WeakKeyDictionary()
_REASONS: WeakKeyDictionary[torch.nn.Module, dict[str, str]] = WeakKeyDictionary()
_UNSEEN = "its loading was not observed: the server loads with another loader than SGLang's default (load_format=auto)"


@contextmanager
def watched() -> Iterator[None]:
    """Inside, look at every model that SGLang's default loader loads. Seen in 0.5.16 to 0.5.23: a static function does that."""
    from sglang.srt.model_loader.loader import DefaultModelLoader

    original = DefaultModelLoader.load_weights_and_postprocess

    def load(model: Any, weights: Any, target_device: Any) -> Any:
        return _observed(original, model, weights, target_device)

    DefaultModelLoader.load_weights_and_postprocess = staticmethod(load)
    try:
        yield
    finally:
        DefaultModelLoader.load_weights_and_postprocess = staticmethod(original)


def _observed(original: Callable[..., Any], model: Any, weights: Any, target_device: Any) -> Any:
    import torch

    from weight_sync_integrations.sglang.built import Built

    loaded: dict[str, int] = {}
    built = [Built(path, m) for path, m in model.named_modules() if path and getattr(m, "quant_method", None) is not None]
    load_weights, own = model.load_weights, vars(model).get("load_weights")

    def load_and_look(*args: Any, **kwargs: Any) -> Any:
        answer = load_weights(*args, **kwargs)
        loaded.update(seen(_parameters(model)))
        for one in built:
            one.note_loaded()
        return answer

    model.load_weights = load_and_look
    try:
        answer = original(model, weights, target_device)
    finally:
        if own is None:
            del model.load_weights  # the class has its own
        else:
            model.load_weights = own
    _REASONS[model] = reasons = changed(loaded, dict(_parameters(model)))
    for one in built:
        one.remade()
        one.changed = one.changed or any(f"{one.path}.{leaf}" in reasons for leaf in one.parameters)
    _BUILT[model] = torch.get_default_dtype(), [one for one in built if one.changed or one.marked]
    return answer


def remembered(model: torch.nn.Module) -> tuple[torch.dtype, list[Built]]:
    """The default dtype while the model was loaded, and the layers that post-processing has changed or marked, as they were."""
    return _BUILT[model]


def no_loader(model: torch.nn.Module) -> str:
    """Why SGLang's own loader cannot take the weights once more; "" where it can, as far as is known before a plan is bound."""
    if model not in _BUILT:
        return _UNSEEN
    if problems := [one.problem for one in _BUILT[model][1] if one.problem]:
        return listed(problems)
    stray = sorted(_REASONS[model].keys() - {f"{one.path}.{leaf}" for one in _BUILT[model][1] for leaf in _leaves(one)})
    return f"{listed(stray)}: no layer's post-processing is known to have changed it" if stray else ""


def _leaves(built: Built) -> set[str]:
    return {*built.parameters, *built.made, *built.module._parameters}


def not_writable(model: torch.nn.Module) -> dict[str, str]:
    """Name -> why writing it in place would not change, or would corrupt, what the engine computes.

    A model whose loading was not observed is taken as loaded where nothing in it is quantised: then only AMX packs weights.
    """
    found = _REASONS.get(model)
    if found is None:
        quantised = getattr(model, "quant_config", None) is not None or any(_packed(m) for m in model.modules())
        found = {name: _UNSEEN for name, _ in _parameters(model)} if quantised else {}
    return found | _cached(model)


def _packed(module: torch.nn.Module) -> bool:
    return bool(getattr(module, "use_intel_amx_backend", False))


def _cached(model: torch.nn.Module) -> dict[str, str]:
    """Layers of which SGLang itself says that captured graphs hold something derived from their weights (0.5.23)."""
    return {
        f"{path}.weight": str(reason)
        for path, module in model.named_modules()
        if (reason := getattr(module, "_derived_weight_cache_error", None))
    }


def _parameters(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    from weight_sync_integrations.sglang.tensors import is_cache_scale

    for path, module in model.named_modules():
        for leaf, tensor in module._parameters.items():
            if tensor is not None and not is_cache_scale(module, leaf):
                yield (f"{path}.{leaf}" if path else leaf), tensor.detach()
