"""From what Megatron-Bridge maps to a family YAML. Plain data in and out: no torch, no Megatron.

Facts are collected from a live model of one rank (megatron/newfamily.py). Everything proposed is in the closed rule set of
weight_sync.layout.rules; what does not fit is listed, never guessed. Shapes are written in the symbols that shipped families
use. Sizes of the tiny model are chosen so that two expressions rarely have one value; the oracles prove what is proposed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations_with_replacement
from typing import Any

from weight_sync.config import family_yaml, shipped_families
from weight_sync.errors import FamilyError
from weight_sync.layout.expr import evaluate
from weight_sync.layout.family import lookup

Yaml = dict[str, Any]

MTP_PREFIXES = ("mtp.layers.{n}.mtp_model_layer.", "mtp.layers.{n}.transformer_layer.")
"""What Megatron-Core calls the decoder layer inside a layer of multi-token prediction."""

_DECODER = "decoder.layers.{n}."
_QKV = ("q", "k", "v")
_GATED = ("gate", "up")


@dataclass(frozen=True, slots=True)
class Mapped:
    """One parameter of the one-rank model. mapping: the bridge's class. hf: role -> HF name ("" is the only one).

    cut: the dim that tensor parallelism cuts, None where it is whole on every rank. other: what the mapping does besides moving
    elements, "" for nothing.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    mapping: str
    hf: Mapping[str, str]
    cut: int | None
    other: str = ""


@dataclass(frozen=True, slots=True)
class Facts:
    """tensors: (shape, dtype) of every HF tensor of the tiny checkpoint. config: its HF config. unmapped: mcore parameters that
    the bridge has no mapping for."""

    config: Mapping[str, Any]
    tensors: Mapping[str, tuple[tuple[int, ...], str]]
    params: Sequence[Mapped]
    unmapped: Sequence[str] = ()


@dataclass(slots=True)
class Proposal:
    """family: YAML as data. unmatched: what could not be put into rules, each with the reason. notes: what to look at."""

    family: Yaml
    unmatched: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Known:
    """What shipped families say: symbols and their config keys, shapes and labels."""

    keys: dict[str, list[str]] = field(default_factory=dict)
    defaults: dict[str, str | int] = field(default_factory=dict)
    tensors: dict[str, list[Yaml]] = field(default_factory=dict)
    labels: dict[tuple[str, str], str] = field(default_factory=dict)

    @classmethod
    def of(cls, names: Sequence[str]) -> _Known:
        known = cls()
        for name in names:
            family = family_yaml(name)
            for symbol, key in family.get("config", {}).items():
                known.keys.setdefault(symbol, [])
                known.keys[symbol] += [k for k in [key] if k not in known.keys[symbol]]
            known.defaults |= {s: d for s, d in family.get("defaults", {}).items() if s not in known.defaults}
            for template, tensor in family.get("tensors", {}).items():
                known.tensors.setdefault(template, []).append(tensor)
            for label, rule in family.get("mcore", {}).items():
                if "param" in rule and not label.endswith("_at_both_ends"):
                    known.labels.setdefault((rule["rule"], rule["param"]), label)
        return known

    def symbols(self, config: Mapping[str, Any]) -> tuple[dict[str, int], dict[str, str]]:
        """(values, config keys) of all symbols that this config has."""
        values: dict[str, int] = {}
        keys: dict[str, str] = {}
        for symbol, candidates in self.keys.items():
            for key in candidates:
                value = next((v for k in key.split(" or ") if (v := lookup(config, k)) is not None), None)
                if isinstance(value, int):
                    values[symbol], keys[symbol] = int(value), key
                    break
        for symbol, default in self.defaults.items():
            if symbol in values:
                continue
            try:
                values[symbol] = evaluate(default, values, symbol)
            except FamilyError:
                continue  # an expression over sizes that this config does not have
            keys[symbol] = self.keys[symbol][0]
        return values, keys


def propose(name: str, facts: Facts, *, learn_from: Sequence[str] | None = None) -> Proposal:
    """A complete family (nothing extended) for one HF config.

    learn_from: names of shipped families whose symbols, shape expressions and rule labels are used; all by default. Rules never
    come from them.
    """
    known = _Known.of(shipped_families() if learn_from is None else learn_from)
    return _Proposer(name, facts, known, Proposal({})).run()


class _Proposer:
    def __init__(self, name: str, facts: Facts, known: _Known, result: Proposal) -> None:
        self.name, self.facts, self.known, self.result = name, facts, known, result
        self.symbols, self.keys = known.symbols(facts.config)
        self.used: set[str] = {"layers"}
        self.layers = self.symbols["layers"]
        self.trailing = self.symbols.get("mtp_layers", 0)
        self.where: dict[str, set[int]] = {}  # HF template -> layers
        for tensor in facts.tensors:
            template, layer = template_of(tensor)
            self.where.setdefault(template, set()).update(() if layer is None else (layer,))
        self.sets, self.set_rules = self._layer_sets()

    def run(self) -> Proposal:
        tensors = self._tensors()
        rules = self._rules()
        left = sorted({template_of(t)[0] for t in self.facts.tensors} - self._spoken(rules))
        mtp = [p for p in self.facts.params if p.name.startswith("mtp.")]
        if self.trailing and not mtp:
            left = [tensor for tensor in left if not self.where[tensor] or min(self.where[tensor]) < self.layers]
            rules["mtp"] = {
                "rule": "drop",
                "layers": "mtp",
                "reason": "Megatron-Bridge builds this model without its MTP layer",
            }
            self.result.notes.append("the MTP layer is left out of the trainer's side: Megatron-Bridge maps nothing of it")
        for tensor in left:
            self._unmatched(f"{tensor}: Megatron-Bridge maps it to no parameter of this model")
        for param in self.facts.unmapped:
            self._unmatched(f"{param}: Megatron-Bridge has no mapping for this parameter")
        family: Yaml = {"name": self.name, "architectures": list(self.facts.config["architectures"])}
        tied = bool(self.symbols.get("tied"))
        if not tied and "tied" in self.keys:
            self.used.add("tied")
            family["refuse"] = {"tied": "proposed from a config with a head of its own; no oracle has seen a tied one"}
        family["config"] = {s: self.keys[s] for s in self.known.keys if s in self.used or (s == "mtp_layers" and self.trailing)}
        family["defaults"] = {s: self.known.defaults[s] for s in family["config"] if s in self.known.defaults}
        family["layer_sets"] = self.set_rules
        family["tensors"] = tensors
        if mtp:
            prefix = next(p for p in MTP_PREFIXES if any(template_of_param(m.name)[0].startswith(p) for m in mtp))
            family["mcore_defaults"] = {"trained_mtp": "mtp_layers"}
            family["mcore_trailing"] = {"decoder": _DECODER, "param": prefix, "when": "trained_mtp > 0"}
        family["mcore"] = rules
        self.result.family = {key: value for key, value in family.items() if value}
        return self.result

    def _unmatched(self, line: str) -> None:
        if line not in self.result.unmatched:
            self.result.unmatched.append(line)

    # -- HF tensors ------------------------------------------------------------------------------------------------------

    def _layer_sets(self) -> tuple[dict[str, set[int]], Yaml]:
        config, every = self.facts.config, set(range(self.layers))
        if config.get("first_k_dense_replace") is not None and "dense_layers" in self.symbols:
            dense = set(range(self.symbols["dense_layers"]))
            rules = {"dense": {"until": "dense_layers"}, "sparse": {"first": "dense_layers"}}
        elif config.get("decoder_sparse_step") is not None:
            step, left_out = config["decoder_sparse_step"], set(config.get("mlp_only_layers") or ())
            dense = {layer for layer in every if (layer + 1) % step or layer in left_out}
            sparse = {"every": "decoder_sparse_step", "except": "mlp_only_layers"}
            rules = {"sparse": sparse, "dense": {**sparse, "invert": True}}
        else:
            return {"all": every}, {}
        if not any(0 < len(layers & every) < len(every) for layers in self.where.values()):
            return {"all": every}, {}
        return {"all": every, "dense": dense & every, "sparse": every - dense}, rules

    def _set_of(self, layers: set[int], what: str) -> str:
        """`layers` as layer sets, or a line in `unmatched`."""
        decoder = {layer for layer in layers if layer < self.layers}
        names = [next((name for name, members in self.sets.items() if members == decoder), "")] if decoder else []
        if names and names[0] in ("dense", "sparse") and "dense_layers" in self.symbols:
            self.used.add("dense_layers")
        if names == [""]:
            self._unmatched(
                f"{what}: is in layers {sorted(decoder)}, which are no layer set; known sets: {', '.join(self.sets)}"
            )
            names = ["all"]
        return " + ".join([*names, *(["mtp"] if layers - decoder else [])])

    def _tensors(self) -> Yaml:
        found: Yaml = {}
        default = str(self.facts.config["dtype"])
        for tensor, (shape, dtype) in self.facts.tensors.items():
            template, _ = template_of(tensor)
            if template in found:
                continue
            entry: Yaml = {"shape": self._shape(template, shape)}
            if "{l}" in template and (sets := self._set_of(self.where[template], template)) != "all":
                entry["layers"] = sets
            if "{e}" in template:
                self.used.add("experts")
            if dtype != default:
                entry["dtype"] = dtype
            if template == "lm_head.weight" and "tied" in self.keys:
                entry["when"] = "not tied"
                self.used.add("tied")
            found[template] = entry
        return found

    def _shape(self, template: str, shape: tuple[int, ...]) -> list[str | int]:
        for tensor in self.known.tensors.get(template, []):
            texts = list(tensor["shape"])
            if len(texts) == len(shape) and [self._value(text) for text in texts] == list(shape):
                return [self._use(text) for text in texts]
        return [self._expression(template, size) for size in shape]

    def _value(self, text: str | int) -> int | None:
        try:
            return evaluate(text, self.symbols, "shape")
        except FamilyError:
            return None

    def _use(self, text: str | int) -> str | int:
        """Note the symbols of an expression as used."""
        for symbol in re.findall(r"[a-z_]+", str(text)):
            if symbol in self.symbols:
                self.used.add(symbol)
                for inner in re.findall(r"[a-z_]+", str(self.known.defaults.get(symbol, ""))):
                    self.used.update({inner} & self.symbols.keys())
        return text

    def _expression(self, template: str, size: int) -> str | int:
        """The simplest expression over sizes with this value; a second one of equal length is a note."""
        sizes = {s: v for s, v in self.symbols.items() if v > 1 and s not in ("layers", "mtp_layers", "dense_layers")}
        singles = [s for s, v in sizes.items() if v == size]
        products = [f"{a} * {b}" for a, b in combinations_with_replacement(sizes, 2) if sizes[a] * sizes[b] == size]
        doubles = [f"2 * {s}" for s, v in sizes.items() if 2 * v == size]
        sums = [f"{a} + {b}" for a, b in combinations_with_replacement(sizes, 2) if sizes[a] + sizes[b] == size]
        for found in (singles, products, doubles, sums):
            if found:
                if len(found) > 1:
                    self.result.notes.append(f"{template}: {size} may be {' or '.join(found)}; {found[0]} was taken")
                return self._use(found[0])
        self._unmatched(f"{template}: no expression over the config's sizes gives {size}")
        return size

    # -- mcore rules -----------------------------------------------------------------------------------------------------

    def _rules(self) -> Yaml:
        groups: dict[str, list[Mapped]] = {}
        for param in self.facts.params:
            groups.setdefault(template_of_param(param.name)[0], []).append(param)
        prefix = next((p for p in MTP_PREFIXES if any(name.startswith(p) for name in groups)), None)
        rules: Yaml = {}
        for name, members in groups.items():
            if prefix is not None and name.startswith(prefix) and _DECODER + name.removeprefix(prefix) in groups:
                continue  # the same layer behind the decoder: said by the decoder's rule
            twin = groups.get(prefix + name.removeprefix(_DECODER), []) if prefix and name.startswith(_DECODER) else []
            rule = self._rule(name, members, twin)
            if rule is not None:
                rules |= self._placed(name, rule, has_mtp=prefix is not None)
        if prefix is not None and rules:
            rules["mtp_untrained"] = {
                "rule": "drop",
                "layers": "mtp",
                "reason": "this trainer is built without the MTP layer",
                "when": "trained_mtp == 0",
            }
        return rules

    def _rule(self, name: str, members: list[Mapped], twin: list[Mapped]) -> Yaml | None:
        first = members[0]
        sources = {role: template_of(hf)[0] for role, hf in first.hf.items()}
        for other in [*members, *twin]:
            theirs = {role: template_of(hf)[0] for role, hf in other.hf.items()}
            if (theirs, other.mapping, other.cut, other.other) != (sources, first.mapping, first.cut, first.other):
                self._unmatched(f"{name}: {first.mapping} of {sources} in one layer, {other.mapping} of {theirs} in another")
                return None
        if first.other:
            self._unmatched(f"{name}: {first.mapping} of {', '.join(sources.values())}: {first.other}")
            return None
        rule = self._sources(first, sources, name)
        if rule is None:
            self._unmatched(f"{name}: no rule does what {first.mapping} does with {', '.join(sources.values())}")
            return None
        rule["param"] = name
        place = {"ep": "own e"} if "{i}" in name else {}
        if first.cut is not None:
            place["etp" if "{i}" in name else "tp"] = f"split {first.cut}"
        if place:
            rule["place"] = place
        hf = next(iter(first.hf.values()))
        model_dtype = self.facts.tensors[hf][1]
        if first.dtype != model_dtype:
            rule["dtype"] = first.dtype
            self._unmatched(f"{name}: holds {first.dtype}, the checkpoint {model_dtype}; declare the value function by hand")
        held = {layer for member in members if (layer := template_of_param(member.name)[1]) is not None}
        if name.startswith("mtp."):
            rule["layers"] = "mtp"
        elif "{n}" in name:
            decoder = {layer for layer in self.where[template_of(hf)[0]] if layer < self.layers}
            if twin:
                rule["layers"] = self._set_of(held | {self.layers}, name)
            elif held != decoder:
                rule["layers"] = self._set_of(held, name)
        return rule

    def _sources(self, param: Mapped, sources: Mapping[str, str], name: str) -> Yaml | None:
        if set(sources) == {""}:
            if "word_embeddings" in name or name == "output_layer.weight":
                return {"rule": "pad", "hf": sources[""], "multiple": "vocab_multiple"}
            return {"rule": "rename", "hf": sources[""]}
        if set(sources) == set(_QKV) and param.mapping == "QKVMapping":
            self.used.update({"kv_heads", "head_dim"})
            self._use("head_dim")
            return {"rule": "qkv", **{role: sources[role] for role in _QKV}, "groups": "kv_heads", "head_dim": "head_dim"}
        if set(sources) == set(_GATED) and param.mapping == "GatedMLPMapping":
            return {"rule": "concat", "parts": [sources[role] for role in _GATED]}
        return None

    def _placed(self, name: str, rule: Yaml, *, has_mtp: bool) -> Yaml:
        """The rule with its pipeline stage, under its label; a tied or repeated embedding gives two."""
        label = self.known.labels.get((rule["rule"], name)) or _label(name)
        if "{n}" in name:
            return {label: rule}
        stage = "first" if name.startswith("embedding.") else "last"
        rule["place"] = {**rule.get("place", {}), "pp": f"own {stage}"}
        if not name.startswith("embedding.word_embeddings"):
            return {label: rule}
        found: Yaml = {label: rule}
        if has_mtp:  # the last stage holds a second embedding for it
            both = {**rule, "place": {**rule["place"], "pp": "own ends"}, "when": "trained_mtp > 0"}
            found = {label: {**rule, "when": "trained_mtp == 0"}, f"{label}_at_both_ends": both}
        if self.symbols.get("tied"):
            tie = {"rule": "tie", "hf": rule["hf"], "param": "output_layer.weight", "multiple": "vocab_multiple"}
            found["tied_head"] = {**tie, "place": {"tp": "split 0", "pp": "own last"}, "when": "tied and pp > 1"}
        return found

    def _spoken(self, rules: Yaml) -> set[str]:
        return {hf for rule in rules.values() for hf in _sources_of(rule)}


def _sources_of(rule: Yaml) -> Iterator[str]:
    for key in ("hf", *_QKV):
        if isinstance(rule.get(key), str):
            yield rule[key]
    yield from rule.get("parts", [])


def _label(param: str) -> str:
    words = [word for word in re.split(r"[.{}]+", param) if word and word not in ("decoder", "layers", "n", "i", "weight")]
    return "_".join(words[-2:])


def template_of(tensor: str) -> tuple[str, int | None]:
    """(HF name with {l} and {e}, its layer)."""
    layer = re.search(r"(?<=\.layers\.)\d+(?=\.)", tensor)
    name = re.sub(r"(?<=\.layers\.)\d+(?=\.)", "{l}", tensor, count=1)
    return re.sub(r"(?<=\.experts\.)\d+(?=\.)", "{e}", name), None if layer is None else int(layer[0])


def template_of_param(param: str) -> tuple[str, int | None]:
    """(mcore name with {n} and {i}, its layer) on a model of one stage."""
    layer = re.search(r"^(?:decoder|mtp)\.layers\.(\d+)\.", param)
    name = re.sub(r"^(decoder|mtp)\.layers\.\d+\.", r"\1.layers.{n}.", param)
    return re.sub(r"(\.experts\.linear_fc[12]\.(?:weight|bias))\d+$", r"\1{i}", name), None if layer is None else int(layer[1])
