"""SGLang's own loader, used again and again on a model that post-processing has changed (0.5.16 to 0.5.23), in waves.

SGLang's update of weights undoes what it has packed where a layer knows how (/begin_weight_update), and post-processes every
layer (/end_weight_update): a weight that was transposed is transposed once more. So neither is called. For each wave:

    open         the layers that post-processing changes or marks and that a tensor of this wave belongs to have the parameters
                 that a checkpoint fills (built.py)
    load         model.load_weights of the wave: into them, and right into the live parameters of all other layers; MLA absorbs
                 kv_b_proj of the wave's layers there, as when the server started
    postprocess  each layer of which all tensors have come runs its own quant_method.process_weights_after_loading; what comes
                 out is copied into the tensors that the engine reads, whose addresses stay, and the layer has those again

All of it is tried when a plan is bound: the load on `meta` tensors, and post-processing of each layer on numbers that are
thrown away. Memory beside staging: the opened layers, which is as much as a wave holds, and the experts of one layer (those of
this rank) until they are complete.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from inspect import signature
from typing import Any

import torch

from weight_sync.errors import BindError, RolloutError, VerifyError, listed
from weight_sync_integrations.inventory import Found, Inventory, Policy
from weight_sync_integrations.loader import Fed, Held, Published, Reads, Rehearsal, SecondLoad, allocate, given
from weight_sync_integrations.recorder import Recording, record, run_inline
from weight_sync_integrations.sglang import live
from weight_sync_integrations.sglang import tensors as known
from weight_sync_integrations.sglang.built import Built, Opened, place, unshared

_RECOMPUTES = "made anew by SGLang's load_weights and post-processing whenever its loader runs"


class SglangLoader(SecondLoad):
    """weight_sync.session.placing.Loader for one worker.

    quantization: quantization_config of what the engine serves. captured: CUDA graphs read tensors by their addresses.
    """

    def __init__(
        self, model: torch.nn.Module, where: str, quantization: Mapping[str, Any] | None = None, captured: bool = False
    ) -> None:
        if reason := live.no_loader(model):
            raise BindError(f"{where}: SGLang's own loader cannot take the weights: {reason}")
        self._model, self._where, self._captured = model, where, captured
        self._published = Published(quantization)
        self._dtype, self._built = live.remembered(model)
        derive = getattr(model, _POST, None)
        if self._built and derive is not None and "weight_names" not in signature(derive).parameters:
            raise BindError(
                f"{where}: {_POST} of {type(model).__name__} cannot be told of which HF tensors, and would derive from "
                "layers that are post-processed"
            )
        self._own = unshared(self._built)
        self._opened: dict[str, Opened] = {}
        self._needs: dict[str, set[str]] = {}
        self._came: set[str] = set()
        self._reads: Reads | None = None
        self._fed = Fed()
        self._rehearsed: Rehearsal | None = None
        self._made: dict[str, Found] = {}
        self._inventory: Inventory | None = None
        self._places: dict[str, Any] = {}
        self._held: Held | None = None

    def allocate(self, nbytes: int, places: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Staging beside the weights, and a rehearsal: BindError where the loader would not use exactly these tensors, or
        post-processing would not make what the engine reads."""
        staged = allocate(nbytes, places, next(self._model.parameters()).device)
        recording = rehearse(self._model, {n: (t.shape, t.dtype) for n, t in staged.items()}, self._published)
        self._rehearsed = Rehearsal.of(recording, places, self._where)
        paths = {built.path for built in self._built}
        self._needs = {path: set() for path in paths}
        for name, params in self._rehearsed.params.items():
            for path in {param.rpartition(".")[0] for param in params} & paths:
                self._needs[path].add(name)
        # A flag of a layer into which nothing is loaded (a scale of the KV cache, say) tells nothing of what is loaded.
        self._built = [built for built in self._built if built.changed or self._needs[built.path]]
        self._made = {}
        for built in self._built:
            self._rehearse(built)
        return staged

    def account(self, declare: Mapping[str, str]) -> Inventory:
        """Every tensor of the model in its class: parameters are loaded, what post-processing makes besides is derived.

        Raises BindError for tensors that nobody knows.
        """
        classes = {
            name: "derived" if found.tensor.is_floating_point() or found.tensor.dtype in _MARKABLE else "state"
            for name, found in self._made.items()
            if found.kind not in ("parameter", "buffer")
        }
        policy = Policy(known.RULES, declare={**declare, **classes}, recomputes=_RECOMPUTES, captured=self._captured)
        weights = known.live_tensors([("target", self._model)])
        inventory = Inventory(self._find, weights.values(), policy, self._where)
        inventory.require_all()
        inventory.seal()
        self._inventory = inventory
        self._places = {name: place(tensor) for name, tensor in weights.items()}
        return inventory

    def feed(self, staged: Mapping[str, torch.Tensor], first: bool, last: bool) -> None:
        """One wave. Raises RolloutError when SGLang's loader fails, VerifyError when it has not used what it was given."""
        try:
            self._feed(staged, first, last)
        except (RolloutError, VerifyError):
            self.abandon()
            raise
        except Exception as error:
            self.abandon()
            raise RolloutError(
                f"{self._where}: SGLang's own loader failed: {type(error).__name__}: {error}; its weights are a mixture now"
            ) from error

    def _feed(self, staged: Mapping[str, torch.Tensor], first: bool, last: bool) -> None:
        assert self._rehearsed is not None
        assert self._inventory is not None
        if first:
            self.abandon()
            self._where_they_were()
            self._fed, self._came = Fed(), set()
            self._inventory.spoil()
            self._reads = Reads(staged, self._fed.read)
        reads = self._reads
        if reads is None:
            raise RolloutError(f"{self._where}: a load that has failed cannot go on")
        reads.restage(staged)
        for built in self._built:
            if built.path not in self._opened and self._needs[built.path] & staged.keys():
                self._opened[built.path] = Opened(built, self._own[id(built)])
        taken: list[str] = []
        with _as_loading(self._model, self._dtype), _absorbing(self._model, staged), reads, run_inline():
            self._model.load_weights(given(self._published.views(staged), taken))
        if missed := sorted(set(staged) - set(taken)):
            raise VerifyError(f"{self._where}: SGLang's loader stopped before it had asked for {listed(missed)}")
        self._came |= staged.keys()
        self._fed.require(self._rehearsed, staged, self._where)  # before anything is made of what it filled
        with _as_loading(self._model, self._dtype):
            for path in [path for path in self._opened if self._needs[path] <= self._came]:
                self._opened.pop(path).postprocess(write=True)
        if last:
            self._reads = None
            if self._opened:
                raise VerifyError(f"{self._where}: {listed(sorted(self._opened))} did not get all of their tensors")

    def abandon(self) -> None:
        """Give up a load that was begun. Every layer reads the tensors again that it read before, whatever is in them."""
        for opened in self._opened.values():
            opened.close()
        self._opened.clear()
        self._reads = None

    def settle(self) -> dict[str, int]:
        """Raises VerifyError unless what post-processing makes was made anew, and nothing else has changed or moved."""
        assert self._inventory is not None
        self._where_they_were()
        return self._inventory.check()

    def _find(self) -> list[Found]:
        return known.find_all([("target", self._model)])

    def _weights(self) -> Mapping[str, torch.Tensor]:
        return known.live_tensors([("target", self._model)])

    def _where_they_were(self) -> None:
        now = {name: place(tensor) for name, tensor in known.live_tensors([("target", self._model)]).items()}
        if wrong := sorted(name for name in now.keys() | self._places.keys() if now.get(name) != self._places.get(name)):
            raise VerifyError(
                f"{self._where}: weights are not the tensors that they were at bind: {listed(wrong)}; SGLang "
                "post-processed them once more (its own update of weights?)"
            )

    def _rehearse(self, built: Built) -> None:
        """Post-process one layer on ones, and throw away what comes of it."""
        if not self._needs[built.path]:
            raise BindError(
                f"{self._where}: {built.path} ({type(built.module).__name__}) is changed by post-processing, and no tensor of "
                "the plan is loaded into it"
            )
        opened = Opened(built, self._own[id(built)])
        try:
            opened.fill(1)
            with _as_loading(self._model, self._dtype):
                fresh = opened.postprocess(write=False)
        except BindError as error:
            raise BindError(f"{self._where}: {error}") from None
        except Exception as error:
            raise BindError(
                f"{self._where}: SGLang's post-processing of {built.path} cannot run again: {type(error).__name__}: {error}"
            ) from error
        self._made |= {f"{built.path}.{found.name}": found for found in fresh}


def rehearse(model: torch.nn.Module, specs: Mapping[str, tuple[Sequence[int], torch.dtype]], published: Published) -> Recording:
    """What load_weights does with these HF tensors, on parameters as they were before post-processing. Nothing changes.

    uncovered is of what a checkpoint has to fill: not of what the checkpoint from which the server started did not fill either,
    of small parameters and of those that post-processing leaves empty or removes.
    """
    dtype, remembered = live.remembered(model)
    own = unshared(remembered)
    with ExitStack() as stack:
        for built in remembered:
            stack.callback(Opened(built, own[id(built)], torch.device("meta")).close)
        stack.enter_context(_as_loading(model, dtype))
        shapes = {name: (published.shape(name, shape), kind) for name, (shape, kind) in specs.items()}
        recording = published.planned(record(model, shapes, known.loader(model)), {n: shape for n, (shape, _) in specs.items()})
    weights = known.live_tensors([("target", model)]).keys()
    templates = {f"{built.path}.{leaf}": template for built in remembered for leaf, template in built.parameters.items()}

    def to_fill(name: str, count: int) -> bool:
        template = templates.get(name)
        if template is None:
            return name in weights
        return (name in weights or template.filled) and (template.values is None or template.same < count)

    recording.uncovered = {name: count for name, count in recording.uncovered.items() if to_fill(name, count)}
    return recording


@contextmanager
def _absorbing(model: torch.nn.Module, names: Iterable[str]) -> Iterator[None]:
    """What load_weights derives at its end (MLA's w_kc and w_vc) is derived from these HF tensors only.

    Glm4MoeLite does so for every layer, whatever it was given. But in the layers of other waves, what it would derive from is
    post-processed, or of the version before.
    """
    own, derive = vars(model).get(_POST), getattr(model, _POST, None)
    if derive is None:
        yield
        return

    def of_these(*args: Any, **kwargs: Any) -> Any:
        call = signature(derive).bind(*args, **kwargs)
        if call.arguments.get("weight_names") is None:
            call.arguments["weight_names"] = list(names)
        return derive(*call.args, **call.kwargs)

    setattr(model, _POST, of_these)
    try:
        yield
    finally:
        vars(model).pop(_POST, None)
        if own is not None:
            setattr(model, _POST, own)


@contextmanager
def _as_loading(model: torch.nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """As when a server loads: `dtype` is the default one, and no model remembers its parameters by name."""
    before, cached = torch.get_default_dtype(), vars(model).pop(_CACHE, None)
    torch.set_default_dtype(dtype)
    try:
        with torch.no_grad():
            yield
    finally:
        torch.set_default_dtype(before)
        vars(model).pop(_CACHE, None)
        if cached is not None:
            vars(model)[_CACHE] = cached


_CACHE = "_cached_params_dict"
_POST = "post_load_weights"
_MARKABLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
