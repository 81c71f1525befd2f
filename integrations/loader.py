"""An engine's own load_weights, fed with HF tensors that a sync has put beside the model: watched while it works.

A loader may skip a tensor without a word, keep a reference instead of a copy, or stop half way. So it is tried on shadows when
a plan is bound (rehearse(): the recorder, no byte moves), and watched in every sync (Reads: which staged elements were really
copied out). Nothing here knows an engine; integrations/vllm/loader.py does.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from weight_sync.errors import BindError, VerifyError, listed
from weight_sync.session.copies import Bytes, Differing, differing, duplicates
from weight_sync_integrations.inventory import Found, Inventory
from weight_sync_integrations.recorder import Recording

aten = torch.ops.aten


def allocate(nbytes: int, places: Mapping[str, tuple[list[int], str, int]], device: torch.device) -> dict[str, torch.Tensor]:
    """Views of one new allocation of `nbytes` bytes. places: name -> (shape, dtype, first byte); they may share memory."""
    buffer = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    found: dict[str, torch.Tensor] = {}
    for name, (shape, dtype, first) in places.items():
        kind: torch.dtype = getattr(torch, dtype)
        found[name] = buffer[first : first + prod(shape) * kind.itemsize].view(kind).view(list(shape))
    return found


class Published:
    """Shapes of HF tensors as a checkpoint has them. In a plan every part of a quantised weight has two dims; in a checkpoint
    the scale of a tensor has one or none, and so has a weight_shape.

    quantization: quantization_config of the engine's config.json; None: nothing is quantised.
    """

    def __init__(self, quantization: Mapping[str, Any] | None) -> None:
        from weight_sync.config import quant_yaml
        from weight_sync.quant.published import from_hf

        scheme = None if quantization is None else from_hf(quantization, quant_yaml)[0]
        self._parts = [part for part in scheme.parts if part.dims < 2] if scheme else []

    def shape(self, name: str, shape: Sequence[int]) -> tuple[int, ...]:
        for part in self._parts:
            if name.endswith(part.becomes) and len(shape) == 2:
                return tuple(shape[1:]) if part.name == "shape" else tuple(shape[: part.dims])
        return tuple(shape)

    def views(self, staged: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The same memory, in the shapes that a checkpoint has."""
        return {name: tensor.view(self.shape(name, tensor.shape)) for name, tensor in staged.items()}

    def planned(self, recording: Recording, shapes: Mapping[str, Sequence[int]]) -> Recording:
        """A recording of tensors as published, with the boxes that they are in the plan. shapes: of the plan, by HF name."""
        for shard in recording.shards:
            name = shard["tensor"]
            missing = len(shapes[name]) - len(shard["shape"])
            if missing and self.shape(name, shapes[name]) == tuple(shapes[name][1:]):
                before, after = missing, 0
            else:
                before, after = 0, missing
            for key, value in (("offset", 0), ("shape", 1), ("strides", 1)):
                shard[key] = [value] * before + list(shard[key]) + [value] * after
        return recording


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """What a dry run of the loader did. elements: of each HF tensor, how many it places here. params: where they go."""

    elements: dict[str, int]
    params: dict[str, frozenset[str]]

    @classmethod
    def of(cls, recording: Recording, names: Iterable[str], where: str) -> Rehearsal:
        """Raises BindError for HF tensors that the loader does not use here, and parameters that it does not fill.

        A tensor from which values are computed (dequantised, say) counts as one element: it must at least be read.
        """
        names = list(names)
        elements: dict[str, int] = {}
        params: dict[str, set[str]] = {}
        for shard in recording.shards:
            elements[shard["tensor"]] = elements.get(shard["tensor"], 0) + prod(shard["shape"])
            params.setdefault(shard["tensor"], set()).add(shard["param"])
        for entry in recording.inexpressible:
            if entry["tensor"] is not None:
                elements.setdefault(entry["tensor"], 1)
                params.setdefault(entry["tensor"], set()).add(entry["param"])
        problems = [f"{name} would be dropped: the loader copies nothing of it" for name in names if name not in elements]
        problems += [f"{n} elements of {param} would be filled by no tensor" for param, n in recording.uncovered.items()]
        if problems:
            raise BindError(
                f"{where}: the engine's own loader does not take exactly what the plan brings it: {listed(problems)}"
            )
        return cls({name: elements[name] for name in names}, {name: frozenset(params[name]) for name in names})


@dataclass(slots=True)
class Fed:
    """What was seen of a load so far. read: elements copied out of each HF tensor. said: parameters that the loader named."""

    read: dict[str, int] = field(default_factory=dict)
    said: set[str] | None = None

    def require(self, rehearsed: Rehearsal, names: Iterable[str], where: str) -> None:
        """Raise VerifyError unless every one of `names` was used at least as much as in the rehearsal."""
        problems = [
            f"{name}: {self.read.get(name, 0)} elements were copied, {rehearsed.elements[name]} belong here"
            for name in names
            if self.read.get(name, 0) < rehearsed.elements[name]
        ]
        if self.said is not None:
            want = {param: name for name in names for param in rehearsed.params[name]}
            problems += [
                f"{name}: the loader does not name {param} among what it loaded"
                for param, name in sorted(want.items())
                if param not in self.said
            ]
        if problems:
            raise VerifyError(f"{where}: the engine's own loader has not used all it was given: {listed(problems)}")


@dataclass(frozen=True, slots=True)
class Copied:
    """A tensor's bytes in host memory, in the order of `dims`, and what it was."""

    raw: Bytes
    shape: torch.Size
    dtype: torch.dtype
    dims: list[int]

    def unlike(self, now: torch.Tensor) -> str | None:
        """Why its bytes are not those of the same elements of a tensor, or None."""
        if now.shape != self.shape or now.dtype != self.dtype:
            return f"was {self.dtype} {list(self.shape)}, is {now.dtype} {list(now.shape)}"
        if _dims(now) != self.dims:
            return f"its dims, from the longest stride to the shortest, were {self.dims}, are {_dims(now)}"
        return None


@dataclass(frozen=True, slots=True)
class Held:
    """Copies, in host memory, of all tensors that a load must bring back (by name), and whose they are."""

    copies: dict[str, Copied]
    where: str

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor], where: str) -> Held:
        copies = duplicates(_raw(tensor) for tensor in tensors.values())
        made = zip(tensors.items(), copies, strict=True)
        return cls({name: Copied(copy, tensor.shape, tensor.dtype, _dims(tensor)) for (name, tensor), copy in made}, where)

    @property
    def nbytes(self) -> int:
        return sum(copy.raw.nbytes for copy in self.copies.values())

    def scramble(self, live: Mapping[str, torch.Tensor]) -> int:
        """Invert every byte of the live tensors, in place, and prove that all have changed. Returns how many."""
        unlike = {name: self._unlike(name, now) for name, now in live.items() if now.numel()}
        if wrong := [f"{name}: {reason}" for name, reason in unlike.items() if reason is not None]:
            raise VerifyError(f"{self.where}: {len(wrong)} tensors are not as they were when they were copied: {listed(wrong)}")
        nbytes = 0
        with torch.no_grad():
            for tensor in live.values():
                if tensor.numel():
                    _bytes(tensor).bitwise_not_()
                    nbytes += tensor.nbytes
        found = self._differing({name: tensor for name, tensor in live.items() if tensor.numel()})
        same = [name for name, differ in found.items() if differ.count < self.copies[name].raw.nbytes]
        if same:
            raise VerifyError(f"{self.where}: {listed(same)} has bytes that are as they were after all were inverted")
        return nbytes

    def compare(self, live: Mapping[str, torch.Tensor]) -> None:
        """Raise VerifyError unless the same names hold the same bytes."""
        wrong = [f"{name} is {'gone' if name in self.copies else 'new'}" for name in sorted(self.copies.keys() ^ live.keys())]
        unlike = {name: self._unlike(name, live[name]) for name in self.copies if name in live}
        found = self._differing({name: live[name] for name, reason in unlike.items() if reason is None})
        for name, reason in unlike.items():
            if reason is not None:
                wrong.append(f"{name}: {reason}")
            elif count := found[name].count:
                wrong.append(f"{name}: {count} of {self.copies[name].raw.nbytes} bytes differ")
        if wrong:
            raise VerifyError(f"{self.where}: {len(wrong)} of {len(self.copies)} tensors are not as they were: {listed(wrong)}")

    def _unlike(self, name: str, now: torch.Tensor) -> str | None:
        return self.copies[name].unlike(now) if name in self.copies else "is new"

    def _differing(self, live: Mapping[str, torch.Tensor]) -> dict[str, Differing]:
        copies = [self.copies[name].raw for name in live]
        return dict(zip(live, differing(copies, (_raw(tensor) for tensor in live.values())), strict=True))


class SecondLoad:
    """snapshot, scramble and compare of weight_sync.session.placing.Loader, over what its _find() and _weights() name."""

    _where: str
    _inventory: Inventory | None
    _held: Held | None

    def _find(self) -> list[Found]:
        """Every tensor of the model."""
        raise NotImplementedError

    def _weights(self) -> Mapping[str, torch.Tensor]:
        """The live tensors that a load fills, which are scrambled."""
        raise NotImplementedError

    def snapshot(self) -> int:
        self._held = Held.of(self._compared(), self._where)
        return self._held.nbytes

    def scramble(self) -> int:
        assert self._held is not None
        assert self._inventory is not None
        nbytes = self._held.scramble(self._weights())
        self._inventory.spoil()
        return nbytes

    def compare(self) -> int:
        assert self._held is not None
        held, self._held = self._held, None
        held.compare(self._compared())
        return held.nbytes

    def _compared(self) -> dict[str, torch.Tensor]:
        """All that generation depends on, but working memory."""
        assert self._inventory is not None
        state = set(self._inventory.names("state"))
        return {found.name: found.tensor.detach() for found in self._find() if found.name not in state}


def _raw(tensor: torch.Tensor) -> Any:
    """_bytes() as weight_sync.session.copies takes them."""
    raw = _bytes(tensor)
    return raw.numpy() if raw.device.type == "cpu" else raw


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor that is dense in memory, in memory order; of any other, of a copy."""
    if not tensor.is_contiguous():
        order = _dims(tensor)
        tensor = tensor.permute(order + [dim for dim in range(tensor.dim()) if dim not in order])
    return tensor.detach().reshape(-1).view(torch.uint8)


def _dims(tensor: torch.Tensor) -> list[int]:
    """Its dims of more than one element, from the longest stride to the shortest; none where it has no elements."""
    if not tensor.numel():
        return []
    order = sorted(range(tensor.dim()), key=lambda dim: (-tensor.stride(dim), dim))
    return [dim for dim in order if tensor.shape[dim] != 1]


class Reads(TorchDispatchMode):
    """Counts elements that are copied out of staged tensors into memory (not those into `meta` tensors).

    staged: HF name -> tensor; others of the same storage must not overlap them. keep(): a clone handed on in their place.
    """

    def __init__(self, staged: Mapping[str, torch.Tensor], counts: dict[str, int]) -> None:
        super().__init__()
        self._counts = counts
        self._storages: dict[int, tuple[list[int], list[str]]] = {}
        self._kept: dict[int, tuple[str, torch.Tensor]] = {}
        by_storage: dict[int, list[tuple[int, str]]] = {}
        for name, tensor in staged.items():
            by_storage.setdefault(_key(tensor), []).append((tensor.data_ptr(), name))
        for key, entries in by_storage.items():
            entries.sort()
            self._storages[key] = [address for address, _ in entries], [name for _, name in entries]

    def restage(self, staged: Mapping[str, torch.Tensor]) -> None:
        """Another wave lies in the same memory now."""
        self._storages = Reads(staged, {})._storages

    def keep(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """A copy of a staged tensor or of a part of it, still counted under its name; None for any other tensor."""
        name = self._name(tensor)
        if name is None or _key(tensor) in self._kept:
            return None
        copy = tensor.detach().clone()
        self._kept[_key(copy)] = name, copy
        return copy

    def forget(self, alive: Iterable[torch.Tensor]) -> None:
        """Drop all kept copies but those of `alive`."""
        keys = {_key(tensor) for tensor in alive}
        self._kept = {key: value for key, value in self._kept.items() if key in keys}

    def _name(self, tensor: torch.Tensor) -> str | None:
        key = _key(tensor)
        if key in self._kept:
            return self._kept[key][0]
        found = self._storages.get(key)
        if found is None:
            return None
        return found[1][max(0, bisect_right(found[0], tensor.data_ptr()) - 1)]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        if outputs and all(tensor.is_meta for tensor in outputs):
            return result
        made = {_key(tensor) for tensor in outputs}
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor) and not leaf.is_meta and _key(leaf) not in made:
                name = self._name(leaf)
                if name is not None:
                    self._counts[name] = self._counts.get(name, 0) + leaf.numel()
        return result


def given(tensors: Mapping[str, torch.Tensor], taken: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """The iterator that load_weights gets. taken: filled with the names it asked for."""
    for name, tensor in tensors.items():
        taken.append(name)
        yield name, tensor


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
