"""Model families and engine conventions: YAML files into frozen values.

A family file declares a model's HF tensors and how Megatron-Core ("mcore") and transformers hold them; a convention file
(one for each engine) declares how an engine fuses and stacks them. Both may `extends` others of their kind: mappings merge by
key, null removes. Sizes come from the HF config, never from the YAML.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeVar, cast

from pydantic import Field, TypeAdapter, ValidationError

from weight_sync.errors import FamilyError, listed
from weight_sync.ids import ITEMSIZE
from weight_sync.layout.catalog import Catalog, Pattern, placeholders
from weight_sync.layout.expr import evaluate
from weight_sync.layout.placement import parse_placement
from weight_sync.layout.rules import Drop, Frozen, ParamRule, Rule

T = TypeVar("T", bound=Frozen)

LoadYaml = Callable[[str], Mapping[str, Any]]
"""Name -> parsed YAML of a family or convention; raises FamilyError listing the known names when there is none."""


class LayerSet(Frozen):
    """Which decoder layers a tensor exists in. Two sets are always there: "all" (decoder layers) and "mtp" (trailing ones).

    first/until: expressions for the range [first, until). every: an HF config key; only layers l with (l + 1) % value == 0.
    except_: an HF config key holding a list of layers to leave out. invert: the complement within all layers.
    """

    first: str | int = 0
    until: str | int | None = None
    every: str | None = None
    except_: str | None = Field(default=None, alias="except")
    invert: bool = False


class Tensor(Frozen):
    """One HF tensor template. shape: expressions. layers: layer sets, joined by " + " (templates with {l}). when: see rules."""

    shape: tuple[str | int, ...]
    layers: str = "all"
    dtype: str | None = None
    when: str | None = None


class Refusal(Frozen):
    """What a side cannot do: models of these HF architectures (all, if none is named) while `when` is true."""

    when: str
    reason: str
    only_for: tuple[str, ...] = ()


class Trailing(Frozen):
    """How Megatron-Core names a layer behind the decoder layers (multi-token prediction), which is built like one of them.

    A rule whose layers include "mtp" gives these layers the same parameters with `decoder` exchanged for `param`, on the
    stages that `pp` says. {n} then counts trailing layers from 0. when: rules for trailing layers are absent if it is false.
    """

    decoder: str
    param: str
    pp: str = "own last"
    when: str = "mtp_layers > 0"


class Demand(Frozen):
    """A key of the HF config that means a model of another shape unless it is absent, null or holds `entries` only.

    entries: the legal values of the key, or of every item where it is a list. Empty: the key must be absent or null.
    """

    entries: tuple[str | int, ...] = ()
    reason: str = Field(min_length=1)


class FamilyFile(Frozen):
    """What a merged family file must hold; see the module docstring of `rules` for the rules themselves.

    refuse: expressions over sizes -> why a model for which they hold cannot be expressed. demand: what other keys of the HF
    config may hold, by key. Symbol mtp_layers, if the family
    has it, is how many layers trail the decoder layers in the checkpoint (index layers, layers + 1, ...): they belong to no
    pipeline stage's decoder layers and to the layer set "mtp". mcore_defaults: symbols of the mcore rules that a caller of
    resolve may give another value.
    """

    name: str
    architectures: tuple[str, ...]
    refuse: dict[str, str] = Field(default_factory=dict)
    demand: dict[str, Demand] = Field(default_factory=dict)
    config: dict[str, str] = Field(default_factory=dict)
    defaults: dict[str, str | int] = Field(default_factory=dict)
    derived: dict[str, str | int] = Field(default_factory=dict)
    layer_sets: dict[str, LayerSet] = Field(default_factory=dict)
    tensors: dict[str, Tensor] = Field(default_factory=dict)
    mcore: dict[str, Rule] = Field(default_factory=dict)
    mcore_refuse: dict[str, Refusal] = Field(default_factory=dict)
    mcore_defaults: dict[str, str | int] = Field(default_factory=dict)
    mcore_trailing: Trailing | None = None


class ConventionFile(Frozen):
    """How one engine holds HF tensors: rules that apply wherever a family has the tensors they speak of.

    refuse: label -> what is an error instead of a layout. remainder: see EngineDims.
    defaults: symbols the rules use, with the engine's own value. trailing: where a draft model holds the layers behind the
    decoder layers: every rule over decoder layers holds for them, too, with another parameter.
    """

    name: str
    remainder: str = "inner"
    defaults: dict[str, str | int] = Field(default_factory=dict)
    refuse: dict[str, Refusal] = Field(default_factory=dict)
    rules: dict[str, Rule]
    trailing: Trailing | None = None


@dataclass(frozen=True)
class Model:
    """A family applied to one HF config: concrete sizes and the catalog of HF tensors."""

    family: FamilyFile
    symbols: Mapping[str, int]
    catalog: Catalog
    layers: int
    layer_sets: Mapping[str, tuple[int, ...]]
    dtype: str
    absent: frozenset[str]


@dataclass(frozen=True, slots=True)
class Convention:
    """Rules of one side, ready to resolve. origin: "family qwen3, mcore" or "engine sglang", for errors."""

    origin: str
    rules: Mapping[str, ParamRule | Drop]
    defaults: Mapping[str, str | int] = field(default_factory=dict[str, str | int])
    shared: bool = False
    """True for engine files: a rule whose tensors the family does not have is simply not used."""
    refuse: Mapping[str, Refusal] = field(default_factory=dict[str, Refusal])
    held_as: str = ""
    """The dtype of this side's parameters where the HF tensor has the model's own dtype and the rule names none; their values
    are cast. "": the HF tensor's. A trainer with float32 masters of a bfloat16 model has float32."""


def merged(name: str, load: LoadYaml, seen: tuple[str, ...] = ()) -> dict[str, Any]:
    """The YAML of `name` with everything it extends merged in, parents first."""
    if name in seen:
        raise FamilyError(f"{' -> '.join((*seen, name))}: a family cannot extend itself")
    data = _mapping(load(name), name)
    result: dict[str, Any] = {}
    for parent in _names(data.pop("extends", None), f"{name}: extends"):
        result = _merge(result, merged(parent, load, (*seen, name)))
    return _merge(result, data)


def _mapping(value: object, where: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise FamilyError(f"{where}: the file must hold a mapping, not {_short(value)}")
    return dict(cast("Mapping[str, Any]", value))


def _names(value: object, where: str) -> list[str]:
    items = cast("list[object]", value) if isinstance(value, list) else None
    if value is not None and (items is None or not all(isinstance(item, str) for item in items)):
        raise FamilyError(f"{where} must be a list of names, got {_short(cast('object', value))}")
    return cast("list[str]", items or [])


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in over.items():
        old = result.get(key)
        if value is None:
            result.pop(key, None)
        elif isinstance(old, Mapping) and isinstance(value, Mapping) and "rule" not in value and "shape" not in value:
            result[key] = _merge(cast("Mapping[str, Any]", old), cast("Mapping[str, Any]", value))
        else:
            result[key] = value
    return result


def load_family(name: str, load: LoadYaml) -> FamilyFile:
    return _parse(FamilyFile, merged(name, load), f"family {name}")


def parse_family(data: Mapping[str, Any]) -> FamilyFile:
    """A family from YAML that `merged` has already put together."""
    return _parse(FamilyFile, data, f"family {data.get('name')}")


def load_convention(name: str, load: LoadYaml) -> ConventionFile:
    return _parse(ConventionFile, merged(name, load), f"engine {name}")


def parse_convention(data: Mapping[str, Any]) -> ConventionFile:
    return _parse(ConventionFile, data, f"engine {data.get('name')}")


def _parse(kind: type[T], data: Mapping[str, Any], where: str) -> T:
    try:
        return TypeAdapter(kind).validate_python(_tuples(data))
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, e['loc']))}: {e['msg']} (got {_short(e['input'])})" for e in error.errors()]
        raise FamilyError(f"{where}: {listed(problems)}") from None


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 160 else text[:160] + "..."


def _tuples(value: Any) -> Any:
    """Lists become tuples, as the frozen schemas want them."""
    if isinstance(value, Mapping):
        return {k: _tuples(v) for k, v in cast("Mapping[str, Any]", value).items()}
    if isinstance(value, list):
        return tuple(_tuples(item) for item in cast("list[Any]", value))
    return value


def apply(family: FamilyFile, config: Mapping[str, Any]) -> Model:
    """Put an HF config's sizes into a family.

    Raises FamilyError when the config's architecture is another one, lacks a key that the family needs, or has sizes that
    are no sizes (below 1).
    """
    architectures = cast("Sequence[str]", config.get("architectures") or [])
    if not set(architectures) & set(family.architectures):
        raise FamilyError(
            f"family {family.name} is for {', '.join(family.architectures)}, "
            f"but the HF config says architectures={list(architectures)}"
        )
    symbols: dict[str, int] = {}
    for symbol, key in family.config.items():
        value = next((found for k in key.split(" or ") if (found := lookup(config, k)) is not None), None)
        if value is None and symbol in family.defaults:
            value = evaluate(family.defaults[symbol], symbols, f"family {family.name}, defaults.{symbol}")
        if not isinstance(value, int | bool):
            raise FamilyError(f"family {family.name}: the HF config has {key}={value!r}; {symbol} needs an integer")
        symbols[symbol] = int(value)
    for symbol, text in family.derived.items():
        symbols[symbol] = evaluate(text, symbols, f"family {family.name}, derived.{symbol}")
    for text, reason in family.refuse.items():
        if evaluate(text, symbols, f"family {family.name}, refuse"):
            raise FamilyError(f"family {family.name} is refused for this HF config ({text}): {reason}")
    for key, demand in family.demand.items():
        value = cast("object", lookup(config, key))
        items = cast("Sequence[object]", value) if isinstance(value, list | tuple) else [] if value is None else [value]
        if wrong := [item for item in items if item not in demand.entries]:
            legal = f"only {listed(demand.entries)}" if demand.entries else "nothing"
            raise FamilyError(
                f"family {family.name} is refused for this HF config ({key} may hold {legal}, not {_short(wrong[0])}): "
                f"{demand.reason}"
            )
    if not family.tensors:
        raise FamilyError(f"family {family.name} declares no tensors")
    dtype = model_dtype(config)
    layers, trailing = symbols.get("layers", 0), symbols.get("mtp_layers", 0)
    if trailing < 0:
        raise FamilyError(f"family {family.name}: mtp_layers is {trailing}; it must be 0 or more")
    sets = {name: _layers(name, family, symbols, config, layers) for name in family.layer_sets}
    sets["all"], sets["mtp"] = tuple(range(layers)), tuple(range(layers, layers + trailing))
    patterns: list[Pattern] = []
    absent: set[str] = set()
    for template, tensor in family.tensors.items():
        where = f"family {family.name}, tensors.{template}"
        if unknown := placeholders(template) - {"l", "e"}:
            raise FamilyError(f"{where}: an HF name has {{l}} and {{e}} only, not {listed(sorted(unknown))}")
        if tensor.when is not None and not evaluate(tensor.when, symbols, where):
            absent.add(template)
            continue
        members = union(tensor.layers, sets, where)
        if "{l}" in template and layers < 1:
            raise FamilyError(f"{where}: the model has layers={layers}; a tensor with {{l}} needs at least 1")
        chosen = members if "{l}" in template else None
        if chosen == ():
            absent.add(template)
            continue
        shape = tuple(evaluate(item, symbols, where) for item in tensor.shape)
        if any(size < 1 for size in shape):
            raise FamilyError(f"{where}: shape {list(tensor.shape)} is {list(shape)}; every size must be at least 1")
        experts = symbols.get("experts", 0) if "{e}" in template else 0
        if "{e}" in template and experts < 1:
            raise FamilyError(f"{where}: the model has experts={experts}; a tensor with {{e}} needs at least 1")
        if (tensor.dtype or dtype) not in ITEMSIZE:
            raise FamilyError(f"{where}: unknown dtype {tensor.dtype or dtype!r}; known: {', '.join(ITEMSIZE)}")
        patterns.append(Pattern(template, shape, tensor.dtype or dtype, chosen, experts))
    catalog = Catalog(tuple(patterns))
    if not _differ(catalog.patterns):
        raise FamilyError(f"family {family.name}: two tensor templates give the same HF name: {listed(catalog.doubled())}")
    return Model(family, symbols, catalog, layers, sets, dtype, frozenset(absent))


@lru_cache(maxsize=8)
def _differ(patterns: tuple[Pattern, ...]) -> bool:
    """Whether no two tensors have one HF name. Kept, for both sides of a plan ask it of the same 70,000 names."""
    names = [name for pattern in patterns for name in pattern.names()]
    return len(set(names)) == len(names)


def model_dtype(config: Mapping[str, Any]) -> str:
    """The dtype that an HF config gives its tensors, torch's name without prefix."""
    return str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")


def union(text: str, sets: Mapping[str, tuple[int, ...]], where: str) -> tuple[int, ...]:
    """The layers of `sparse`, or of `sparse + mtp`, in ascending order."""
    names = [name.strip() for name in text.split("+")]
    if unknown := [name for name in names if name not in sets]:
        raise FamilyError(f"{where}: layers: {listed(unknown)} is not a layer set; known: {', '.join(sets)}")
    return tuple(sorted({layer for name in names for layer in sets[name]}))


def lookup(config: Mapping[str, Any], key: str) -> Any:
    """A dotted key of an HF config, or None."""
    value: Any = config
    for step in key.split("."):
        if not isinstance(value, Mapping):
            return None
        value = cast("Mapping[str, Any]", value).get(step)
    return value


def _numbers(value: object, where: str) -> set[int]:
    items = cast("Sequence[object]", value) if isinstance(value, list | tuple) else None
    if value is not None and (items is None or not all(isinstance(n, int) for n in items)):
        raise FamilyError(f"{where} of the HF config must be a list of layers, got {_short(cast('object', value))}")
    return set(cast("Sequence[int]", items or []))


def _layers(
    name: str, family: FamilyFile, symbols: Mapping[str, int], config: Mapping[str, Any], count: int
) -> tuple[int, ...]:
    rule = family.layer_sets[name]
    where = f"family {family.name}, layer_sets.{name}"
    first = evaluate(rule.first, symbols, where)
    until = count if rule.until is None else evaluate(rule.until, symbols, where)
    every: object = 1 if rule.every is None else lookup(config, rule.every)
    every = 1 if every is None else every
    if not isinstance(every, int) or every < 1:
        raise FamilyError(f"{where}: the HF config has {rule.every}={every!r}; a step must be an integer of at least 1")
    left_out = _numbers(lookup(config, rule.except_), f"{where}: {rule.except_}") if rule.except_ else set[int]()
    chosen = {n for n in range(first, min(until, count)) if (n + 1) % every == 0 and n not in left_out}
    return tuple(n for n in range(count) if (n in chosen) != rule.invert)


def mcore_convention(family: FamilyFile) -> Convention:
    """The trainer side as Megatron-Core holds it."""
    if not family.mcore:
        raise FamilyError(f"family {family.name} declares no mcore rules: it cannot be synced from a Megatron trainer")
    origin = f"family {family.name}, mcore"
    rules: dict[str, ParamRule | Drop] = {}
    for label, rule in family.mcore.items():
        names = [] if rule.layers is None else [name.strip() for name in rule.layers.split("+")]
        if isinstance(rule, Drop) or "mtp" not in names:
            rules[label] = rule
            continue
        trailing = family.mcore_trailing
        if trailing is None:
            raise FamilyError(f"{origin}, rule {label}: layers: {rule.layers!r}, but the family has no mcore_trailing")
        change: dict[str, object] = {"layers": "mtp", "when": _both(rule.when, trailing.when)}
        if decoder := [name for name in names if name != "mtp"]:
            rules[label] = rule.model_copy(update={"layers": " + ".join(decoder)})
            if not rule.param.startswith(trailing.decoder):
                raise FamilyError(f"{origin}, rule {label}: param {rule.param!r} does not start with {trailing.decoder!r}")
            change["param"] = trailing.param + rule.param.removeprefix(trailing.decoder)
        place = parse_placement(trailing.pp, f"{origin}, mcore_trailing.pp")
        change["place"] = {**rule.place, "pp": rule.place.get("pp", place)}
        rules[f"mtp_{label}" if decoder else label] = rule.model_copy(update=change)
    return Convention(origin, rules, family.mcore_defaults, refuse=family.mcore_refuse)


def _both(when: str | None, other: str) -> str:
    return other if when is None else f"({when}) and ({other})"


def engine_convention(file: ConventionFile) -> Convention:
    """The rules of one engine, those of its draft model among them (labels draft_*; absent while trailing.when is false)."""
    rules: dict[str, ParamRule | Drop] = dict(file.rules)
    if file.trailing is not None:
        place = parse_placement(file.trailing.pp, f"engine {file.name}, trailing.pp")
        for label, rule in file.rules.items():
            if isinstance(rule, Drop) or rule.layers is not None or not rule.param.startswith(file.trailing.decoder):
                continue
            change = {
                "layers": "mtp",
                "when": _both(rule.when, file.trailing.when),
                "param": file.trailing.param + rule.param.removeprefix(file.trailing.decoder),
                "place": {**rule.place, "pp": place},
            }
            rules[f"draft_{label}"] = rule.model_copy(update=change)
    return Convention(f"engine {file.name}", rules, file.defaults, shared=True, refuse=file.refuse)
