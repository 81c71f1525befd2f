"""What SGLang's modules were when the checkpoint was loaded into them, before post-processing: enough to load into them again.

process_weights_after_loading binds a module's parameters to new tensors, without the weight_loader that fills them, and leaves
marks by which a second run is skipped. So each module's parameters (class, shape, strides, dtype, attributes), buffers, plain
attributes and helper objects (quant_method, scheme) are remembered while a model loads, of memory only what is no larger than
SMALL bytes. Opened gives a module all that back for a while, and afterwards copies what post-processing made of it into the
tensors that the engine reads, whose addresses stay.
"""

from __future__ import annotations

import types
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any
from weakref import ref

import torch

from weight_sync.errors import BindError, VerifyError, listed
from weight_sync_integrations.fingerprint import fingerprint
from weight_sync_integrations.inventory import Found, find
from weight_sync_integrations.sglang.tensors import PACKAGES, SKIP, is_cache_scale

SMALL = 4096
"""Bytes of a tensor that are remembered: scales for a tensor, of which SGLang reads whether a checkpoint has filled them."""

CONSTANT = "weight_shape"
"""Parameters of compressed-tensors that hold the sizes of a weight. No sync brings them: they are given back as loaded."""

_PLAIN = (type(None), bool, int, float, str, bytes, complex, Enum, torch.dtype, torch.device, torch.Size)
_CONTAINERS = (dict, OrderedDict, list, set)
_NAMED = (type, types.FunctionType, types.MethodType, types.BuiltinFunctionType)
GONE = "(not there)"
Contents = list[tuple[Any, Any]]
"""(object, a copy of what is in it): a container and its items, or any other object and its attributes."""


def contents(module: torch.nn.Module) -> Contents:
    """The module and the containers and SGLang objects that it holds, each with what is in it; no other module's, no config."""
    found: Contents = []
    seen: set[int] = set()
    waiting: list[Any] = [module]
    while waiting:
        value = waiting.pop()
        if isinstance(value, tuple):
            waiting += value
            continue
        if id(value) in seen or not (value is module or _is_holder(value)):
            continue
        seen.add(id(value))
        inside = value.copy() if type(value) in _CONTAINERS else dict(vars(value))
        found.append((value, inside))
        waiting += inside.values() if isinstance(inside, dict) else inside
    return found


def _is_holder(value: Any) -> bool:
    if type(value) in _CONTAINERS:
        return True
    kinds = {kind.__name__ for kind in type(value).__mro__}
    if isinstance(value, torch.nn.Module | torch.Tensor | type | Enum) or kinds & {*SKIP, "QuantizationConfig"}:
        return False
    return type(value).__module__.split(".")[0] in PACKAGES and hasattr(value, "__dict__")


def marks(module: torch.nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Numbers, flags and texts in what contents() finds, and in attributes of the tensors, by their (shortest) way from the
    module, with the names of functions and classes; and objects of other packages, into which nobody looks."""
    found: dict[str, Any] = {}
    opaque: dict[str, Any] = {}
    seen: set[int] = set()
    waiting: deque[tuple[str, Any]] = deque([("", module)])
    while waiting:
        path, value = waiting.popleft()
        if isinstance(value, _PLAIN):
            found[path] = value
            continue
        if isinstance(value, tuple):
            waiting += [(f"{path}.{i}", each) for i, each in enumerate(value)]
            continue
        if isinstance(value, _NAMED):
            found[path] = f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', '')}"
        tensor = isinstance(value, torch.Tensor)
        if not (value is module or tensor or _is_holder(value)):
            if type(value).__module__.split(".")[0] not in (*PACKAGES, "builtins", "functools") and not isinstance(
                value, torch.nn.Module | type
            ):
                opaque[path] = value
            continue
        if id(value) in seen:
            continue
        seen.add(id(value))
        if path and not tensor:
            found[f"{path} is a"] = type(value).__qualname__
        inside = value if type(value) in _CONTAINERS else vars(value)
        items = inside.items() if isinstance(inside, dict) else enumerate(inside) if isinstance(inside, list) else ()
        if tensor:
            items = [(key, each) for key, each in items if isinstance(each, _PLAIN)]
        waiting += [(f"{path}.{key}".removeprefix("."), each) for key, each in items]
    return found, opaque


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Of marks: those that are new or have another value, and GONE for those that are there no more."""
    found = {name: value for name, value in after.items() if name not in before or _differ(before[name], value)}
    return found | dict.fromkeys(before.keys() - after.keys(), GONE)


def put(saved: Contents, stands_for: Mapping[int, Any] | None = None) -> None:
    """Fill each object with what was in it. stands_for: id of a value -> what to put in its place."""
    other = stands_for or {}

    def value(each: Any) -> Any:
        return other.get(id(each), each)

    for holder, inside in saved:
        target = holder if type(holder) in _CONTAINERS else vars(holder)
        new = {k: value(v) for k, v in inside.items()} if isinstance(inside, dict) else [value(v) for v in inside]
        target.clear()
        target.extend(new) if isinstance(target, list) else target.update(new)


@dataclass(eq=False)
class Template:
    """A tensor as it was constructed. values: its elements, of a small one. same: how many the checkpoint left as they were.
    filled: whether the checkpoint has changed its first SMALL bytes."""

    kind: type
    attributes: dict[str, Any]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    values: torch.Tensor | None
    same: int = 0
    filled: bool = True

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Template:
        values = tensor.detach().clone() if tensor.nbytes <= SMALL and not tensor.is_meta else None
        shape, attributes = tuple(tensor.shape), dict(vars(tensor))
        return cls(type(tensor), attributes, shape, tensor.stride(), tensor.dtype, tensor.device, values)

    def make(self, device: torch.device | None = None) -> torch.Tensor:
        """A new tensor of this kind, on the device it was on or another; its bytes are anything but where they were kept."""
        device = device or self.device
        data = torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=device)
        if self.values is not None and device.type != "meta":
            data.copy_(self.values)
        made = data if self.kind is torch.Tensor else torch.Tensor._make_subclass(self.kind, data, False)
        vars(made).update(self.attributes)
        return made


class Built:
    """One module, remembered before load_weights: Built(), then note_loaded(), then remade(). path: its name in the model.

    parameters: by their names in the module. problem: why it cannot be given back what it was, or "". changed: post-processing
    has changed a tensor of it. made: tensors that it made or replaced, by name in the module. marked: what it made of marks, of
    a module that holds weights; they may tell something of the values, also where no tensor was changed.
    """

    def __init__(self, path: str, module: torch.nn.Module) -> None:
        self.path, self.module, self.problem = path, module, ""
        own = {leaf: p for leaf, p in module._parameters.items() if p is not None}
        if lazy := [leaf for leaf, parameter in own.items() if torch.nn.parameter.is_lazy(parameter)]:
            self.problem = f"{path}: {listed(lazy)} is made while the checkpoint is loaded, not before"
            own.clear()
        self.parameters = {leaf: Template.of(parameter) for leaf, parameter in own.items()}
        self.changed = False
        self.made: frozenset[str] = frozenset()
        self.marked: dict[str, Any] = {}
        # No tensor is kept that post-processing is to replace: its memory must be free for the next module's.
        self._loaded = {leaf: ref(parameter) for leaf, parameter in own.items()}
        self._addresses = {leaf: parameter.data_ptr() for leaf, parameter in own.items()}
        stands = {id(parameter): self.parameters[leaf] for leaf, parameter in own.items()}
        self.before = [(holder, _replaced(inside, stands)) for holder, inside in contents(module)]
        self._prints: dict[str, tuple[Any, int]] = {}
        self._marks: dict[str, Any] = {}
        self._heads = {leaf: head(parameter).clone() for leaf, parameter in own.items()}

    def note_loaded(self) -> None:
        """load_weights has returned: what it did not fill, and whether it kept to the tensors that there were."""
        for leaf, template in self.parameters.items():
            now = self.module._parameters.get(leaf)
            if now is None or now is not self._loaded[leaf]() or now.data_ptr() != self._addresses[leaf]:
                self.problem = self.problem or f"{self.path}.{leaf} is made while the checkpoint is loaded, not before"
                continue
            template.filled = now.is_meta or not torch.equal(self._heads[leaf], head(now))
            if leaf.endswith(CONSTANT):
                template.values, template.same = now.detach().clone(), now.numel()
            elif template.values is not None:
                template.same = int((bits(template.values) == bits(now)).sum())
        found = [f for f in walk(self.module) if not is_cache_scale(self.module, f.attribute)]
        self._prints = {f.name: (place(f.tensor), 0 if f.kind == "parameter" else fingerprint(f.tensor)) for f in found}
        self._marks = marks(self.module)[0]

    def remade(self) -> bool:
        """Post-processing has run: whether a parameter became another object, or any tensor another one or was changed."""
        now = {leaf: p for leaf, p in self.module._parameters.items() if p is not None}
        names = {leaf for leaf in self._loaded.keys() | now.keys() if not is_cache_scale(self.module, leaf)}
        if names:
            self.marked = changes(self._marks, marks(self.module)[0])
        replaced = any(leaf not in now or leaf not in self._loaded or now[leaf] is not self._loaded[leaf]() for leaf in names)
        found = [f for f in walk(self.module) if not is_cache_scale(self.module, f.attribute)]
        self.made = frozenset(f.name for f in found if self._prints.get(f.name, ((), 0))[0] != place(f.tensor))
        for f in found:
            if f.kind != "parameter" and f.name not in self.made and self._prints[f.name][1] != fingerprint(f.tensor):
                self.problem = self.problem or f"{self.path}.{f.name} was changed where it is by post-processing"
                self.changed = bool(names)
        gone = bool(self._prints.keys() - {f.name for f in found})
        self._keep({id(f.tensor) for f in found})
        self._prints.clear()
        self._marks.clear()
        self._heads.clear()
        self.changed = self.changed or replaced or gone or bool(self.made)
        return self.changed

    def _keep(self, alive: set[int]) -> None:
        """Keep of other tensors that were in the module those that still are, and small ones."""
        stands: dict[int, Any] = {}
        for holder, inside in self.before:
            for tensor in inside.values() if isinstance(inside, dict) else inside:
                if isinstance(tensor, torch.Tensor) and id(tensor) not in stands and id(tensor) not in alive:
                    stands[id(tensor)] = template = Template.of(tensor)
                    if template.values is None:
                        what = f"{self.path} ({type(holder).__name__}) held a tensor of {tensor.nbytes} bytes"
                        self.problem = self.problem or f"{what} before post-processing that is gone now"
        self.before = [(holder, _replaced(inside, stands)) for holder, inside in self.before]


def _replaced(inside: Any, stands: Mapping[int, Any]) -> Any:
    if isinstance(inside, dict):
        return type(inside)((key, stands.get(id(value), value)) for key, value in inside.items())
    return type(inside)(stands.get(id(value), value) for value in inside)


def walk(module: torch.nn.Module) -> list[Found]:
    """Every tensor of one module, as the inventory finds it."""
    return find([("target", module)], PACKAGES, SKIP)


def place(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tuple(tensor.shape), _strides(tensor), tensor.dtype


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Those that matter."""
    return tuple(step for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size > 1)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements as integers: copied and compared bit by bit, NaNs too."""
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().view(whole[tensor.itemsize])


def head(tensor: torch.Tensor) -> torch.Tensor:
    """The first bytes in memory, no more than SMALL."""
    held = tensor.untyped_storage().nbytes() // tensor.itemsize - tensor.storage_offset()
    return tensor.detach().as_strided((min(tensor.numel(), held, SMALL // tensor.itemsize),), (1,)).view(torch.uint8)


def unshared(modules: Iterable[Built]) -> dict[int, list[Any]]:
    """For each module, by id: the objects that no other of them holds, now or before post-processing."""
    each = {}
    for built in modules:
        now = contents(built.module) + built.before
        each[id(built)] = list({id(holder): holder for holder, _ in now}.values())
    owners = Counter(id(holder) for holders in each.values() for holder in holders)
    return {key: [holder for holder in holders if owners[id(holder)] == 1] for key, holders in each.items()}


class Opened:
    """A module that has, until close() or postprocess(), the parameters that a checkpoint fills.

    own: the objects that may be changed for it (unshared). device: where its parameters are made, if not where they were.
    """

    def __init__(self, built: Built, own: list[Any], device: torch.device | None = None) -> None:
        self.built = built
        mine = {id(holder) for holder in own}
        now = contents(built.module)
        self._live = [(holder, inside) for holder, inside in now if id(holder) in mine]
        self._shared = [(holder, inside) for holder, inside in now if id(holder) not in mine]
        self._tensors = {found.name: found for found in walk(built.module)}
        before = [(holder, inside) for holder, inside in built.before if id(holder) in mine]
        made: dict[int, Any] = {}
        for _, inside in before:
            for value in inside.values() if isinstance(inside, dict) else inside:
                if isinstance(value, Template) and id(value) not in made:
                    made[id(value)] = value.make(device)
        put(before, made)

    def fill(self, value: int) -> None:
        """Set the elements of every parameter, for a rehearsal."""
        with torch.no_grad():
            for leaf, parameter in self.built.module._parameters.items():
                if parameter is not None and not is_cache_scale(self.built.module, leaf):
                    parameter.detach().fill_(value)

    def close(self) -> None:
        """The module has again what the engine reads."""
        put(self._live)

    def postprocess(self, write: bool) -> list[Found]:
        """Run the module's own post-processing, and close. Returns the live tensors that it makes anew.

        write: copy what it has made into them. Raises VerifyError (BindError when not to write: a rehearsal) where that does
        not fit; then, as after any error of SGLang's, no byte of this module was written.
        """
        module = self.built.module
        try:
            before, foreign = marks(module)
            module.quant_method.process_weights_after_loading(module)
            made = {found.name: found.tensor for found in walk(module)}
            after, opaque = marks(module)
        finally:
            self.close()
        marked = changes(before, after)
        problems = [*self._lasting(), *self._unequal(made), *self._pointing(made, marked)]
        problems += [
            f"{self.built.path}.{name}: a {type(value).__name__} of {type(value).__module__} is made, nobody can look into it"
            for name, value in opaque.items()
            if foreign.get(name) is not value
        ]
        if write:
            first = self.built.marked
            problems += [
                f"{self.built.path}.{name} was {was!r} and is {now!r} with these weights"
                for name in sorted(first.keys() | marked.keys())
                if _differ(was := first.get(name, before.get(name, GONE)), now := after.get(name, GONE))
            ]
        if problems:
            kind = VerifyError if write else BindError
            raise kind(f"SGLang's post-processing does not make what the engine reads: {listed(problems)}")
        fresh = {n: f for n, f in self._tensors.items() if n in made and f.tensor.data_ptr() != made[n].data_ptr()}
        if write:
            with torch.no_grad():
                for name, found in fresh.items():
                    bits(found.tensor).copy_(bits(made[name]))
        return list(fresh.values())

    def _lasting(self) -> Iterator[str]:
        """What post-processing has changed outside of what close() puts back."""
        path = self.built.path
        for holder, was in self._shared:
            if not _same(holder, was):
                put([(holder, was)])
                yield f"{path}: it changes {type(holder).__name__}, which other layers hold too"
        now = {found.name: place(found.tensor) for found in walk(self.built.module)}
        if now != {name: place(found.tensor) for name, found in self._tensors.items()}:
            yield f"{path}: it moves tensors that cannot be put back"

    def _unequal(self, made: Mapping[str, torch.Tensor]) -> Iterator[str]:
        path = self.built.path
        for name, found in self._tensors.items():
            if name not in made and (found.kind in ("parameter", "buffer") or name in self.built.made):
                yield f"{path}.{name} is not made"
        for name, tensor in made.items():
            found = self._tensors.get(name)
            if found is None:
                yield f"{path}.{name} is made, and the engine holds no such tensor"
            elif place(found.tensor)[1:] != place(tensor)[1:]:
                yield f"{path}.{name}: the engine reads {_described(found.tensor)}, made is {_described(tensor)}"
            elif torch._debug_has_internal_overlap(found.tensor) == 1:
                yield f"{path}.{name}: elements of it share memory"

    def _pointing(self, made: Mapping[str, torch.Tensor], marked: Mapping[str, Any]) -> Iterator[str]:
        """Addresses of what post-processing has made, and what is thrown away now."""
        live = {name: found.tensor.data_ptr() for name, found in self._tensors.items()}
        spans = [(t.data_ptr(), t.data_ptr() + t.nbytes) for name, t in made.items() if live.get(name) != t.data_ptr()]
        for name, tensor in made.items():
            if tensor.dtype in (torch.int64, torch.uint64):
                values = tensor.detach().view(torch.int64)
                if any(bool(((values >= low) & (values < high)).any()) for low, high in spans):
                    yield f"{self.built.path}.{name} holds addresses of tensors"
        for name, value in marked.items():
            if isinstance(value, int) and any(low <= value < high for low, high in spans):
                yield f"{self.built.path}.{name} is the address of a tensor"


def _differ(one: Any, other: Any) -> bool:
    return one != other and not (one != one and other != other)


def _same(holder: Any, was: Any) -> bool:
    now = holder if type(holder) in _CONTAINERS else vars(holder)
    if isinstance(was, set):
        return now == was
    pairs = (
        [(now.get(key), value) for key, value in was.items()] if isinstance(was, dict) else list(zip(now, was, strict=False))
    )
    return len(now) == len(was) and all(a is b or (isinstance(b, _PLAIN) and a == b) for a, b in pairs)


def _described(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} strides {list(tensor.stride())}"
