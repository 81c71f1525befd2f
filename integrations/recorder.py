"""The second witness: what an engine's own load_weights writes where, found by watching it instead of by declaration.

The HF tensors are fed to load_weights as `meta` tensors: they have shapes but no values, and every view of one keeps
its storage, offset and strides, which is its provenance. A dispatch mode sees each operation. A copy into a live
parameter is written down as boxes of the HF tensor and their place in the parameter, and is *not* carried out; so are
fills. Whatever else the loader changes (flags on parameters, attributes of modules, rebound tensors) is put back at
the end. The method was tried on SGLang; nothing here knows an engine, only torch.

Copies that are not a plain placement of bytes (casts, dequantisation, values computed from HF tensors) are listed by
name in Recording.inexpressible, never guessed. Recording needs no memory beyond bookkeeping and is single-threaded:
run it on the thread that owns the model.
"""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from weight_sync.errors import BindError
from weight_sync.layout.values import cast_text
from weight_sync_integrations.recorder_boxes import (
    Box,
    Dim,
    Ints,
    NotBoxes,
    boxes_of_view,
    contiguous_strides,
    intersect,
    volume,
)
from weight_sync_integrations.recorder_state import unchanged

Spec = torch.Tensor | tuple[Sequence[int], torch.dtype]
aten = torch.ops.aten


@dataclass(slots=True)
class Recording:
    """What one run of load_weights does to one process. Plain data throughout; offsets, starts, strides in elements.

    shards: {"tensor", "offset", "shape", "param", "start", "strides"}: the box (offset, shape) of the HF tensor; its
        coordinate i goes to element start + sum((i[d] - offset[d]) * strides[d]) of the parameter. With "operation" where the
        value is cast on the way: it is then in inexpressible too.
    constants: {"param", "start", "shape", "strides", "value"}: regions filled with one value, such as vocab padding.
    inexpressible: {"tensor", "param", "operation"}: writes that are not a placement of an HF tensor's bytes.
    uncovered: elements that no shard or constant writes, by parameter. rewritten: elements written again, by parameter.
    unread: HF tensors that nothing was copied from, in the order they were fed.
    derived: tensors that are no parameter, into which the loader copied what it had computed from live parameters (SGLang's
        absorbed MLA matrices, once they exist). No HF tensor goes there; a sync has to have them computed anew.
    """

    shards: list[dict[str, Any]] = field(default_factory=list)
    constants: list[dict[str, Any]] = field(default_factory=list)
    inexpressible: list[dict[str, Any]] = field(default_factory=list)
    uncovered: dict[str, int] = field(default_factory=dict)
    rewritten: dict[str, int] = field(default_factory=dict)
    unread: list[str] = field(default_factory=list)
    derived: list[str] = field(default_factory=list)


def record(
    model: torch.nn.Module,
    tensors: Mapping[str, Spec],
    load: Callable[[Iterator[tuple[str, torch.Tensor]]], object],
) -> Recording:
    """Run `load` (usually model.load_weights) on shadows of `tensors` and write down what it copies where.

    Args:
        model: the live model, on any device. Not a byte of it, nor an attribute, is different afterwards.
        tensors: HF name -> a tensor (only shape and dtype are read) or (shape, dtype).
        load: called once with an iterator of (HF name, meta tensor).
    Raises: BindError when `load` fails, naming the HF tensor it was working on.
    """
    shadows = {name: _shadow(spec) for name, spec in tensors.items()}
    feed = _Feed(shadows)
    with unchanged(model) as state, run_inline():
        mode = _Recorder(shadows, state.named_tensors, state.protected)
        try:
            with torch.no_grad(), mode:
                load(iter(feed))
        except Exception as error:
            raise BindError(
                f"the engine's load_weights could not be recorded: {type(error).__name__}: {error}; "
                f"it was working on HF tensor {feed.current or '(none yet)'} of {len(shadows)}"
            ) from error
        for name in state.rebound():
            mode.note(None, name, "the parameter was replaced by another tensor")
    return mode.finish()


def _shadow(spec: Spec) -> torch.Tensor:
    shape, dtype = (spec.shape, spec.dtype) if isinstance(spec, torch.Tensor) else spec
    return torch.empty(tuple(shape), dtype=dtype, device="meta")


class _Feed:
    """Hands out the shadows and remembers which one is being loaded, for the error message."""

    def __init__(self, shadows: Mapping[str, torch.Tensor]) -> None:
        self.shadows = shadows
        self.current = ""

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self.shadows.items():
            self.current = name
            yield name, tensor


@contextmanager
def run_inline() -> Iterator[None]:
    """Work that this thread hands to thread pools runs here and now: a dispatch mode does not reach other threads."""
    pool = concurrent.futures.ThreadPoolExecutor
    original = pool.submit
    recording_thread = threading.get_ident()

    def submit(self: Any, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> concurrent.futures.Future[Any]:
        if threading.get_ident() != recording_thread:
            return original(self, fn, *args, **kwargs)
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 - it reaches the caller through the future, as from a real pool
            future.set_exception(error)
        return future

    pool.submit = submit  # type: ignore[method-assign]
    try:
        yield
    finally:
        pool.submit = original  # type: ignore[method-assign]


@dataclass(frozen=True, slots=True)
class _Piece:
    """A box of some tracked tensor, and where its elements come from: strides are HF elements per step of each axis."""

    offset: Ints
    shape: Ints
    tensor: str
    start: int
    strides: Ints


@dataclass(slots=True)
class _Origin:
    """Provenance of one storage, whose elements in memory order are a contiguous tensor of `shape`.

    pieces: where its values come from. blend: set when values were computed: the operation and the HF names in it.
    """

    shape: Ints
    dtype: torch.dtype
    pieces: list[_Piece]
    blend: tuple[str, tuple[str, ...]] | None = None

    def names(self) -> tuple[str, ...]:
        return self.blend[1] if self.blend else tuple(dict.fromkeys(piece.tensor for piece in self.pieces))


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


class _Recorder(TorchDispatchMode):
    def __init__(
        self, shadows: Mapping[str, torch.Tensor], live: Mapping[str, torch.Tensor], protected: Mapping[int, str]
    ) -> None:
        super().__init__()
        self.shapes = {name: tuple(tensor.shape) for name, tensor in shadows.items()}
        self.origins: dict[int, _Origin] = {}
        self.alive: list[torch.Tensor] = []  # a storage that is freed would lend its identity to the next one
        for name, tensor in shadows.items():
            shape = tuple(tensor.shape)
            whole = _Piece((0,) * len(shape), shape, name, 0, contiguous_strides(shape))
            self._track(tensor, _Origin(shape, tensor.dtype, [whole]))
        self.live = dict(live)
        self.by_storage: dict[int, list[str]] = {}
        for name, tensor in live.items():
            self.by_storage.setdefault(_key(tensor), []).append(name)
        self.protected = dict(protected)
        self.written: dict[tuple[str, int, Ints, Ints], list[dict[str, Any]]] = {}
        self.rewritten: dict[str, int] = {}
        self.result = Recording()

    # -- dispatch --------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        written = _written_arguments(func, args, kwargs)
        if any(_key(tensor) in self.protected for tensor in written):
            return self._swallow(func, args, kwargs, written)
        sources = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        tracked = [tensor for tensor in sources if _key(tensor) in self.origins]
        if not tracked:
            return func(*args, **kwargs)
        if written:
            return self._write_scratch(func, args, kwargs, written[0])
        if func is aten._to_copy.default:
            # Moving a shadow to the parameter's device would need its values: it stays on meta.
            kwargs = {**kwargs, "device": torch.device("meta")}
        out = func(*args, **kwargs)
        for tensor in (leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)):
            if _key(tensor) not in self.origins:
                self._track(tensor, self._derive(func, args, kwargs, tensor, tracked))
        return out

    def _track(self, tensor: torch.Tensor, origin: _Origin) -> None:
        self.origins[_key(tensor)] = origin
        self.alive.append(tensor)

    def _derive(self, func: Any, args: Any, kwargs: Any, out: torch.Tensor, tracked: list[torch.Tensor]) -> _Origin:
        """Provenance of a new tensor: rearranged where the operation only moves values, blended otherwise."""
        names = tuple(dict.fromkeys(name for tensor in tracked for name in self.origins[_key(tensor)].names()))
        cast = cast_text(*(str(t.dtype).removeprefix("torch.") for t in (tracked[0], out)))
        blend = (cast if func is aten._to_copy.default else str(func), names)
        base = _dense_shape(out)
        parts = _parts(func, args, kwargs, out)
        if parts is None or base is None:
            return _Origin(tuple(out.shape), out.dtype, [], blend)
        origin = _Origin(base, out.dtype, [])
        for source, start in parts:
            if not self._lay(origin, source, start):
                origin.blend = blend
                break
        return origin

    def _lay(self, origin: _Origin, source: torch.Tensor, target: torch.Tensor) -> bool:
        """Add to `origin` that `target` (a view of its tensor) holds `source`. False where that is not a placement."""
        found = self.origins.get(_key(source))
        if found is None:
            return True  # values from elsewhere, such as zero padding: no piece covers them
        if found.blend or found.dtype != source.dtype or source.dtype != origin.dtype:
            return False
        try:
            for box, piece in self._pieces(found, source, target.storage_offset(), target.stride()):
                flat = boxes_of_view(
                    origin.shape,
                    box.start,
                    [Dim(n, t, s) for n, t, s in zip(box.shape, box.strides, piece.strides, strict=True)],
                    piece.start,
                )
                origin.pieces += [_Piece(b.offset, b.shape, piece.tensor, b.start, b.strides) for b in flat]
        except NotBoxes:
            return False
        return True

    def _pieces(
        self, origin: _Origin, source: torch.Tensor, start: int, strides: Sequence[int]
    ) -> Iterator[tuple[Box, _Piece]]:
        """For each part of `source` with one provenance: its place in the destination and its place in the HF tensor."""
        dims = [Dim(n, s, t) for n, s, t in zip(source.shape, source.stride(), strides, strict=True)]
        for box in boxes_of_view(origin.shape, source.storage_offset(), dims, start):
            for piece in origin.pieces:
                common = intersect(box.offset, box.shape, piece.offset, piece.shape)
                if common is None:
                    continue
                offset, shape = common
                into = box.start + sum((o - b) * s for o, b, s in zip(offset, box.offset, box.strides, strict=True))
                out_of = piece.start + sum((o - p) * s for o, p, s in zip(offset, piece.offset, piece.strides, strict=True))
                yield (
                    Box(offset, shape, into, box.strides),
                    _Piece(offset, shape, piece.tensor, out_of, piece.strides),
                )

    def _write_scratch(self, func: Any, args: Any, kwargs: Any, target: torch.Tensor) -> Any:
        """A write of HF values into a tensor of the loader's own, which is on meta or becomes so only in our books."""
        origin = self.origins.get(_key(target))
        if origin is None:
            # Its creation was not seen, so its shape is unknown and its storage is taken as one line of elements.
            line = target.untyped_storage().nbytes() // target.element_size()
            origin = _Origin((line,), target.dtype, [])
            self._track(target, origin)
        source = args[1] if func is aten.copy_.default and len(args) > 1 else None
        if source is None or origin.blend or not self._lay(origin, source.expand(target.shape), target):
            names = [n for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) for n in self._names(t)]
            origin.blend = (str(func), tuple(dict.fromkeys(names)))
        return target

    def _names(self, tensor: torch.Tensor) -> tuple[str, ...]:
        found = self.origins.get(_key(tensor))
        return found.names() if found else ()

    # -- writes into the live model --------------------------------------------------------------------------------

    def _swallow(self, func: Any, args: Any, kwargs: Any, written: list[torch.Tensor]) -> Any:
        target = written[0]
        if all(tensor.numel() == 0 for tensor in written):
            return target if len(written) == 1 else tuple(written)
        param = self._param_of(target)
        if target.numel() == 0:
            pass  # vLLM fills the vocabulary's padding rows also where there are none; such a view may start past the end
        elif param is None:
            self._beside(self.protected[_key(target)], func, args, kwargs)
        elif func is aten.copy_.default:
            self._copy(param, target, args[1])
        elif func in (aten.fill_.Scalar, aten.fill_.Tensor, aten.zero_.default):
            self._fill(param, target, args[1] if len(args) > 1 else 0)
        else:
            names = [n for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) for n in self._names(t)]
            for name in dict.fromkeys(names) or [None]:
                self.note(name, param, str(func))
        return target if len(written) == 1 else tuple(written)

    def _beside(self, name: str, func: Any, args: Any, kwargs: Any) -> None:
        """A write into a tensor that is no parameter."""
        fed = any(_key(leaf) in self.origins for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
        if func is not aten.copy_.default or fed:
            self.note(None, name, str(func))
        elif name not in self.result.derived:
            self.result.derived.append(name)

    def _param_of(self, target: torch.Tensor) -> str | None:
        """The parameter whose memory the view `target` starts in, where both have one dtype."""
        for name in self.by_storage.get(_key(target), ()):
            tensor = self.live[name]
            first = tensor.storage_offset()
            last = first + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
            if tensor.dtype == target.dtype and first <= target.storage_offset() <= last:
                return name
        return None

    def _copy(self, param: str, target: torch.Tensor, source: torch.Tensor) -> None:
        origin = self.origins.get(_key(source))
        if origin is None:
            self.note(None, param, "copy of values that come from no HF tensor")
            return
        if origin.blend or origin.dtype != source.dtype:
            for name in origin.names():
                self.note(name, param, origin.blend[0] if origin.blend else f"{origin.dtype} read as {source.dtype}")
            return
        cast = cast_text(*(str(t.dtype).removeprefix("torch.") for t in (source, target)))
        if source.dtype != target.dtype:  # no placement of bytes, but still one of values: whether it is declared is not for us
            for name in origin.names():
                self.note(name, param, cast)
        start = target.storage_offset() - self.live[param].storage_offset()
        try:
            placed = list(self._pieces(origin, source.expand(target.shape), start, target.stride()))
            shards = [shard for box, piece in placed for shard in self._shards(param, box, piece)]
        except NotBoxes as error:
            for name in origin.names():
                self.note(name, param, str(error))
            return
        if source.dtype != target.dtype:
            shards = [{**shard, "operation": cast} for shard in shards]
        missing = target.numel() - sum(volume(box.shape) for box, _ in placed)
        if missing:
            self.note(None, param, f"{missing} elements of a composed tensor come from no HF tensor (padding?)")
        self._remember(param, start, target, shards)

    def _shards(self, param: str, box: Box, piece: _Piece) -> Iterator[dict[str, Any]]:
        dims = [Dim(n, s, t) for n, s, t in zip(piece.shape, piece.strides, box.strides, strict=True)]
        for part in boxes_of_view(self.shapes[piece.tensor], piece.start, dims, box.start):
            yield {
                "tensor": piece.tensor,
                "offset": list(part.offset),
                "shape": list(part.shape),
                "param": param,
                "start": part.start,
                "strides": list(part.strides),
            }

    def _fill(self, param: str, target: torch.Tensor, value: Any) -> None:
        start = target.storage_offset() - self.live[param].storage_offset()
        region = {
            "param": param,
            "start": start,
            "shape": list(target.shape),
            "strides": list(target.stride()),
            "value": float(value),
        }
        self._remember(param, start, target, [region])

    def _remember(self, param: str, start: int, target: torch.Tensor, entries: list[dict[str, Any]]) -> None:
        region = (param, start, tuple(target.shape), tuple(target.stride()))
        if region in self.written:
            self.rewritten[param] = self.rewritten.get(param, 0) + target.numel()
        self.written.pop(region, None)  # the last write to a region is the one that counts
        self.written[region] = entries

    def note(self, tensor: str | None, param: str, operation: str) -> None:
        entry = {"tensor": tensor, "param": param, "operation": operation}
        if entry not in self.result.inexpressible:
            self.result.inexpressible.append(entry)

    def finish(self) -> Recording:
        counts = dict.fromkeys(self.live, 0)
        for entries in self.written.values():
            for entry in entries:
                (self.result.shards if "tensor" in entry else self.result.constants).append(entry)
                counts[entry["param"]] += volume(entry["shape"])
        sizes = {name: tensor.numel() for name, tensor in self.live.items()}
        used = {shard["tensor"] for shard in self.result.shards} | {e["tensor"] for e in self.result.inexpressible}
        self.result.uncovered = {name: sizes[name] - n for name, n in counts.items() if n < sizes[name]}
        for name, n in counts.items():
            again = self.rewritten.get(name, 0) + max(0, n - sizes[name])
            if again:
                self.result.rewritten[name] = again
        self.result.unread = [name for name in self.shapes if name not in used]
        return self.result


def _written_arguments(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors that the operator's schema says it writes."""
    found: list[torch.Tensor] = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        found += [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return found


def _parts(func: Any, args: Any, kwargs: Any, out: torch.Tensor) -> Iterable[tuple[torch.Tensor, torch.Tensor]] | None:
    """Operations that only move values: pairs (input view, view of `out` that holds it). None for all others."""
    if func in (aten.clone.default, aten._to_copy.default):
        return [(args[0], out)]
    if func is aten.cat.default:
        tensors = [tensor for tensor in args[0] if tensor.numel()]
        dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
        ends = torch.tensor([0] + [tensor.shape[dim] for tensor in tensors]).cumsum(0).tolist()
        return [(t, out.narrow(dim, first, t.shape[dim])) for t, first in zip(tensors, ends, strict=False)]
    if func is aten.stack.default:
        dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
        return [(tensor, out.select(dim, i)) for i, tensor in enumerate(args[0])]
    if func is aten.index_select.default:
        return _gathered(args[0], args[1] % out.dim(), args[2], out)
    if func is aten.index.Tensor:
        named = [(dim, index) for dim, index in enumerate(args[1]) if index is not None]
        if len(named) == 1 and named[0][1].dim() == 1 and named[0][1].dtype == torch.int64:
            return _gathered(args[0], *named[0], out)
    return None


def _dense_shape(tensor: torch.Tensor) -> Ints | None:
    """The shape of `tensor` with its dimensions in memory order, or None where it has gaps or overlaps."""
    order = sorted(range(tensor.dim()), key=lambda dim: (-tensor.stride(dim), dim))
    shape = tuple(tensor.shape[dim] for dim in order)
    packed = contiguous_strides(shape)
    same = all(tensor.shape[dim] == 1 or tensor.stride(dim) == step for dim, step in zip(order, packed, strict=True))
    return shape if same and tensor.storage_offset() == 0 else None


def _gathered(
    source: torch.Tensor, dim: int, index: torch.Tensor, out: torch.Tensor
) -> list[tuple[torch.Tensor, torch.Tensor]] | None:
    if index.is_meta:
        return None
    rows = [int(i) % source.shape[dim] for i in index.tolist()]
    runs: list[tuple[int, int, int]] = []  # (row of out, row of source, how many)
    for i, row in enumerate(rows):
        if runs and runs[-1][1] + runs[-1][2] == row:
            runs[-1] = (runs[-1][0], runs[-1][1], runs[-1][2] + 1)
        else:
            runs.append((i, row, 1))
    return [(source.narrow(dim, row, n), out.narrow(dim, i, n)) for i, row, n in runs]
