"""vLLM's own loader, used again and again: the layerwise reload of vllm.model_executor.model_loader.reload (0.32.0), in waves.

    initialize_layerwise_reload   once for each sync: parameters become what the checkpoint fills, on `meta`
    model.load_weights            once for each wave: a layer that is complete is made, filled, post-processed, and copied
                                  into the tensors that its kernels read
    finalize_layerwise_reload     once: attention, and layers that hold more than a checkpoint fills (padding)

What this file adds, because vLLM's reload does not do it:

- Loaders of an incomplete layer keep *references* to what they were given. Staging memory is filled again by the next wave, so
  what is still referenced after a wave is cloned first.
- Unquantised experts keep the kernel that was made when the server started, and skip what that kernel does to weights (on a
  CPU it packs them): a reload would leave checkpoint weights where packed ones are read. So the kernel is dropped first.
- A head that is tied to the embedding is given no weight of its own, so vLLM leaves it as it was, with what it had packed of
  the embedding's old values. It is post-processed again.
- In a plan the scale of a tensor has two dims, and vLLM's loaders want the shape that a checkpoint has: they get that.
- A load that fails leaves the model on `meta`. abandon() puts the tensors back that its kernels read.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from weight_sync.errors import RolloutError, VerifyError, listed
from weight_sync_integrations.inventory import Found, Inventory, Policy
from weight_sync_integrations.loader import Fed, Held, Published, Reads, Rehearsal, SecondLoad, allocate, given
from weight_sync_integrations.recorder import Recording, record
from weight_sync_integrations.vllm import live, tensors

_RECOMPUTES = "made anew by vLLM's post-processing whenever its loader runs"


class VllmLoader(SecondLoad):
    """weight_sync.session.placing.Loader for one worker. config: vLLM's whole config."""

    def __init__(self, model: torch.nn.Module, config: Any, where: str) -> None:
        self._model, self._config, self._where = model, config, where
        self._published = published(config)
        self._reads: Reads | None = None
        self._fed = Fed()
        self._rehearsed: Rehearsal | None = None
        self._open = False
        self._inventory: Inventory | None = None
        self._handles: dict[str, weakref.ref[torch.Tensor]] = {}
        self._held: Held | None = None

    def allocate(self, nbytes: int, places: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Staging beside the weights, and a rehearsal: BindError where the loader would not use exactly these tensors."""
        device = next(p.device for p in self._model.parameters())
        staged = allocate(nbytes, places, device)
        recording = rehearse(self._model, {n: (t.shape, t.dtype) for n, t in staged.items()}, self._published)
        self._rehearsed = Rehearsal.of(recording, places, self._where)
        return staged

    def account(self, declare: Mapping[str, str], captured: bool) -> Inventory:
        """Every tensor of the model in its class: parameters are loaded, what post-processing made the first time is derived.

        Raises BindError for tensors that nobody knows. What is no number (a pointer in a tensor) is not filled with a marker;
        that it was made anew is seen otherwise (settle).
        """
        made = live.made_by_loading(self._model)
        numbers = {f.name for f in self._find() if f.name in made and f.tensor.is_floating_point()}
        classes = {name: "derived" if name in numbers else "state" for name in sorted(made)}
        policy = Policy(tensors.RULES, declare={**declare, **classes}, recomputes=_RECOMPUTES, captured=captured)
        self._inventory = Inventory(self._find, live.inspect(self._model).tensors.values(), policy, self._where)
        self._inventory.require_all()
        self._inventory.seal()
        return self._inventory

    def feed(self, staged: Mapping[str, torch.Tensor], first: bool, last: bool) -> None:
        """One wave. Raises RolloutError when vLLM's loader fails, VerifyError when it has not used what it was given."""
        try:
            self._feed(staged, first, last)
        except (RolloutError, VerifyError):
            raise
        except Exception as error:
            raise RolloutError(
                f"{self._where}: vLLM's own loader failed: {type(error).__name__}: {error}; its weights are a mixture now"
            ) from error

    def _feed(self, staged: Mapping[str, torch.Tensor], first: bool, last: bool) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        assert self._rehearsed is not None
        assert self._inventory is not None
        if first:
            self.abandon()
            self._fed, self._open = Fed(), True
            self._inventory.spoil()
            self._handles = {f.name: weakref.ref(f.tensor) for f in self._made() if not f.tensor.is_floating_point()}
            initialize_layerwise_reload(self._model)
            _drop_kernels(self._model)
            self._reads = Reads(staged, self._fed.read)
        reads = self._reads
        assert reads is not None
        reads.restage(staged)
        taken: list[str] = []
        with torch.no_grad(), reads:
            said = self._model.load_weights(given(self._published.views(staged), taken))
            if last:
                finalize_layerwise_reload(self._model, self._config.model_config)
        if missed := sorted(set(staged) - set(taken)):
            raise VerifyError(f"{self._where}: vLLM's loader stopped before it had asked for {listed(missed)}")
        if said is not None:
            self._fed.said = (self._fed.said or set()) | set(said)
        if last:
            self._open, self._reads = False, None
            _tie(self._model)
            self._fed.require(self._rehearsed, self._rehearsed.elements, self._where)
        else:
            _hold(self._model, reads)

    def abandon(self) -> None:
        """Give up a load that was begun. Every layer reads the tensors again that it read before, whatever is in them."""
        if not self._open:
            return
        from vllm.model_executor.model_loader.reload.layerwise import _place_kernel_tensors, get_layerwise_info

        for layer in self._model.modules():
            info = get_layerwise_info(layer)
            if info.kernel_tensors is not None:
                _place_kernel_tensors(layer, info)
            info.reset()
        self._reads, self._open = None, False

    def settle(self) -> dict[str, int]:
        """Raises VerifyError unless what post-processing makes was made anew, and constants are untouched."""
        assert self._inventory is not None
        proven = self._inventory.check()
        same = [f.name for f in self._made() if f.name in self._handles and self._handles[f.name]() is f.tensor]
        if gone := sorted(self._handles.keys() - {f.name for f in self._made()}):
            raise VerifyError(f"{self._where}: {listed(gone)} is gone after loading")
        if same:
            raise VerifyError(f"{self._where}: {listed(same)} was not made anew from the new weights")
        return proven | ({"handles": len(self._handles)} if self._handles else {})

    def _compared(self) -> dict[str, torch.Tensor]:
        """And what layers answer whose weights are behind a handle."""
        found = super()._compared()
        for f in self._made():
            if not f.tensor.is_floating_point() and hasattr(f.module, "cpu_linear"):
                found[f"what {f.name} answers"] = _answer_of(f.module)
        return found

    def _find(self) -> list[Found]:
        return tensors.find_all([("target", self._model)])

    def _weights(self) -> Mapping[str, torch.Tensor]:
        return live.inspect(self._model).tensors

    def _made(self) -> Iterator[Found]:
        made = live.made_by_loading(self._model)
        return (found for found in self._find() if found.name in made)


def _answer_of(layer: Any) -> torch.Tensor:
    """What a linear layer makes of a fixed input: its weights are packed where no tensor shows them."""
    names = ("input_size_per_partition", "input_size", "embedding_dim")
    width = next(int(getattr(layer, name)) for name in names if hasattr(layer, name))
    generator = torch.Generator().manual_seed(width)
    rows = torch.randn(8, width, generator=generator).to(next(layer.parameters()).dtype)
    with torch.no_grad():
        return layer.cpu_linear(rows, layer.weight, None)


def published(config: Any) -> Published:
    """Shapes of the HF tensors that vLLM's loaders expect. config: vLLM's whole config."""
    served = json.loads(config.model_config.hf_text_config.to_json_string(use_diff=False))
    return Published(served.get("quantization_config"))


def rehearse(model: torch.nn.Module, specs: Mapping[str, tuple[Sequence[int], torch.dtype]], published: Published) -> Recording:
    """What load_weights does with these HF tensors, on parameters as they were before post-processing. Nothing changes."""
    shapes = {name: (published.shape(name, shape), dtype) for name, (shape, dtype) in specs.items()}
    with as_built(model):
        seen = record(model, shapes, model.load_weights)
        recording = published.planned(seen, {name: shape for name, (shape, _) in specs.items()})
        parameters = dict(model.named_parameters())
        filled = {name for name, _ in live.weights(model) if name in parameters}
    recording.uncovered = {name: n for name, n in recording.uncovered.items() if name in filled}
    return recording


@contextmanager
def as_built(model: torch.nn.Module) -> Iterator[None]:
    """Inside, modules have the parameters that a checkpoint fills, as `meta` tensors: what vLLM keeps for its own reload."""
    from vllm.model_executor.model_loader.reload.layerwise import _get_original_loader, get_layerwise_info
    from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs

    saved: list[tuple[torch.nn.Module, dict[str, Any]]] = []
    tied: dict[int, torch.Tensor] = {}
    try:
        for layer in model.modules():
            before = get_layerwise_info(layer).restore_metadata[0]
            now = dict(layer._parameters)
            saved.append((layer, now))
            built: dict[str, Any] = {n: p for n, p in now.items() if p is None or n not in before}
            for name, meta in before.items():
                one = tied.get(id(now.get(name)))
                if one is None:
                    one = meta.data.detach()
                    one.__class__, one.__dict__ = meta.__class__, dict(meta.__dict__)
                    one = restore_layer_refs(one, layer)
                    if hasattr(one, "weight_loader"):
                        one.weight_loader = _get_original_loader(one)
                    if now.get(name) is not None:
                        tied[id(now[name])] = one
                built[name] = one
            layer._parameters.clear()
            layer._parameters.update(built)
        yield
    finally:
        for layer, parameters in saved:
            layer._parameters.clear()
            layer._parameters.update(parameters)


def _drop_kernels(model: torch.nn.Module) -> None:
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if type(method).__name__ == "UnquantizedFusedMoEMethod":
            method.moe_kernel = None


def _hold(model: torch.nn.Module, reads: Reads) -> None:
    """Clone staged tensors that loaders of incomplete layers refer to: the next wave overwrites them."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    alive: list[torch.Tensor] = []
    for layer in model.modules():
        for _, bound in get_layerwise_info(layer).loaded_weights:
            for key, value in list(bound.arguments.items()):
                if isinstance(value, torch.Tensor):
                    copy = reads.keep(value)
                    if copy is not None:
                        bound.arguments[key] = value = copy
                    alive.append(value)
    reads.forget(alive)


def _tie(model: torch.nn.Module) -> None:
    """Post-process layers again that hold another layer's weight under their own name (tied embeddings)."""
    owners: dict[int, torch.nn.Module] = {}
    for layer in model.modules():
        weight = layer._parameters.get("weight")
        if weight is None or not weight.numel():
            continue
        owner = owners.setdefault(weight.data_ptr(), layer)
        method = getattr(layer, "quant_method", None)
        if owner is not layer and method is not None:
            with torch.no_grad():
                method.process_weights_after_loading(layer)
