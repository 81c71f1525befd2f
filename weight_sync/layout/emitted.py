"""What a quantised weight becomes: several tensors, each element of which stands for a block of the weight.

An engine's checkpoint holds values and scales where the trainer holds one weight W [N, K]. Whatever the scheme, element (i, j)
of such a tensor is made of W[i * n : (i + 1) * n, j * k : (j + 1) * k] for a block (n, k): (1, 1) for fp8 values, (1, 2) where
two values share a byte, (128, 128) for the scales of DeepSeek's fp8. So a box of W gives a box of each of them by division,
and whether a cut is legal is arithmetic, done here, before there is a plan.

Pure: the arithmetic of values is in weight_sync.quant.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import gcd

from weight_sync.errors import FamilyError, ParallelError, listed
from weight_sync.layout.box import Box
from weight_sync.layout.catalog import Catalog, Made, Pattern
from weight_sync.layout.pieces import Local, Piece

SUFFIX = ".weight"
"""Only HF tensors of two dims whose name ends so are ever quantised: those of linear layers."""


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor that a weight becomes.

    name: "values" and "scales", and what else a scheme has. suffix: put behind the weight's name, at the engine as in the
    checkpoint. block: see the module docstring; 0 is the whole dim. dtype: torch's name.
    """

    name: str
    suffix: str
    dtype: str
    block: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Emission:
    """A scheme as planning needs it. group: the block over which the largest magnitude is taken, 0: the whole dim.

    fused: last components of modules that share the largest magnitude of the whole weight, where a scheme has a scale of that.
    text: the scheme itself as JSON, for the ranks that carry it out; it is part of every digest of a plan.
    """

    parts: tuple[Part, ...]
    group: tuple[int, int]
    text: str
    fused: tuple[tuple[str, ...], ...] = ()


def quantised(catalog: Catalog, emission: Emission, chosen: Callable[[str], bool]) -> Catalog:
    """The catalog with what weights become.

    chosen: whether an HF name is quantised in the checkpoint. Experts of one layer must be alike. Raises FamilyError where they
    are not, or where nothing at all is quantised.
    """
    patterns: list[Pattern] = []
    added: list[Pattern] = []
    for p in catalog.patterns:
        layers = _layers(p, chosen)
        if layers is not None and not layers:
            patterns.append(p)
            continue
        shape = p.shape
        group = tuple(g or n for g, n in zip(emission.group, shape, strict=True))
        kept = p
        for part in emission.parts:
            block = tuple(b or n for b, n in zip(part.block, shape, strict=True))
            spans = tuple(g == 0 for g in emission.group)
            shares = _shared(catalog, p, emission.fused)
            made = Made(p.template, part.name, block, group, part.dtype, layers, shares, spans)
            if part.suffix:
                size = tuple(-(-n // b) for n, b in zip(shape, block, strict=True))
                added.append(Pattern(p.template + part.suffix, size, part.dtype, made.layers, p.experts, made))
            else:
                kept = replace(p, made=made)
        patterns.append(kept)
    if not added:
        raise FamilyError(
            "the quantisation scheme leaves every HF tensor of this model as it is; use weight_sync.quant.scheme=none"
        )
    return Catalog((*patterns, *added), emission.text)


def _shared(catalog: Catalog, p: Pattern, fused: tuple[tuple[str, ...], ...]) -> str:
    """The template of the first of those that a weight is fused with, "" where that is itself."""
    path = p.template.removesuffix(SUFFIX)
    parent, _, last = path.rpartition(".")
    for group in fused:
        if last in group:
            mates = [f"{parent}.{name}{SUFFIX}" for name in group]
            first = next(t for t in mates if t in catalog.by_template)
            mate = catalog.patterns[catalog.by_template[first]]
            if (mate.layers, mate.experts) != (p.layers, p.experts):
                raise FamilyError(f"{p.template} shares one scale with {first}, but they are not in the same layers")
            return "" if first == p.template else first
    return ""


def _layers(p: Pattern, chosen: Callable[[str], bool]) -> tuple[int, ...] | None:
    """Where a pattern is quantised: its layers, None for one without {l} that is, () for nowhere."""
    if len(p.shape) != 2 or not p.template.endswith(SUFFIX):
        return ()
    found: list[int] = []
    for layer in p.layers if p.layers is not None else (0,):
        names = list(p.names_in(layer))
        yes = [name for name in names if chosen(name)]
        if yes and len(yes) != len(names):
            no = next(name for name in names if name not in yes)
            raise FamilyError(f"experts of one layer differ: {yes[0]} is quantised, {no} is not, but engines stack them")
        if yes:
            found.append(layer)
    return None if p.layers is None and found else tuple(found)


@dataclass(frozen=True, slots=True)
class Emitter:
    """Makes a rule's local parameter into those of a part. catalog: with what weights become. where, side: for errors."""

    catalog: Catalog
    side: str
    by_base: dict[str, list[Pattern]] = field(init=False, default_factory=dict[str, list[Pattern]])

    def __post_init__(self) -> None:
        for p in self.catalog.patterns:
            if p.made is not None:
                self.by_base.setdefault(p.made.base, []).append(p)

    def parts(self, template: str) -> list[Pattern]:
        """What a weight is made into."""
        return self.by_base.get(template, [])

    def layers(self, templates: tuple[str, ...], where: str) -> tuple[int, ...] | None:
        """Layers in which a rule's tensors are quantised; None: those of tensors without layers, (): nowhere.

        Raises FamilyError for a fused parameter of which only some tensors are.
        """
        found = [self._made_in(t) for t in templates]
        if len(set(found)) > 1:
            differ = [t for t, layers in zip(templates, found, strict=True) if layers != found[0]]
            raise FamilyError(
                f"{where}: one parameter holds {listed(templates)}, but the checkpoint does not quantise "
                f"{listed(differ)} in the same layers as {templates[0]}"
            )
        return found[0]

    def _made_in(self, template: str) -> tuple[int, ...] | None:
        made = self.by_base[template][0].made if template in self.by_base else None
        return () if made is None else made.layers

    def local(self, local: Local, part: Pattern, axis: str, where: str) -> Local:
        """The parameter of a part, from the parameter that would hold the weights themselves.

        axis: "tp=4" and the like, for errors. Every block must lie whole in the shard, but for the last one of the tensor,
        which may be short. Raises ParallelError otherwise, with the numbers.
        """
        made = part.made
        assert made is not None
        if len(local.shape) != 2 or local.filling:
            raise FamilyError(
                f"{where}: {part.template}: a quantised parameter is not padded and has two dims, not {local.shape}"
            )
        width = local.shape[1]
        if any(p.strides != (width, 1) or p.box.shape[1] != width for p in local.pieces):
            raise FamilyError(f"{where}: {part.template} is quantised, but its parameter holds it transposed or side by side")
        rows = 0
        pieces: list[tuple[Box, str, int]] = []
        suffix = part.template.removeprefix(made.base)
        for piece in sorted(local.pieces, key=lambda p: p.start):
            shape = self.catalog.patterns[self.catalog.by_template[piece.template]].shape
            box = _divided(piece, shape, made, f"{where}: {self.side}: {piece.template}{suffix}, {axis}")
            pieces.append((box, piece.template + suffix, rows))
            rows += box.shape[0]
        columns = pieces[0][0].shape[1]
        placed = tuple(Piece(name, box, at * columns, (columns, 1)) for box, name, at in pieces)
        return Local((rows, columns), placed)


def _divided(piece: Piece, shape: tuple[int, ...], made: Made, where: str) -> Box:
    """A box of the weight in blocks. Where groups span a dim by their scheme, every shard of it holds their scales."""
    offset: list[int] = []
    size: list[int] = []
    for d, (low, length, whole) in enumerate(zip(piece.box.offset, piece.box.shape, shape, strict=True)):
        high = low + length
        for name, block in (("block", made.block[d]), ("group", made.group[d])):
            if made.spans[d] and block >= whole:
                continue
            if low % block or (high % block and high != whole):
                raise ParallelError(
                    f"{where}: rows or columns {low} to {high} of dim {d} (size {whole}) do not lie on the edges of "
                    f"{made.part}' {name}s of {block}{_legal(whole, block)}"
                )
        block = made.block[d]
        offset.append(low // block)
        size.append(-(-high // block) - low // block)
    return Box(tuple(offset), tuple(size))


def _legal(whole: int, block: int) -> str:
    """Into how many equal shards a dim can be cut so that every cut is a block's edge."""
    blocks, rest = divmod(whole, block)
    if rest:
        return f"; {whole} is not a multiple of {block}, so it cannot be cut: legal sizes: 1"
    legal = [n for n in range(1, min(blocks, 4096) + 1) if blocks % n == 0 and gcd(n, blocks) == n]
    return f"; a multiple of {block} is needed on every rank: legal sizes of the axis: {listed(legal, 16)}"
