"""What can be wrong with a rule by itself, checked once before any rank is resolved.

Without these checks a slip in a YAML file (an axis this side does not have, a name without its layer index) would not fail:
it would give a layout that is quietly another one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from weight_sync.errors import FamilyError, listed
from weight_sync.ids import ITEMSIZE
from weight_sync.layout.catalog import Catalog, placeholders
from weight_sync.layout.expr import evaluate
from weight_sync.layout.placement import OWN_INDICES, Own, Replicate, Split
from weight_sync.layout.rules import ParamRule, Stack, Unstack, sources
from weight_sync.layout.values import CASTS, legal_casts


def check_rule(rule: ParamRule, where: str, catalog: Catalog, names: Mapping[str, int], axes: Collection[str]) -> None:
    """Raise FamilyError unless the rule can be resolved on a side that has these axes."""
    pattern = catalog.patterns[catalog.by_template[sources(rule)[0].hf]]
    experts = pattern.experts
    if isinstance(rule, Unstack):
        experts = _unstacked(rule, where, pattern.shape, pattern.experts, names)
    if isinstance(rule, Stack) and not experts:
        raise FamilyError(f"{where}: only tensors with {{e}} can be stacked, not {pattern.template}")
    if rule.dtype is not None and rule.dtype not in ITEMSIZE:
        raise FamilyError(f"{where}: unknown dtype {rule.dtype!r}; known: {', '.join(ITEMSIZE)}")
    if rule.value == "cast" and rule.dtype is None:
        raise FamilyError(f"{where}: value: cast needs a dtype to cast to")
    if rule.value == "cast" and rule.dtype != pattern.dtype and (pattern.dtype, rule.dtype) not in CASTS:
        raise FamilyError(
            f"{where}: {pattern.template} is {pattern.dtype}, which cannot be cast to {rule.dtype}; legal: {legal_casts()}"
        )
    _check_places(rule, where, axes, experts)
    _check_name(rule, where, layered=pattern.layers is not None, separate=bool(experts) and not isinstance(rule, Stack))


def _unstacked(rule: Unstack, where: str, shape: tuple[int, ...], experts: int, names: Mapping[str, int]) -> int:
    count = evaluate(rule.experts, names, where)
    if experts or not shape or shape[0] != count:
        raise FamilyError(
            f"{where}: {rule.hf} of shape {list(shape)} cannot be unstacked into {rule.experts} = {count} experts; "
            "its dim 0 must be the experts, and its name must not hold {e}"
        )
    return count


def _check_places(rule: ParamRule, where: str, axes: Collection[str], experts: int) -> None:
    owners: list[str] = []
    for axis, placement in rule.place.items():
        if axis not in axes:
            raise FamilyError(f"{where}: place.{axis}: this side has no axis {axis!r}; it has {', '.join(sorted(axes))}")
        if isinstance(placement, Replicate):
            continue
        if axis == "engine":
            raise FamilyError(f"{where}: place.engine: {placement}: every engine holds the whole model; legal: replicate")
        if axis == "pp":
            if isinstance(placement, Split) or placement == Own("e"):
                legal = ", ".join(f"own {index}" for index in OWN_INDICES if index != "e")
                raise FamilyError(f"{where}: place.pp: {placement}: stages hold tensors whole; legal: replicate, {legal}")
        elif isinstance(placement, Own):
            if placement != Own("e"):
                raise FamilyError(f"{where}: place.{axis}: {placement} is for pp only; legal: split DIM, replicate, own e")
            if not experts:
                raise FamilyError(f"{where}: place.{axis}: own e, but its tensors have no experts")
            owners.append(axis)
    if len(owners) > 1:
        raise FamilyError(f"{where}: experts are owned over {' and '.join(owners)}; only one axis can own them")


def _check_name(rule: ParamRule, where: str, *, layered: bool, separate: bool) -> None:
    """separate: the rule gives one parameter for each expert."""
    found = placeholders(rule.param)
    layer, expert = found & {"l", "n"}, found & {"e", "i"}
    if unknown := found - {"l", "n", "e", "i"}:
        raise FamilyError(f"{where}: param {rule.param!r}: unknown placeholder {listed(sorted(unknown))}; known: l, n, e, i")
    # A draft module holds one trailing layer under a name without number; two in one name are found when names are compared.
    if layered and not layer and rule.layers != "mtp":
        raise FamilyError(f"{where}: param {rule.param!r} has neither {{l}} nor {{n}}, but there is one for every layer")
    if layer and not layered:
        raise FamilyError(f"{where}: param {rule.param!r} has {{{min(layer)}}}, but its tensors have no layers")
    if separate and not expert:
        raise FamilyError(f"{where}: param {rule.param!r} has neither {{e}} nor {{i}}, but there is one for every expert")
    if expert and not separate:
        why = "all experts are stacked in it" if isinstance(rule, Stack) else "its tensors have no experts"
        raise FamilyError(f"{where}: param {rule.param!r} has {{{min(expert)}}}, but {why}")
