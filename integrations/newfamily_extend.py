"""A complete family rewritten as the difference to a shipped one, and proof that both say the same.

What counts is what a family resolves to, not how it is written: an extending family is taken only if its layouts are the
complete one's on several parallel layouts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from weight_sync.config import family_yaml, shipped_families
from weight_sync.errors import FamilyError, ParallelError
from weight_sync.layout.family import Model, apply, mcore_convention, merged, parse_family
from weight_sync.layout.parallel import TrainerDims
from weight_sync.layout.resolve import resolve
from weight_sync_integrations.newfamily_rules import Yaml, template_of_param

_LAYOUTS: tuple[dict[str, int], ...] = (
    {"ranks": 1},
    {"ranks": 2, "tp": 2, "etp": 2},
    {"ranks": 4, "tp": 2, "pp": 2, "ep": 2},
    {"ranks": 4, "pp": 2, "vpp": 2, "ep": 2},
)

Placed = dict[str, frozenset[str]]
"""mcore name template -> what its parameters are made of on every rank of every layout, as text."""


def merged_family(family: Yaml) -> dict[str, Any]:
    """A family given as data with everything it extends merged in. It must not have a shipped family's name if it extends."""
    return merged(family["name"], lambda name: family if name == family["name"] else family_yaml(name))


def placed(model: Model) -> Placed:
    """What the mcore rules of a model place where, on parallel layouts that divide its sizes."""
    found: dict[str, set[str]] = {}
    for sizes in _LAYOUTS:
        dims = TrainerDims(**sizes)
        try:
            layout = resolve(model, mcore_convention(model.family), dims, "trainer", vocab_multiple=128 * dims.tp)
        except ParallelError:
            continue
        for param in layout.params:
            found.setdefault(_template(param.name), set()).add(f"{sizes} {param}")
        for rank in range(dims.world):
            for shard in layout.rank_shards(rank):
                found.setdefault(_template(shard.param), set()).add(f"{sizes} {rank} {shard}")
    return {name: frozenset(lines) for name, lines in found.items()}


def _template(param: str) -> str:
    return template_of_param(re.sub(r"^vp\d+\.", "", param))[0]


def shorten(family: Yaml, config: Mapping[str, Any], bases: Sequence[str] | None = None) -> Yaml:
    """The shortest file that extends one shipped family and says what `family` says; `family` itself where there is none.

    config: the HF config it was proposed for, of a tiny model. bases: all shipped families by default.
    """
    model = apply(parse_family(family), config)
    want = placed(model)
    best = family
    for base in shipped_families() if bases is None else bases:
        try:
            child = _difference(family, model, want, base, config)
            if _length(child) < _length(best) and _same(child, model, want, config):
                best = child
        except FamilyError:
            continue  # this base cannot be applied to the config, or refuses it
    return best


def _same(child: Yaml, model: Model, want: Placed, config: Mapping[str, Any]) -> bool:
    said = apply(parse_family(merged_family(child)), config)
    return set(said.catalog.patterns) == set(model.catalog.patterns) and placed(said) == want


def _length(family: Yaml) -> int:
    return sum(len(value) if isinstance(value, Mapping) else 1 for value in family.values())


def _difference(family: Yaml, new: Model, want: Placed, base: str, config: Mapping[str, Any]) -> Yaml:
    theirs = family_yaml(base)
    architectures = {"architectures": family["architectures"]}
    old = apply(parse_family({**theirs, **architectures}), config)
    tied = any(rule["rule"] == "tie" for rule in theirs.get("mcore", {}).values())
    changes = {
        "refuse": {} if tied else _changed(family.get("refuse", {}), theirs.get("refuse", {})),
        **{
            section: _changed(family.get(section, {}), theirs.get(section, {}))
            for section in ("config", "defaults", "layer_sets", "mcore_defaults", "mcore_trailing")
        },
        "tensors": _tensors(family, old, new),
        "mcore": _rules(family, theirs, placed(old), want),
    }
    child: Yaml = {"name": family["name"], "extends": [base], **architectures}
    return child | {key: value for key, value in changes.items() if value}


def _changed(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> Yaml:
    return {key: value for key, value in mine.items() if theirs.get(key) != value}


def _tensors(family: Yaml, old: Model, new: Model) -> Yaml:
    before = {pattern.template: pattern for pattern in old.catalog.patterns}
    after = {pattern.template: pattern for pattern in new.catalog.patterns}
    found: Yaml = {name: family["tensors"][name] for name, pattern in after.items() if before.get(name) != pattern}
    return {**dict.fromkeys(sorted(before.keys() - after.keys())), **found}


def _rules(family: Yaml, theirs: Yaml, before: Placed, after: Placed) -> Yaml:
    """Rules to add, replace or remove. A parameter that both have is said under the base's label."""
    written: dict[str, list[str]] = {}  # mcore name -> labels in the base's file
    for label, rule in theirs.get("mcore", {}).items():
        written.setdefault(rule.get("param", label), []).append(label)
    found: Yaml = {}
    for param, labels in written.items():
        if param in before and param not in after:
            found |= dict.fromkeys(labels)
    for label, rule in family["mcore"].items():
        param = rule.get("param", label)
        labels = written.get(param, [])
        drops = {rule.get("layers") for rule in theirs.get("mcore", {}).values() if rule["rule"] == "drop"}
        if rule["rule"] == "drop" and rule.get("layers") in drops:
            continue  # whether the base's own applies to this model is seen when the result is compared
        if theirs.get("mcore", {}).get(label) == rule or (labels and param in after and before.get(param) == after[param]):
            continue
        # Several rules for one parameter (a tied head, say) keep the labels that both files gave them.
        found[label if label in labels or not labels else labels[0]] = rule
    return found
