"""Rules + parallel dims -> Layout.

Every rule is worked out once for a rank's coordinates, for one layer and one expert (pieces.py); layers and experts are then
filled in as arithmetic on columns, and ranks that hold the same share the result. So the cost grows with the number of
parameters, not with Python objects for each shard.
"""

from __future__ import annotations

import gc
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod

import numpy as np
from numpy.typing import NDArray

from weight_sync.errors import FamilyError, ParallelError, listed
from weight_sync.layout.active import active_rules, rule_layers
from weight_sync.layout.catalog import Catalog, Pattern, fill
from weight_sync.layout.check import check_rule
from weight_sync.layout.emitted import Emitter
from weight_sync.layout.expr import evaluate
from weight_sync.layout.family import Convention, Model
from weight_sync.layout.parallel import Dims
from weight_sync.layout.pieces import Cutter, Local
from weight_sync.layout.placement import Own, Replicate, Split
from weight_sync.layout.rules import Drop, ParamRule, Stack, Unstack, sources
from weight_sync.layout.table import Ints, Layout, Param
from weight_sync.layout.values import cast_text

_Held = tuple[int | None, int, int]
"""(model chunk or None, stage-local layer index, global layer)."""


@dataclass(frozen=True, slots=True)
class _Block:
    """The parameters and shards that one rule gives on all ranks with the same share. param: counted within the block."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    filling: int
    cast_from: str
    part: str
    tensor: Ints
    param: Ints
    offset: Ints
    box: Ints
    start: Ints
    strides: Ints


def symbols_of(model: Model, convention: Convention, dims: Dims, side: str, symbols: Mapping[str, int]) -> dict[str, int]:
    """Every name that the rules of one side may use. A convention's defaults give way to the model's own sizes."""
    if clash := sorted(set(model.symbols) & set(dims.sizes)):
        raise FamilyError(
            f"family {model.family.name}: {listed(clash)} is a size of the model and a parallel axis of the {side}; "
            "rename the family's symbol"
        )
    names: dict[str, int] = {**model.symbols, **dims.sizes, **symbols}
    for symbol, text in convention.defaults.items():
        if symbol not in names:
            names[symbol] = evaluate(text, names, f"{convention.origin}, defaults.{symbol}")
    return names


def dropped_names(model: Model, convention: Convention, dims: Dims, side: str, **symbols: int) -> tuple[str, ...]:
    """The HF names that this side declares it does not hold: what prove_exact_once wants as `dropped`."""
    names = symbols_of(model, convention, dims, side, symbols)
    result: list[str] = []
    for label, rule in active_rules(model, convention, names).items():
        if isinstance(rule, Drop):
            layers = rule_layers(model, rule, f"{convention.origin}, rule {label}")
            template = sources(rule)[0].hf
            for pattern in model.catalog.patterns:
                made = pattern.made
                if pattern.template != template and (made is None or made.base != template):
                    continue
                here = layers if made is None or made.base == pattern.template else pattern.layers
                kept = [layer for layer in layers or (0,) if here is None or layer in here]
                result += (fill(pattern.template, l=l, e=e) for l in kept for e in range(max(pattern.experts, 1)))  # noqa: E741
    return tuple(dict.fromkeys(result))


def computed_names(model: Model, convention: Convention, dims: Dims, side: str, **symbols: int) -> dict[str, str]:
    """HF name -> how this side computes its values, for the tensors that it does not hold byte for byte.

    A rule's `value` declares them, or the convention for the whole side (held_as). Where both dtypes are equal, a cast
    changes nothing and is not listed.
    """
    names = symbols_of(model, convention, dims, side, symbols)
    result: dict[str, str] = {}
    for label, rule in active_rules(model, convention, names).items():
        if isinstance(rule, Drop):
            continue
        layers = rule_layers(model, rule, f"{convention.origin}, rule {label}")
        for part in sources(rule):
            pattern = model.catalog.patterns[model.catalog.by_template[part.hf]]
            dtype, cast_from = _dtypes(model, convention, rule, pattern)
            for layer in (layers or (0,)) if cast_from else ():
                for expert in range(max(pattern.experts, 1)):
                    result[fill(part.hf, l=layer, e=expert)] = cast_text(cast_from, dtype)
    return result


def _dtypes(model: Model, convention: Convention, rule: ParamRule, pattern: Pattern) -> tuple[str, str]:
    """(dtype of the parameter, HF dtype that its values are declared to be cast from or "")."""
    if convention.held_as and rule.dtype is None and pattern.dtype == model.dtype:
        return convention.held_as, pattern.dtype if pattern.dtype != convention.held_as else ""
    dtype = rule.dtype or pattern.dtype
    return dtype, pattern.dtype if rule.value == "cast" and dtype != pattern.dtype else ""


def resolve(model: Model, convention: Convention, dims: Dims, side: str, **symbols: int) -> Layout:
    """The layout of one side.

    symbols: extra names that rules may use (vocab_multiple, say). Raises FamilyError for rules that do not match the model and
    ParallelError for sizes that do not divide it, before anything else happens.
    """
    return resolve_part(model, convention, dims, side, symbols)


def resolve_part(
    model: Model,
    convention: Convention,
    dims: Dims,
    side: str,
    symbols: Mapping[str, int],
    *,
    ranks: Iterable[int] | None = None,
    wanted: NDArray[np.bool_] | None = None,
) -> Layout:
    """The layout of these ranks only, and of parameters that hold some wanted tensor only; None: all. Errors as of resolve.

    wanted [tensors]: marks. A rule over experts counts as wanted in a layer where any of its experts is.
    """
    names = symbols_of(model, convention, dims, side, symbols)
    rules = {label: rule for label, rule in active_rules(model, convention, names).items() if not isinstance(rule, Drop)}
    worker = _Resolver(model, convention, dims, side, names, Cutter(model.catalog, names, dims.sizes, side), wanted)
    if convention.shared and model.catalog.scheme:  # an engine's; a trainer holds the weights themselves
        worker.emitter = Emitter(model.catalog, side)
    for label, rule in rules.items():
        check_rule(rule, worker.where(label), model.catalog, names, dims.coords(0))
    params: list[Param] = []
    blocks: list[_Block] = []
    firsts: list[int] = []
    seen: set[tuple[int, ...]] = set()
    with _uncollected():
        for rank in range(dims.world) if ranks is None else sorted(ranks):
            coords = dims.coords(rank)
            mine = [(label, block) for label, rule in rules.items() for block in worker.block(coords, label, rule)]
            if (same := tuple(id(block) for _, block in mine)) not in seen:  # ranks with the same blocks have the same names
                _distinct(side, rank, mine)
                seen.add(same)
            for _, block in mine:
                blocks.append(block)
                firsts.append(len(params))
                params += [
                    Param(rank, n, block.shape, block.dtype, block.filling, block.cast_from, block.part) for n in block.names
                ]
    d = model.catalog.ndim
    if not blocks:
        none, wide = np.zeros(0, np.int64), np.zeros((0, d), np.int64)
        return Layout(side, dims.world, model.catalog, (), none, none, wide, wide, none, wide)
    return Layout(
        side,
        dims.world,
        model.catalog,
        tuple(params),
        tensor=np.concatenate([b.tensor for b in blocks]),
        param=np.concatenate([b.param + first for b, first in zip(blocks, firsts, strict=True)]),
        offset=np.concatenate([b.offset for b in blocks]),
        shape=np.concatenate([b.box for b in blocks]),
        start=np.concatenate([b.start for b in blocks]),
        strides=np.concatenate([b.strides for b in blocks]),
    )


@contextmanager
def _uncollected() -> Generator[None]:
    """Without garbage collection, as it was before: it would look at hundreds of thousands of parameters again and again
    while they are made, and nothing here makes cycles."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def _distinct(side: str, rank: int, blocks: list[tuple[str, _Block]]) -> None:
    """Raise FamilyError when two rules (or one rule twice) give a parameter of the same name."""
    if len({name for _, b in blocks for name in b.names}) == sum(len(b.names) for _, b in blocks):
        return
    giver: dict[str, str] = {}
    for label, block in blocks:
        for name in block.names:
            if name in giver:
                raise FamilyError(f"{side} rank {rank}: two rules make the parameter {name}: {giver[name]} and {label}")
            giver[name] = label


@dataclass(slots=True)
class _Resolver:
    model: Model
    convention: Convention
    dims: Dims
    side: str
    names: Mapping[str, int]
    cutter: Cutter
    wanted: NDArray[np.bool_] | None = None
    locals: dict[tuple[str, tuple[int, ...]], Local] = field(default_factory=dict[tuple[str, tuple[int, ...]], Local])
    blocks: dict[tuple[str, tuple[int, ...], int, range], tuple[_Block, ...]] = field(
        default_factory=dict[tuple[str, tuple[int, ...], int, range], tuple[_Block, ...]]
    )
    emitter: Emitter | None = None

    def where(self, label: str) -> str:
        return f"{self.convention.origin}, rule {label}"

    def block(self, coords: Mapping[str, int], label: str, rule: ParamRule) -> tuple[_Block, ...]:
        """What one rule gives on the ranks with these coordinates: more than one where weights become several tensors."""
        pattern = self.model.catalog.patterns[self.model.catalog.by_template[sources(rule)[0].hf]]
        experts = self._experts(rule, pattern, coords, self.where(label))
        split = tuple(coords[axis] for axis, placement in rule.place.items() if isinstance(placement, Split))
        key = (label, split, coords["pp"], experts)
        if key not in self.blocks:
            held = [item for item in self._held(rule, coords, self.where(label)) if self._wanted(rule, item[2])]
            self.blocks[key] = tuple(self._blocks(label, rule, pattern, coords, split, held, experts)) if held else ()
        return self.blocks[key]

    def _blocks(
        self,
        label: str,
        rule: ParamRule,
        pattern: Pattern,
        coords: Mapping[str, int],
        split: tuple[int, ...],
        held: list[_Held],
        experts: range,
    ) -> Iterator[_Block]:
        local = self.locals.get((label, split))
        if local is None:
            local = self.locals[label, split] = self.cutter.local(rule, coords, self.where(label))
        dtype, cast_from = _dtypes(self.model, self.convention, rule, pattern)
        templates = tuple(part.hf for part in sources(rule))
        where, emitted = self.where(label), ()
        if self.emitter is not None:
            layers = self.emitter.layers(templates, where)
            emitted = held if layers is None else [item for item in held if item[2] in layers]
        plain = [item for item in held if item not in emitted] if emitted else held
        if plain:
            yield self._filled(rule, rule.param, local, plain, experts, dtype, cast_from, "")
        if emitted and self.emitter is not None:
            cuts = [axis for axis, place in rule.place.items() if isinstance(place, Split)]
            axes = ", ".join(f"{axis}={self.dims.sizes[axis]}" for axis in cuts)
            for part in self.emitter.parts(templates[0]):
                made = part.made
                assert made is not None
                divided = self.emitter.local(local, part, axes or "whole on every rank", where)
                param = rule.param + part.template.removeprefix(made.base)
                yield self._filled(rule, param, divided, list(emitted), experts, made.dtype, "", made.part)

    def _filled(
        self,
        rule: ParamRule,
        param: str,
        local: Local,
        held: list[_Held],
        experts: range,
        dtype: str,
        cast_from: str,
        part: str,
    ) -> _Block:
        stacked = isinstance(rule, Stack)
        names = tuple(
            in_layer.replace("{e}", str(expert)).replace("{i}", str(i))
            for in_layer in (
                (f"vp{chunk}." if chunk is not None else "") + fill(param, l=layer, n=n) for chunk, n, layer in held
            )
            for i, expert in enumerate(experts[:1] if stacked else experts)
        )
        columns = _columns(self.model.catalog, rule, local, held, experts)
        copies = len(experts) if stacked else 1
        shape = (copies, *local.shape) if stacked else local.shape
        return _Block(names, shape, dtype, local.filling * copies, cast_from, part, *columns)

    def _wanted(self, rule: ParamRule, layer: int) -> bool:
        """Whether any tensor that the rule speaks of is wanted in this layer (of experts, any)."""
        if self.wanted is None:
            return True
        catalog = self.model.catalog
        for part in sources(rule):
            index = catalog.by_template[part.hf]
            pattern, each = catalog.patterns[index], max(catalog.patterns[index].experts, 1)
            first = catalog.first[index] + (pattern.layers.index(layer) * each if pattern.layers is not None else 0)
            if self.wanted[first : first + each].any():
                return True
        return False

    def _held(self, rule: ParamRule, coords: Mapping[str, int], where: str) -> list[_Held]:
        """Every layer of the rule that these ranks have; for a rule without layers, each chunk that holds it."""
        layers = rule_layers(self.model, rule, where)
        placement = rule.place.get("pp", Own("l") if layers is not None else Replicate())
        pp, stages = coords["pp"], self.dims.sizes["pp"]
        chunks = self.dims.stage_layers(self.model.layers, pp)
        many = len(chunks) > 1
        first, last = [0] if pp == 0 else [], [len(chunks) - 1] if pp == stages - 1 else []
        ends = {"first": first, "last": last, "ends": sorted({*first, *last})}
        trailing = [layer for layer in layers or () if layer >= self.model.layers]
        if trailing:
            if trailing != list(layers or ()):
                raise FamilyError(f"{where}: decoder layers and trailing layers (mtp) need a rule each")
            if not isinstance(placement, Own) or placement.index not in ends:
                raise FamilyError(f"{where}: trailing layers are no stage's own; place.pp must be own first, last or ends")
            held = ends[placement.index]
            return [(chunk if many else None, layer - self.model.layers, layer) for chunk in held for layer in trailing]
        if layers is not None:
            if placement != Own("l"):
                raise FamilyError(f"{where}: a rule over {{l}} must own layers over pp, not {placement}")
            wanted = set(layers)
            return [
                (chunk if many else None, n, layer)
                for chunk, members in enumerate(chunks)
                for n, layer in enumerate(members)
                if layer in wanted
            ]
        match placement:
            case Replicate():
                holders = [0]
            case Own(index) if index in ends:
                holders = ends[index]
            case _:
                raise FamilyError(f"{where}: placement {placement} over pp needs {{l}} in the template")
        return [(chunk if many else None, 0, 0) for chunk in holders]

    def _experts(self, rule: ParamRule, pattern: Pattern, coords: Mapping[str, int], where: str) -> range:
        """Global experts these ranks have; range(1) for rules without experts."""
        count = evaluate(rule.experts, self.names, where) if isinstance(rule, Unstack) else pattern.experts
        if not count:
            return range(1)
        owner = next((axis for axis, placement in rule.place.items() if placement == Own("e")), None)
        if owner is None:
            return range(count)
        ranks = self.dims.sizes[owner]
        if count % ranks:
            legal = [n for n in range(1, count + 1) if count % n == 0]
            raise ParallelError(f"{where}: {count} experts do not divide over {owner}={ranks}; legal sizes: {legal}")
        each = count // ranks
        return range(coords[owner] * each, (coords[owner] + 1) * each)


def _columns(
    catalog: Catalog, rule: ParamRule, local: Local, held: list[_Held], experts: range
) -> tuple[Ints, Ints, Ints, Ints, Ints, Ints]:
    """(tensor, param, offset, shape, start, strides) over (layer, expert, piece), flat."""
    d = catalog.ndim
    stacked = isinstance(rule, Stack)
    grid = (len(held), len(experts), len(local.pieces))
    expert_of = np.arange(experts.start, experts.stop, dtype=np.int64)
    tensor = np.empty(grid, np.int64)
    offset = np.zeros((*grid, d), np.int64)
    shape = np.ones((*grid, d), np.int64)
    strides = np.zeros((*grid, d), np.int64)
    start = np.empty(grid, np.int64)
    for j, piece in enumerate(local.pieces):
        index = catalog.by_template[piece.template]
        pattern = catalog.patterns[index]
        position = np.zeros(len(held), np.int64)
        if pattern.layers is not None:
            position = np.searchsorted(np.asarray(pattern.layers), [layer for _, _, layer in held])
        base = catalog.first[index] + position[:, None] * max(pattern.experts, 1)
        tensor[:, :, j] = base + (expert_of if pattern.experts else 0)
        n = len(piece.box.shape)
        offset[:, :, j, :n] = piece.box.offset
        shape[:, :, j, :n] = piece.box.shape
        strides[:, :, j, :n] = piece.strides
        start[:, :, j] = piece.start
        if isinstance(rule, Unstack):
            offset[:, :, j, 0] = expert_of
    # A shard's parameter differs by layer, and by expert unless the experts are stacked in it.
    layer_of = np.arange(len(held), dtype=np.int64)[:, None, None]
    nth_expert = np.arange(len(experts), dtype=np.int64)[:, None]
    if stacked:
        start += nth_expert * prod(local.shape)
        param = np.broadcast_to(layer_of, grid)
    else:
        param = np.broadcast_to(layer_of * len(experts) + nth_expert, grid)
    return tensor.ravel(), param.ravel(), offset.reshape(-1, d), shape.reshape(-1, d), start.ravel(), strides.reshape(-1, d)
