"""A scheme as planning takes it, and back: plain data that travels with plan inputs, and the catalog that it makes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from pydantic import TypeAdapter

from weight_sync.errors import ConfigError
from weight_sync.layout.catalog import Catalog
from weight_sync.layout.emitted import SUFFIX, Emission, Part, quantised
from weight_sync.quant.published import Excludes
from weight_sync.quant.scheme import Scheme

_MADE: dict[object, Catalog] = {}


@dataclass(frozen=True, slots=True)
class Quantisation:
    """What a checkpoint is quantised with, and which of its modules are not."""

    scheme: Scheme
    excludes: Excludes

    def to_json(self) -> dict[str, Any]:
        excludes = TypeAdapter(Excludes).dump_python(self.excludes, mode="json")
        return {"scheme": json.loads(scheme_text(self.scheme)), "excludes": excludes}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Quantisation:
        return cls(TypeAdapter(Scheme).validate_python(data["scheme"]), TypeAdapter(Excludes).validate_python(data["excludes"]))

    def catalog(self, catalog: Catalog) -> Catalog:
        """The HF tensors of the engine's checkpoint, given those of the trainer's. Raises FamilyError, ConfigError.

        Both sides of a plan ask for the same one, so it is kept.
        """
        key = catalog.digest, json.dumps(self.to_json()), tuple(p.dtype for p in catalog.patterns)
        made = _MADE.get(key)
        if made is None:
            made = quantised(catalog, emission_of(self.scheme), self._quantises)
            _MADE.clear()
            _MADE[key] = made
        return made

    def _quantises(self, name: str) -> bool:
        return not self.excludes.excluded(name.removesuffix(SUFFIX))


def scheme_text(scheme: Scheme) -> str:
    return TypeAdapter(Scheme).dump_json(scheme).decode()


@lru_cache(maxsize=16)
def scheme_of(text: str) -> Scheme:
    """The scheme that a catalog carries (Catalog.scheme)."""
    return TypeAdapter(Scheme).validate_json(text)


def emission_of(scheme: Scheme) -> Emission:
    """Raises ConfigError for a scheme whose tensors do not stand for matrices of one name each (gpt-oss's stacked experts)."""
    parts: list[Part] = []
    for part in scheme.parts:
        if part.name == "shape":
            continue  # a constant of the engine's: no sync changes a weight's shape
        if part.suffix != SUFFIX or not part.becomes.startswith(SUFFIX):
            raise ConfigError(
                f"quantisation scheme {scheme.name}: its {part.name} turn *{part.suffix} into *{part.becomes}; planned are "
                f"tensors named *{SUFFIX} that become *{SUFFIX}<suffix>"
            )
        parts.append(Part(part.name, part.becomes.removeprefix(SUFFIX), part.dtype, part.block))
    return Emission(tuple(parts), scheme.group, scheme_text(scheme), scheme.fused)
