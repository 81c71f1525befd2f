"""The closed set of rules that say which boxes of which HF tensors make up one physical parameter.

A rule is read in both directions: forwards it says what the trainer's (or engine's) parameter is made of, and because every
rule only places boxes, reading the boxes backwards recovers the HF tensors (tests prove the round trip for every rule).

Templates may hold {l} (global layer), {n} (layer counted from 0 on each pipeline stage and chunk, as Megatron-Core does),
{e} (global expert) and {i} (expert counted from 0 on each expert-parallel rank).
"""

from __future__ import annotations

from typing import Annotated, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, field_validator

from weight_sync.errors import FamilyError
from weight_sync.layout.placement import Placement, parse_placement
from weight_sync.layout.values import problem


class Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, arbitrary_types_allowed=True)


class Part(Frozen):
    """One HF tensor inside a fused parameter. units: as in Split, overriding the rule's placement for this part only."""

    hf: str
    units: str | None = None


class _Rule(Frozen):
    param: str
    """The physical parameter's name template."""
    place: dict[str, Placement] = Field(default_factory=dict)
    """Axis -> placement. Axes left out replicate, except that a template with {l} owns layers over pp."""
    when: str | None = None
    """An expression over sizes and parallel sizes; the rule is absent when it is false."""
    layers: str | None = None
    """Layer sets of the family, joined by " + "; the rule then applies to those layers only (a norm that sparse layers keep
    elsewhere). Without it a rule means all decoder layers, never trailing ones: those go by the name mtp."""
    dtype: str | None = None
    """The parameter's dtype on this side where it is not the model's (an fp32 router bias, say)."""
    value: str | None = None
    """What makes the parameter's values of the HF tensor's where its bytes are not simply placed: a name of the closed set in
    weight_sync.layout.values. cast: the tensor's dtype is converted to `dtype`. Such tensors are listed by computed_names."""
    only_for: tuple[str, ...] = ()
    """HF architectures (model classes of an engine) that alone have this rule."""
    not_for: tuple[str, ...] = ()
    """HF architectures that do not have this rule."""

    @field_validator("value")
    @classmethod
    def _known_value(cls, value: str | None) -> str | None:
        if value is not None and (reason := problem(value)):
            raise ValueError(reason)
        return value

    @field_validator("place", mode="before")
    @classmethod
    def _parse_place(cls, value: object) -> object:
        if not isinstance(value, dict):
            return value
        try:
            return {
                axis: parse_placement(item, f"place.{axis}") if isinstance(item, str) else item
                for axis, item in cast("dict[str, object]", value).items()
            }
        except FamilyError as error:  # as a ValueError it is reported with the family and rule it stands in
            raise ValueError(str(error)) from None


class Rename(_Rule):
    """One HF tensor, element for element."""

    rule: Literal["rename"]
    hf: str


class Tie(_Rule):
    """A second parameter that holds the same HF tensor as another one (a tied head on its own pipeline stage).

    multiple: padding as in Pad, where the copy is padded like the original.
    """

    rule: Literal["tie"]
    hf: str
    multiple: str | int | None = None


class Pad(_Rule):
    """One HF tensor whose dim 0 is filled up to a multiple before it is cut; the filling is never written."""

    rule: Literal["pad"]
    hf: str
    multiple: str | int


class Transpose(_Rule):
    """One HF matrix, stored with its two dims exchanged. Placements speak of the HF tensor's dims."""

    rule: Literal["transpose"]
    hf: str


class Concat(_Rule):
    """Several HF tensors: each is cut by itself, then the pieces are laid one after another along `dim`."""

    rule: Literal["concat"]
    parts: tuple[Part, ...]
    dim: int = 0

    @field_validator("parts", mode="before")
    @classmethod
    def _plain_names(cls, value: object) -> object:
        return _as_parts(value)


class Qkv(_Rule):
    """Megatron-Core's interleaved QKV: for each KV group its query heads, its key head, its value head; then cut.

    The cut may fall inside a group. Works for weights [rows, hidden] and for biases [rows].
    """

    rule: Literal["qkv"]
    q: str
    k: str
    v: str
    groups: str
    head_dim: str


class Stack(_Rule):
    """Per-expert HF tensors ({e}) laid behind each other in a leading expert dim; several parts join along dim 1."""

    rule: Literal["stack"]
    parts: tuple[Part, ...]
    transpose: bool = False

    @field_validator("parts", mode="before")
    @classmethod
    def _plain_names(cls, value: object) -> object:
        return _as_parts(value)


class Unstack(_Rule):
    """One HF tensor with a leading expert dim whose slices are separate parameters ({e} or {i} in the template)."""

    rule: Literal["unstack"]
    hf: str
    experts: str


class Drop(Frozen):
    """HF tensors that this side does not hold, with the reason. Anything not held and not dropped is an error.

    Without hf, everything in `layers` is left out (a draft layer that is served by nobody).
    """

    rule: Literal["drop"]
    hf: str | None = None
    reason: str = Field(min_length=1)
    when: str | None = None
    layers: str | None = None
    only_for: tuple[str, ...] = ()
    not_for: tuple[str, ...] = ()


def _as_parts(value: object) -> object:
    if not isinstance(value, tuple):
        return value
    return tuple({"hf": item} if isinstance(item, str) else item for item in cast("tuple[object, ...]", value))


ParamRule = Rename | Tie | Pad | Transpose | Concat | Qkv | Stack | Unstack
Rule = Annotated[ParamRule | Drop, Field(discriminator="rule")]


def sources(rule: ParamRule | Drop) -> tuple[Part, ...]:
    """The HF name templates a rule speaks of, in the order it lays them out."""
    match rule:
        case Concat(parts=parts) | Stack(parts=parts):
            return parts
        case Qkv(q=q, k=k, v=v):
            return (Part(hf=q), Part(hf=k), Part(hf=v))
        case Drop(hf=None):
            return ()
        case _:
            return (Part(hf=str(rule.hf)),)
