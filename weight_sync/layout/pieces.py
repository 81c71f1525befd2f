"""One rule on one rank: which box of which HF tensor lies where in the local parameter.

Layers and experts are left out here (resolve fills them in): everything speaks of one layer and one expert.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from weight_sync.errors import FamilyError
from weight_sync.layout.box import Box, row_major
from weight_sync.layout.catalog import Catalog
from weight_sync.layout.expr import ceil_to, evaluate
from weight_sync.layout.placement import Split, split_range
from weight_sync.layout.rules import Concat, Pad, ParamRule, Part, Qkv, Stack, Tie, Transpose, Unstack


@dataclass(frozen=True, slots=True)
class Piece:
    """A shard without its layer and expert: template, box, start and strides in the local parameter (elements)."""

    template: str
    box: Box
    start: int
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Local:
    """The local parameter's shape (without a stacked expert dim), its pieces, and how many elements no piece covers."""

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    filling: int = 0


@dataclass(frozen=True, slots=True)
class Cutter:
    """What cutting needs to know of a side. names: sizes and symbols. sizes: of every axis. side, where: for errors."""

    catalog: Catalog
    names: Mapping[str, int]
    sizes: Mapping[str, int]
    side: str

    def local(self, rule: ParamRule, coords: Mapping[str, int], where: str) -> Local:
        match rule:
            case Concat(parts=parts, dim=dim):
                return self._joined(rule, parts, dim, coords, where)
            case Stack(parts=parts, transpose=flip):
                joined = self._joined(rule, parts, 0, coords, where)
                return _flipped(joined, where) if flip else joined
            case Transpose():
                return _flipped(self._joined(rule, (Part(hf=rule.hf),), 0, coords, where), where)
            case Qkv():
                return self._qkv(rule, coords, where)
            case Pad(hf=hf, multiple=multiple) | Tie(hf=hf, multiple=multiple) if multiple is not None:
                return self._padded(rule, hf, multiple, coords, where)
            case Unstack():
                box = self._cut(rule, rule.hf, self._shape(rule.hf), coords, where)
                if box.shape[0] != self._shape(rule.hf)[0]:
                    raise FamilyError(f"{where}: the expert dim of {rule.hf} is owned, not split")
                one = Box((0, *box.offset[1:]), (1, *box.shape[1:]))
                return Local(one.shape[1:], (Piece(rule.hf, one, 0, (0, *row_major(one.shape[1:]))),))
            case _:
                return self._joined(rule, (Part(hf=rule.hf),), 0, coords, where)

    def _shape(self, template: str) -> tuple[int, ...]:
        return self.catalog.patterns[self.catalog.by_template[template]].shape

    def _cut(
        self,
        rule: ParamRule,
        template: str,
        shape: tuple[int, ...],
        coords: Mapping[str, int],
        where: str,
        units: tuple[int, str] | None = None,
    ) -> Box:
        """The box of one HF tensor (or of a stand-in shape) that this rank holds, over all splitting axes.

        units: (dim, expression) that overrides the placement's own units along that dim.
        """
        offset, size = [0] * len(shape), list(shape)
        unit = [0] * len(shape)  # elements of one unit, once a dim was cut in units
        for axis, placement in rule.place.items():
            if not isinstance(placement, Split):
                continue
            dim = placement.dim
            if dim >= len(shape):
                if len(shape) == 1 and dim == 1:
                    continue  # the bias of a row-parallel weight is whole on every rank
                raise FamilyError(f"{where}: {template} has {len(shape)} dims, {axis} splits dim {dim}")
            text = units[1] if units is not None and units[0] == dim else placement.units
            place = f"{where}: {self.side}: {template} (shape {list(shape)}) dim {dim} over {axis}={self.sizes[axis]}"
            count = None if text is None else evaluate(text, self.names, where)
            if count is not None and unit[dim]:  # a second axis cuts what the first one left
                count = size[dim] // unit[dim]
            low, length = split_range(size[dim], self.sizes[axis], coords[axis], count, place)
            if count is not None:
                unit[dim] = size[dim] // count
            offset[dim] += low
            size[dim] = length
        return Box(tuple(offset), tuple(size))

    def _joined(self, rule: ParamRule, parts: tuple[Part, ...], dim: int, coords: Mapping[str, int], where: str) -> Local:
        boxes = [
            self._cut(rule, p.hf, self._shape(p.hf), coords, where, None if p.units is None else (dim, p.units)) for p in parts
        ]
        shape = list(boxes[0].shape)
        if len(parts) > 1 and dim >= len(shape):
            raise FamilyError(f"{where}: cannot join along dim {dim}: {parts[0].hf} has {len(shape)} dims")
        if len({(len(box.shape), box.shape[:dim], box.shape[dim + 1 :]) for box in boxes}) > 1:
            raise FamilyError(
                f"{where}: cannot join {[f'{p.hf} {b}' for p, b in zip(parts, boxes, strict=True)]} along dim {dim}"
            )
        if len(parts) > 1:
            shape[dim] = sum(box.shape[dim] for box in boxes)
        strides = row_major(shape)
        pieces: list[Piece] = []
        at = 0
        for part, box in zip(parts, boxes, strict=True):
            pieces.append(Piece(part.hf, box, at * strides[dim] if at else 0, strides))
            at += box.shape[dim] if len(parts) > 1 else 0
        return Local(tuple(shape), tuple(pieces))

    def _padded(self, rule: ParamRule, hf: str, text: str | int, coords: Mapping[str, int], where: str) -> Local:
        shape = self._shape(hf)
        multiple = evaluate(text, self.names, where)
        if multiple < 1 or not shape:
            raise FamilyError(f"{where}: cannot pad {hf} of shape {list(shape)} to a multiple of {multiple}")
        box = self._cut(
            rule, f"{hf}, padded to a multiple of {multiple},", (ceil_to(shape[0], multiple), *shape[1:]), coords, where
        )
        real = box.intersect(Box.full(shape))
        if real is None:
            return Local(box.shape, (), box.volume)
        return Local(box.shape, (Piece(hf, real, 0, row_major(box.shape)),), box.volume - real.volume)

    def _qkv(self, rule: Qkv, coords: Mapping[str, int], where: str) -> Local:
        groups, head = evaluate(rule.groups, self.names, where), evaluate(rule.head_dim, self.names, where)
        q, k, v = (self._shape(name) for name in (rule.q, rule.k, rule.v))
        fits = groups > 0 and head > 0 and q and q[0] % (groups * head) == 0 and k[:1] == v[:1] == (groups * head,)
        if not fits or not q[1:] == k[1:] == v[1:]:
            raise FamilyError(f"{where}: shapes q {q}, k {k}, v {v} do not fit {groups} KV groups of head_dim {head}")
        heads = q[0] // groups
        total = (q[0] + k[0] + v[0], *q[1:])
        box = self._cut(rule, f"{rule.q} + k + v", total, coords, where)
        low, high = box.offset[0], box.offset[0] + box.shape[0]
        strides = row_major(box.shape)
        pieces: list[Piece] = []
        for group in range(groups):
            at = group * (heads + 2 * head)
            runs = ((rule.q, group * heads, heads), (rule.k, group * head, head), (rule.v, group * head, head))
            for template, row, count in runs:
                a, b = max(at, low), min(at + count, high)
                if a < b:
                    piece = Box((row + a - at, *box.offset[1:]), (b - a, *box.shape[1:]))
                    pieces.append(Piece(template, piece, (a - low) * strides[0], strides))
                at += count
        return Local(box.shape, tuple(pieces))


def _flipped(local: Local, where: str) -> Local:
    """The same pieces in a parameter whose two dims are exchanged. Pieces were joined along dim 0."""
    if len(local.shape) != 2:
        raise FamilyError(f"{where}: only matrices can be transposed, not {local.pieces[0].template} {list(local.shape)}")
    rows, columns = local.shape
    pieces = tuple(Piece(p.template, p.box, p.start // columns, (1, rows)) for p in local.pieces)
    return Local((columns, rows), pieces)
