"""How one parallel axis treats one tensor: Split, Replicate or Own."""

from __future__ import annotations

import re
from dataclasses import dataclass

from weight_sync.errors import FamilyError, ParallelError


@dataclass(frozen=True, slots=True)
class Split:
    """The axis cuts dim `dim` into equal consecutive pieces.

    units: an expression for how many indivisible units (KV heads, say) lie along the dim. With fewer units than ranks each
    unit is held by ranks/units neighbouring ranks (the KV-head replication of SGLang's and vLLM's QKVParallelLinear).
    """

    dim: int
    units: str | None = None

    def __str__(self) -> str:
        return f"split {self.dim}" + (f" by {self.units}" if self.units else "")


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every rank of the axis holds the whole."""

    def __str__(self) -> str:
        return "replicate"


@dataclass(frozen=True, slots=True)
class Own:
    """Each rank of the axis holds some members whole: layers ("l"), experts ("e"), or one fixed rank ("first", "last").

    "ends" means the first and the last rank both hold it.
    """

    index: str

    def __str__(self) -> str:
        return f"own {self.index}"


Placement = Split | Replicate | Own

OWN_INDICES = ("l", "e", "first", "last", "ends")
_SPLIT = re.compile(r"split (\d)(?: by (.+))?")


def parse_placement(text: str, where: str) -> Placement:
    """`split 0`, `split 0 by kv_heads`, `replicate`, `own l|e|first|last|ends`."""
    text = text.strip()
    if match := _SPLIT.fullmatch(text):
        return Split(int(match[1]), match[2])
    if text == "replicate":
        return Replicate()
    if text.startswith("own ") and text[4:] in OWN_INDICES:
        return Own(text[4:])
    raise FamilyError(
        f"{where}: placement {text!r} is none of 'split DIM', 'split DIM by UNITS', 'replicate', "
        f"{', '.join(repr('own ' + index) for index in OWN_INDICES)}"
    )


def split_range(size: int, ranks: int, index: int, units: int | None, where: str) -> tuple[int, int]:
    """(offset, length) of piece `index` when `size` elements are cut over `ranks`, in whole `units` if given."""
    count = size if units is None else units
    if count < 1:
        raise ParallelError(f"{where}: there are {count} {'elements' if units is None else 'units'} to cut; legal: 1 or more")
    if size % count:
        raise ParallelError(f"{where}: {size} elements do not divide into {units} units")
    each = size // count
    if count >= ranks:
        if count % ranks:
            raise ParallelError(
                f"{where}: {count} {'elements' if units is None else 'units'} do not divide over {ranks} ranks; "
                f"legal sizes: {_divisors(count)}"
            )
        return index * (count // ranks) * each, (count // ranks) * each
    if units is None or ranks % count:
        raise ParallelError(
            f"{where}: {count} {'elements' if units is None else 'units'} over {ranks} ranks; legal sizes: "
            f"{_divisors(count)}" + ("" if units is None else f", or a multiple of {count} (each unit then replicated)")
        )
    return index // (ranks // count) * each, each


def _divisors(number: int) -> str:
    found = [n for n in range(1, min(number, 4096) + 1) if number % n == 0]
    return ", ".join(map(str, found[:16])) + (", ..." if len(found) > 16 else "")
