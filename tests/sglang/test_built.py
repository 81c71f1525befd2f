"""A layer has again what a checkpoint fills, on small layers: what cannot be put back, or comes out otherwise, is an error."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch

from weight_sync.errors import BindError, VerifyError
from weight_sync_integrations.loader import Published
from weight_sync_integrations.sglang import live
from weight_sync_integrations.sglang.built import SMALL, Built, Opened, place, unshared, walk
from weight_sync_integrations.sglang.loader import SglangLoader, rehearse

SHARED: dict[str, Any] = {}


class Method:
    """A quant_method as SGLang's: binds the weight to a new tensor without a loader, and a second run is skipped by a mark."""

    def __init__(self, extra: Callable[[Any, torch.nn.Module], None] = lambda method, layer: None) -> None:
        self.extra = extra
        self.packed = False

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        if not self.packed:
            layer.weight = torch.nn.Parameter(layer.weight.detach().flip(0) * layer.scale.max(), requires_grad=False)
            layer.workspace = torch.zeros(3)
            self.packed = True
        self.extra(self, layer)


Method.__module__ = "sglang.test"  # what is SGLang's is looked into


class Weight(torch.nn.Parameter):
    """SGLang's parameters are classes of their own."""


class Layer(torch.nn.Module):
    def __init__(self, extra: Callable[[Any, torch.nn.Module], None] = lambda method, layer: None) -> None:
        super().__init__()
        self.weight = Weight(torch.empty(4, 6), requires_grad=False)
        self.weight.weight_loader = self.load
        self.scale = Weight(torch.full((2,), -1.0), requires_grad=False)
        self.table = torch.arange(3.0)
        self.marks = {"kind": "rows"}
        self.quant_method = Method(extra)

    def load(self, values: torch.Tensor) -> None:
        self.weight.copy_(values)
        self.scale[0] = values.max()


VALUES = torch.arange(24.0).reshape(4, 6)


def served(extra: Callable[[Any, torch.nn.Module], None] = lambda method, layer: None) -> Built:
    layer = Layer(extra)
    built = Built("a", layer)
    layer.load(VALUES)
    built.note_loaded()
    layer.quant_method.process_weights_after_loading(layer)
    assert built.remade()
    assert not built.problem
    return built


def opened(built: Built, *others: Built) -> Opened:
    return Opened(built, unshared([built, *others])[id(built)])


def test_a_layer_has_again_what_a_checkpoint_fills_and_its_live_tensors_get_what_comes_out() -> None:
    built = served()
    layer = built.module
    live, where = layer.weight, {f.name: place(f.tensor) for f in walk(layer)}
    assert built.made == {"weight", "workspace"}
    assert not hasattr(live, "weight_loader")
    for factor in (2, 3):
        again = opened(built)
        assert type(layer.weight) is Weight
        assert layer.weight.tolist() != live.tolist()
        # What the checkpoint does not fill is as it was constructed, and so are the marks of the first time.
        assert layer.scale.tolist() == [-1.0, -1.0]
        assert not layer.quant_method.packed
        layer.weight.weight_loader(VALUES * factor)

        fresh = again.postprocess(write=True)

        assert {found.name for found in fresh} == {"weight", "scale", "workspace"}
        assert layer.weight is live
        assert live.tolist() == (VALUES.flip(0) * factor * 23 * factor).tolist()
        assert layer.quant_method.packed
        assert {f.name: place(f.tensor) for f in walk(layer)} == where


def test_a_rehearsal_and_a_load_that_is_given_up_write_nothing() -> None:
    built = served()
    layer, before = built.module, {f.name: f.tensor.clone() for f in walk(built.module)}
    rehearsal = opened(built)
    rehearsal.fill(1)
    rehearsal.postprocess(write=False)
    given_up = opened(built)
    layer.weight.weight_loader(VALUES * 5)
    given_up.close()

    assert {f.name: f.tensor.tolist() for f in walk(layer)} == {name: tensor.tolist() for name, tensor in before.items()}


def grow(method: Any, layer: torch.nn.Module) -> None:
    if float(layer.scale.max()) > 1e6:
        layer.weight = torch.nn.Parameter(torch.cat([layer.weight.detach()] * 2), requires_grad=False)


def flag(method: Any, layer: torch.nn.Module) -> None:
    method.largest = float(layer.scale.max())


def drop(method: Any, layer: torch.nn.Module) -> None:
    if float(layer.scale.max()) > 1e6:
        del layer.workspace


def exact(method: Any, layer: torch.nn.Module) -> None:
    if float(layer.scale.max()) < 1e6:
        method.exact = True


def kernel(method: Any, layer: torch.nn.Module) -> None:
    layer.kernel = point if float(layer.scale.max()) < 1e6 else drop


@pytest.mark.parametrize(
    ("extra", "complaint"),
    [
        (exact, r"a\.quant_method\.exact was True and is '\(not there\)' with these weights"),
        (kernel, r"a\.kernel was '.*point' and is '.*drop' with these weights"),
        (grow, r"a\.weight: the engine reads float32 \[4, 6\].* made is float32 \[8, 6\]"),
        (flag, r"a\.quant_method\.largest was 23\.0 and is 23000000\.0 with these weights"),
        (drop, r"a\.workspace is not made"),
    ],
)
def test_what_comes_out_otherwise_with_other_weights_is_an_error_and_nothing_of_the_layer_is_written(
    extra: Any, complaint: str
) -> None:
    built = served(extra)
    before = {f.name: f.tensor.tolist() for f in walk(built.module)}
    again = opened(built)
    built.module.weight.weight_loader(VALUES * 1e6)

    with pytest.raises(VerifyError, match=complaint):
        again.postprocess(write=True)

    assert {f.name: f.tensor.tolist() for f in walk(built.module)} == before


class Flags:
    """A quant_method that changes no tensor, but says of one what kind of numbers it holds (SGLang's power_of_two)."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        layer.scale.power_of_two = bool((torch.frexp(layer.scale)[0] == 0.5).all())


Flags.__module__ = "sglang.test"


def test_a_layer_of_which_only_a_flag_tells_of_the_values_is_remembered_too() -> None:
    layer = Layer()
    layer.quant_method = Flags()
    layer.scale.fill_(0.5)
    built = Built("a", layer)
    built.note_loaded()
    layer.quant_method.process_weights_after_loading(layer)

    assert not built.remade()
    assert built.marked == {"_parameters.scale.power_of_two": True}
    again = opened(built)
    layer.scale.fill_(0.3)
    with pytest.raises(VerifyError, match=r"a\._parameters\.scale\.power_of_two was True and is False with these weights"):
        again.postprocess(write=True)
    assert (layer.scale.tolist(), layer.scale.power_of_two) == ([0.5, 0.5], True)
    again = opened(built)
    layer.scale.fill_(0.25)
    again.postprocess(write=True)
    assert layer.scale.tolist() == [0.25, 0.25]


def test_a_layer_is_closed_where_marks_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    built = served()
    live, again = built.module.weight, opened(built)

    def fail(module: torch.nn.Module) -> None:
        raise RuntimeError("no marks")

    monkeypatch.setattr("weight_sync_integrations.sglang.built.marks", fail)
    with pytest.raises(RuntimeError, match="no marks"):
        again.postprocess(write=True)
    assert built.module.weight is live


class Model(torch.nn.Module):
    """One layer, whose `order` says how its rows are put, and is not there any more afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.a = Layer(self.reorder)
        for leaf in ("order", "unused"):
            self.a.register_parameter(leaf, torch.nn.Parameter(torch.zeros(SMALL, dtype=torch.int32), requires_grad=False))

    @staticmethod
    def reorder(method: Any, layer: torch.nn.Module) -> None:
        layer.weight = torch.nn.Parameter(layer.weight[layer.order[:4].long()], requires_grad=False)
        del layer.order, layer.unused

    def load_weights(self, weights: Any) -> None:
        held = dict(self.named_parameters())
        for name, tensor in weights:
            held[name].copy_(tensor)


def test_a_parameter_that_only_post_processing_reads_has_to_be_filled_too() -> None:
    def load(model: Any, weights: Any, device: Any) -> None:
        model.load_weights(weights)
        model.a.quant_method.process_weights_after_loading(model.a)

    model, order = Model(), torch.arange(SMALL, dtype=torch.int32).flip(0) % 4
    weights = {"a.weight": VALUES, "a.scale": torch.ones(2), "a.order": order}
    with torch.no_grad():
        live._observed(load, model, weights.items(), None)
    assert live.no_loader(model) == ""
    specs = {name: (tensor.shape, tensor.dtype) for name, tensor in weights.items()}

    assert rehearse(model, specs, Published(None)).uncovered == {}
    specs.pop("a.order")
    assert rehearse(model, specs, Published(None)).uncovered == {"a.order": SMALL}
    assert not hasattr(model.a, "order")


def test_what_is_derived_from_all_layers_at_each_wave_is_refused() -> None:
    class Deriving(Model):
        def post_load_weights(self) -> None:
            self.total = float(self.a.weight.sum())

    def load(model: Any, weights: Any, device: Any) -> None:
        model.load_weights(weights)
        model.post_load_weights()
        model.a.quant_method.process_weights_after_loading(model.a)

    model = Deriving()
    with torch.no_grad():
        live._observed(load, model, [("a.weight", VALUES)], None)
    with pytest.raises(BindError, match="rollout rank 0: post_load_weights of Deriving cannot be told of which HF tensors"):
        SglangLoader(model, "rollout rank 0")


def point(method: Any, layer: torch.nn.Module) -> None:
    layer.pointers = torch.tensor([layer.weight.data_ptr()])


def pointed(method: Any, layer: torch.nn.Module) -> None:
    method.at = layer.weight.data_ptr()


def foreign(method: Any, layer: torch.nn.Module) -> None:
    layer.plan = Fraction(1, 3)


@pytest.mark.parametrize(
    ("extra", "complaint"),
    [
        (point, r"a\.pointers holds addresses of tensors"),
        (pointed, r"a\.quant_method\.at is the address of a tensor"),
        (foreign, r"a\.plan: a Fraction of fractions is made, nobody can look into it"),
    ],
)
def test_what_refers_to_the_tensors_that_are_thrown_away_or_may_is_refused(extra: Any, complaint: str) -> None:
    built = served(extra)
    before = {f.name: f.tensor.tolist() for f in walk(built.module)}
    rehearsal = opened(built)
    rehearsal.fill(1)

    with pytest.raises(BindError, match=complaint):
        rehearsal.postprocess(write=False)

    assert {f.name: f.tensor.tolist() for f in walk(built.module)} == before


def share(method: Any, layer: torch.nn.Module) -> None:
    layer.marks["of"] = len(layer.marks)


def test_post_processing_that_changes_what_layers_share_is_refused_and_put_back() -> None:
    one, other = served(share), served(share)
    other.module.marks = one.module.marks
    again = opened(one, other)
    one.module.marks["of"] = 7

    with pytest.raises(BindError, match="a: it changes dict, which other layers hold too"):
        again.postprocess(write=False)


def observed(layer: Layer, after: Callable[[Layer], None]) -> str:
    built = Built("a", layer)
    layer.load(VALUES)
    built.note_loaded()
    layer.quant_method.process_weights_after_loading(layer)
    after(layer)
    built.remade()
    return built.problem


def test_what_cannot_be_given_back_is_said_when_the_server_has_started() -> None:
    assert observed(Layer(), lambda layer: None) == ""
    assert observed(Layer(), lambda layer: layer.table.mul_(2)) == "a.table was changed where it is by post-processing"
    large = Layer()
    large.cache = torch.zeros(SMALL)
    assert "a (Layer) held a tensor of 16384 bytes before post-processing that is gone now" in observed(
        large, lambda layer: delattr(layer, "cache")
    )
    moved = Layer()
    moved.load = lambda values: setattr(moved, "weight", torch.nn.Parameter(values))  # type: ignore[method-assign]
    assert observed(moved, lambda layer: None) == "a.weight is made while the checkpoint is loaded, not before"
