"""Which rules of a side apply to a model, and that they speak of each of its tensors once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from weight_sync.errors import FamilyError, listed
from weight_sync.layout.expr import evaluate
from weight_sync.layout.family import Convention, Model, union
from weight_sync.layout.rules import Drop, ParamRule, sources


def active_rules(model: Model, convention: Convention, symbols: Mapping[str, int]) -> dict[str, ParamRule | Drop]:
    """The rules that apply to this model and these parallel sizes; every problem with them is an error.

    A rule speaks of HF templates by their exact text. It must match all of them or (engine files only, or tensors absent from
    this config) none. Every tensor must be spoken of, and by one non-tie rule only.
    """
    for label, refusal in convention.refuse.items():
        if _for(model, refusal.only_for) and evaluate(refusal.when, symbols, f"{convention.origin}, refuse {label}"):
            raise FamilyError(
                f"{convention.origin} is refused for family {model.family.name} ({refusal.when}): {refusal.reason}"
            )
    known = model.catalog.by_template
    active: dict[str, ParamRule | Drop] = {}
    spoken: dict[str, list[tuple[str, frozenset[int]]]] = {}
    for label, rule in _one_by_one(model, convention):
        where = f"{convention.origin}, rule {label}"
        if not _for(model, rule.only_for, rule.not_for) or (rule.when is not None and not evaluate(rule.when, symbols, where)):
            continue
        names = [part.hf for part in sources(rule)]
        missing = [name for name in names if name not in known]
        if len(missing) == len(names) and (convention.shared or all(name in model.absent for name in missing)):
            continue
        if missing:
            what = "matches nothing" if len(missing) == len(names) else "matches only some of its tensors"
            raise FamilyError(f"{where} {what}: the model has no {listed(missing)}; it has {listed(known, 40)}")
        chosen = rule_layers(model, rule, where)
        if chosen == ():
            continue
        active[label] = rule
        if rule.rule != "tie":
            for name in names:
                spoken.setdefault(name, []).append((label, frozenset(chosen if chosen is not None else (-1,))))
    for name, claims in spoken.items():
        for i, (label, layers) in enumerate(claims):
            for other, others in claims[i + 1 :]:
                if layers & others:
                    raise FamilyError(f"{convention.origin}: {name} is placed by two rules, {label} and {other}")
    left: list[str] = []
    for name, index in known.items():
        made = model.catalog.patterns[index].made
        if made is not None and made.base != name:
            continue  # follows the weight that it is made of
        wanted = model.catalog.patterns[index].layers
        covered = {layer for _, layers in spoken.get(name, []) for layer in layers}
        uncovered = sorted(set((-1,) if wanted is None else wanted) - covered)
        if uncovered:
            left.append(name if wanted is None or not covered else f"{name} in layers {listed(uncovered)}")
    if left:
        raise FamilyError(
            f"{convention.origin}: no rule for {listed(left)}; add one, or a drop rule with the reason why this side "
            "does not hold it"
        )
    return active


def _for(model: Model, only: tuple[str, ...], never: tuple[str, ...] = ()) -> bool:
    mine = set(model.family.architectures)
    return (not only or bool(mine & set(only))) and not mine & set(never)


def _one_by_one(model: Model, convention: Convention) -> Iterator[tuple[str, ParamRule | Drop]]:
    """All rules; a drop of whole layers becomes one drop for each template that has some of them."""
    for label, rule in convention.rules.items():
        if not isinstance(rule, Drop) or rule.hf is not None:
            yield label, rule
            continue
        where = f"{convention.origin}, rule {label}"
        if rule.layers is None:
            raise FamilyError(f"{where}: a drop names the tensor (hf) or the layers that are left out")
        chosen = set(union(rule.layers, model.layer_sets, where))
        for pattern in model.catalog.patterns:
            if chosen & set(pattern.layers or ()):
                yield f"{label} ({pattern.template})", rule.model_copy(update={"hf": pattern.template})


def rule_layers(model: Model, rule: ParamRule | Drop, where: str) -> tuple[int, ...] | None:
    """The global layers a rule applies to, or None for a rule without {l}.

    Trailing layers are never meant by a rule that does not name the layer set mtp.
    """
    patterns = [model.catalog.patterns[model.catalog.by_template[part.hf]] for part in sources(rule)]
    if len({(p.layers, p.experts, p.dtype) for p in patterns}) > 1:
        raise FamilyError(f"{where}: its tensors differ in layers, experts or dtype: {[p.template for p in patterns]}")
    layers = patterns[0].layers
    if layers is None:
        if rule.layers is None:
            return None
        raise FamilyError(f"{where}: layers: {rule.layers!r}, but its tensors have no {{l}}")
    chosen = set(union(rule.layers or "all", model.layer_sets, where))
    return tuple(layer for layer in layers if layer in chosen)
