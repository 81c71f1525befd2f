"""Every tensor that generation depends on in one engine worker, and how a sync keeps each of them right.

A plan covers what load_weights fills. A model also holds buffers, constants, tensors derived from weights in plain Python
attributes, second names of one memory, and draft models for speculative decoding. find() walks all of it; Inventory puts
every tensor into exactly one class, and what fits none is one BindError before anything is paused:

    synced     the plan writes it
    alias      lies in memory that the plan writes: another name of it, or a view
    derived    computed from weights. Filled with a marker value once all bytes are verified, so that the engine's own
               post-processing must replace all of it; what still holds the marker afterwards fails the sync
    constant   depends on the config only: its fingerprint at bind is its fingerprint when the sync is finished
    frozen     of a draft model that the config declares frozen: same proof as constant
    state      the engine's working memory (KV cache, workspaces): written by every step, read by none before

Which attribute of which module class is which is a table for each engine (integrations/<engine>/tensors.py); subclasses
inherit. A user declares the rest by name (weight_sync.declare).
"""

from __future__ import annotations

import functools
import types
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum, auto
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

from weight_sync.errors import BindError, ConfigError, VerifyError, listed
from weight_sync_integrations.fingerprint import fingerprint

if TYPE_CHECKING:
    import torch

Keep = Literal["synced", "alias", "derived", "constant", "frozen", "state"]
Declarable = Literal["derived", "constant", "state"]
DraftPolicy = Literal["refuse", "frozen", "sync"]
Kind = Literal["parameter", "buffer", "scratch buffer", "attribute"]
"""scratch buffer: torch's non-persistent buffer, in no checkpoint."""

_DEPTH = 12
"""Containers and helper objects inside each other, from a module's attribute to a tensor."""


@dataclass(frozen=True, slots=True)
class Rule:
    """tensor: "ModuleClass.attribute" with * and ?; the class may be a base class. why: for people, in the table."""

    keep: Declarable
    tensor: str
    why: str


@dataclass(frozen=True, slots=True)
class Found:
    """One tensor under one name. role: "target", "draft", "draft1"...; its name starts with the role unless it is target."""

    name: str
    role: str
    module: torch.nn.Module
    attribute: str
    kind: Kind
    tensor: torch.Tensor


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the inventory. keep: None for what nothing keeps right; why then says what would be legal."""

    name: str
    module: str
    kind: Kind
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    keep: Keep | None
    why: str


def find(models: Iterable[tuple[str, torch.nn.Module]], packages: Sequence[str], skip: frozenset[str]) -> list[Found]:
    """Every tensor with elements that can be reached from the models: parameters, buffers, and plain attributes.

    Attributes are followed through containers, functions and objects of `packages` (top-level names), except objects of
    classes in `skip`: configs and process groups. A module that no parent lists is walked where it is found.
    What only a module's global variables, a C++ object or an object of another package holds is not seen.
    """
    walk = _Walk(tuple(packages), skip)
    for role, model in models:
        walk.model(role, model)
    return walk.found


class _How(Enum):
    """What is behind a value, by its class."""

    NOTHING = auto()
    TENSOR = auto()
    MODULE = auto()
    MAPPING = auto()
    SEQUENCE = auto()
    PARTIAL = auto()
    METHOD = auto()
    FUNCTION = auto()
    OBJECT = auto()


class _Walk:
    """Engines stand still while it walks: a model of 48 layers holds 30,000 values, nearly all of them numbers and names."""

    def __init__(self, packages: tuple[str, ...], skip: frozenset[str]) -> None:
        self._packages, self._skip = packages, skip
        self._modules: set[int] = set()
        self._seen: dict[int, Any] = {}  # holds what it has seen: the id of an object that is gone may come again
        self._how: dict[type, _How] = {}
        self._nothing: set[type] = set()  # nor may what is of these classes stand for something of another
        self._slots: dict[type, list[str]] = {}
        self.found: list[Found] = []

    def model(self, role: str, model: torch.nn.Module, at: str = "") -> None:
        prefix = ("" if role == "target" else f"{role}.") + at
        # All modules first: one that is reached through an attribute, too, has its place in the tree.
        # Not skipping modules of an earlier model: what a draft shares with its target is listed under both names.
        modules = list(model.named_modules(prefix=prefix.removesuffix(".")))
        self._modules |= {id(module) for _, module in modules}
        for path, module in modules:
            dot = f"{path}." if path else ""
            for leaf, tensor in module._parameters.items():
                if tensor is not None and tensor.numel():
                    self.found.append(Found(dot + leaf, role, module, leaf, "parameter", tensor))
            for leaf, tensor in module._buffers.items():
                if tensor is not None and tensor.numel():
                    kind: Kind = "scratch buffer" if leaf in module._non_persistent_buffers_set else "buffer"
                    self.found.append(Found(dot + leaf, role, module, leaf, kind, tensor))
            for leaf, value in list(vars(module).items()):
                if not self._empty(value) and leaf not in ("_parameters", "_buffers", "_modules"):
                    self._value(value, leaf, role, dot, module, 0)

    def _value(self, value: Any, leaf: str, role: str, dot: str, module: torch.nn.Module, depth: int) -> None:
        how = self._how.get(type(value)) or self._classed(type(value))
        if how is _How.NOTHING:
            if type(value) is value.__class__:
                return
            how = self._how.get(value.__class__) or self._classed(value.__class__)  # stands for an object of another class
            if how is _How.NOTHING:
                return
        if how is _How.TENSOR:
            if value.numel():
                self.found.append(Found(dot + leaf, role, module, leaf, "attribute", value))
            return
        if id(value) in self._seen:
            return
        if how is _How.MODULE:
            if id(value) not in self._modules:
                self._seen[id(value)] = value
                start = "" if role == "target" else f"{role}."
                self.model(role, value, f"{dot}{leaf}.".removeprefix(start))
            return
        inner = list(self._inside(value, leaf, how))
        if inner:
            self._seen[id(value)] = value
            if depth >= _DEPTH:
                raise BindError(f"{dot}{leaf} ({type(module).__name__}) nests objects deeper than {_DEPTH}: not looked into")
            for name, item in inner:
                if not self._empty(item):
                    self._value(item, name, role, dot, module, depth + 1)

    def _empty(self, value: Any) -> bool:
        """Whether there is nothing behind a value, as is seen at once of nearly all."""
        return type(value) in self._nothing or (type(value) in _BUILT_IN and not value)

    def _classed(self, kind: type) -> _How:
        import torch

        how = next((how for classes, how in _classes(torch) if issubclass(kind, classes)), None)
        if how is None and kind.__module__.split(".")[0] in self._packages and kind.__name__ not in self._skip:
            how, self._slots[kind] = _How.OBJECT, list(_slots(kind))
        how = self._how[kind] = how or _How.NOTHING
        own = (vars(base).keys() for base in kind.__mro__ if base.__module__ != "builtins")
        if how is _How.NOTHING and not any(names & {"__class__", "__getattribute__"} for names in own):
            self._nothing.add(kind)
        return how

    def _inside(self, value: Any, leaf: str, how: _How) -> Iterator[tuple[str, Any]]:
        if how is _How.MAPPING:
            for key, item in list(value.items()):
                yield f"{leaf}.{key}", item
        elif how is _How.SEQUENCE:
            for i, item in enumerate(value):
                yield f"{leaf}.{i}", item
        elif how is _How.PARTIAL:
            yield leaf, value.func
            yield f"{leaf}.args", value.args
            yield f"{leaf}.keywords", value.keywords
        elif how is _How.METHOD:
            yield leaf, value.__self__
        elif how is _How.FUNCTION:
            for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
                try:
                    yield f"{leaf}.{name}", cell.cell_contents
                except ValueError:  # a cell that is not filled yet holds nothing
                    continue
        else:
            for name in self._slots.get(type(value), ()):
                if hasattr(value, name):
                    yield f"{leaf}.{name}", getattr(value, name)
            for name, item in list(getattr(value, "__dict__", {}).items()):
                yield f"{leaf}.{name}", item


_PLAIN = (types.NoneType, int, float, str, bytes, type, types.ModuleType)
_BUILT_IN = frozenset({dict, OrderedDict, list, tuple, set, frozenset})


def _classes(torch: Any) -> tuple[tuple[Any, _How], ...]:
    return (
        (torch.Tensor, _How.TENSOR),
        (_PLAIN, _How.NOTHING),
        (torch.nn.Module, _How.MODULE),
        (Mapping, _How.MAPPING),
        ((list, tuple, set, frozenset), _How.SEQUENCE),
        (functools.partial, _How.PARTIAL),
        (types.MethodType, _How.METHOD),
        (types.FunctionType, _How.FUNCTION),
    )


def _slots(kind: type) -> Iterator[str]:
    for base in kind.__mro__:
        names = base.__dict__.get("__slots__", ())
        yield from (name for name in ((names,) if isinstance(names, str) else names) if not name.startswith("__"))


class Spans:
    """Byte ranges of memory that the plan writes."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        ranges = sorted(span for tensor in tensors if (span := _span(tensor)) is not None)
        self._merged: list[tuple[int, int]] = []
        for low, high in ranges:
            if self._merged and low <= self._merged[-1][1]:
                self._merged[-1] = self._merged[-1][0], max(high, self._merged[-1][1])
            else:
                self._merged.append((low, high))

    def cover(self, tensor: torch.Tensor) -> bool:
        span = _span(tensor)
        if span is None:
            return False
        i = bisect_right(self._merged, (span[0], 1 << 80)) - 1
        return i >= 0 and self._merged[i][0] <= span[0] and span[1] <= self._merged[i][1]


def _span(tensor: torch.Tensor) -> tuple[int, int] | None:
    if tensor.is_meta or not tensor.numel():
        return None
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype


@dataclass(slots=True)
class Policy:
    """How tensors are judged. rules: the engine's table. declare: the user's {name pattern: class}, read first.

    recomputes: the engine runs its post-processing in a sync; without it a derived tensor would stay stale.
    captured: graphs were captured and read tensors by their addresses, so a derived one may not be bound to another tensor.
    """

    rules: Sequence[Rule]
    draft: DraftPolicy = "refuse"
    declare: Mapping[str, str] = field(default_factory=dict)
    recomputes: str | None = None
    captured: bool = False

    def __post_init__(self) -> None:
        for pattern, keep in self.declare.items():
            if keep not in get_args(Declarable):
                raise ConfigError(f"weight_sync.declare: {pattern}: {keep!r} must be one of {listed(get_args(Declarable))}")
        if self.draft not in get_args(DraftPolicy):
            raise ConfigError(f"weight_sync.draft={self.draft!r}: must be one of {listed(get_args(DraftPolicy))}")

    def judge(self, found: Found, spans: Spans, written: set[tuple[Any, ...]]) -> tuple[Keep | None, str]:
        """(class, why) of one tensor; (None, what would make it legal) when nothing keeps it right."""
        if _place(found.tensor) in written and found.kind != "attribute":
            written.discard(_place(found.tensor))  # the next name of the same memory is an alias
            return "synced", "written by the plan"
        if spans.cover(found.tensor):
            return "alias", "lies in memory that the plan writes"
        rule = self.rule(found)
        if found.role != "target" and self.draft == "frozen" and (rule is None or rule.keep == "derived"):
            return "frozen", f"weight_sync.draft=frozen: the {found.role} model is proven untouched"
        if rule is not None and rule.keep == "derived" and not self.recomputes:
            return None, "it is derived from weights, and this server has no call that recomputes it after a raw write"
        if rule is not None:
            return rule.keep, f"{rule.why}; {self.recomputes}" if rule.keep == "derived" else rule.why
        if found.role != "target":
            return None, (
                "the engine runs a draft model that the plan does not write; weight_sync.draft=sync writes it, "
                "=frozen declares that it keeps the weights it has"
            )
        what = "the plan does not write it" if found.kind in ("parameter", "buffer") else "nothing is known of it"
        return None, f"{what}; declare it with weight_sync.declare ({listed(get_args(Declarable))}) or in the engine's table"

    def rule(self, found: Found) -> Rule | None:
        """The first declaration or rule that speaks of this tensor."""
        for pattern, keep in self.declare.items():
            if fnmatchcase(found.name, pattern):
                return Rule(cast("Declarable", keep), pattern, f"weight_sync.declare: {pattern}")
        classes = [kind.__name__ for kind in type(found.module).__mro__]
        for rule in self.rules:
            if any(fnmatchcase(f"{kind}.{found.attribute}", rule.tensor) for kind in classes):
                return rule
        return None


class Inventory:
    """The tensors of one worker, judged, with the proofs that are due when the sync is finished.

    finder: find() on the worker's models; called again for the proofs, because an engine may bind names to new tensors.
    planned: the live tensors that the plan writes. where: "rollout rank 3", for errors.
    """

    def __init__(
        self, finder: Callable[[], Iterable[Found]], planned: Iterable[torch.Tensor], policy: Policy, where: str
    ) -> None:
        self._finder, self._policy, self._where = finder, policy, where
        tensors = list(planned)
        self._spans, written = Spans(tensors), {_place(tensor) for tensor in tensors}
        self.entries: list[Entry] = []
        self._tensors: dict[str, torch.Tensor] = {}
        self._proofs: dict[str, dict[str, int]] = {}
        self._places: dict[str, int] = {}
        for found in finder():
            keep, why = policy.judge(found, self._spans, written)
            self.entries.append(_entry(found, keep, why))
            self._tensors[found.name] = found.tensor

    def require_all(self) -> None:
        """Raise BindError naming every tensor that nothing keeps right, its module class, and what would be legal."""
        if bad := [entry for entry in self.entries if entry.keep is None]:
            raise BindError(f"{self._where}: " + "; ".join(_refusals(bad)))

    def seal(self) -> None:
        """Take the fingerprints of constants and frozen tensors that check() compares with."""
        self._proofs = {e.name: _prints(self._tensors[e.name]) for e in self.entries if e.keep in ("constant", "frozen")}
        self._places = {name: self._tensors[name].data_ptr() for name in self.names("derived")}
        self._tensors.clear()

    def names(self, keep: Keep) -> list[str]:
        return [entry.name for entry in self.entries if entry.keep == keep]

    def spoil(self) -> None:
        """Fill every derived tensor with a marker: post-processing must replace it all, or check() fails."""
        derived = self.names("derived")
        live = {found.name: found.tensor for found in self._finder()} if derived else {}
        for name in derived:
            _fill(live[name])

    def check(self) -> dict[str, int]:
        """Raise VerifyError unless constants and frozen tensors are untouched and every derived tensor was recomputed.

        Returns how many were proven, by class.
        """
        live = {found.name: found for found in self._finder()}
        keeps = {entry.name: entry.keep for entry in self.entries}
        bad: list[str] = []
        for name in live.keys() - keeps.keys():
            keep, _ = self._policy.judge(live[name], self._spans, set())
            if keep not in ("alias", "state"):  # working memory may be made by the first request
                bad.append(f"{name} appeared since bind, and is {keep or 'unaccounted'}")
        bad += [f"{name} is gone" for name, keep in keeps.items() if name not in live and keep not in ("alias", "state")]
        for name, prints in self._proofs.items():
            if name in live and prints.get(str(live[name].tensor.dtype)) != fingerprint(live[name].tensor):
                bad.append(f"{name} was declared {keeps[name]} and has changed")
        derived = [name for name in self.names("derived") if name in live]
        bad += [f"{name} was not recomputed from the new weights" for name in derived if _filled(live[name].tensor)]
        if self._policy.captured:
            moved = [name for name in derived if live[name].tensor.data_ptr() != self._places.get(name)]
            bad += [f"{name} was bound to another tensor, and captured graphs still read the one before" for name in moved]
        if bad:
            raise VerifyError(f"{self._where}: {listed(sorted(bad))}")
        proven: dict[str, int] = {"derived": len(derived)} if derived else {}
        for name in self._proofs:
            proven[str(keeps[name])] = proven.get(str(keeps[name]), 0) + 1
        return proven


def plain(entry: Entry) -> dict[str, Any]:
    """An entry as plain data, for the way to a controller."""
    return {**asdict(entry), "shape": list(entry.shape)}


def _prints(tensor: torch.Tensor) -> dict[str, int]:
    """Fingerprint by dtype: engines cast a rotary table to the activations' dtype when the first request comes."""
    import torch

    kinds = {tensor.dtype}
    if tensor.dtype == torch.float32 and tensor.numel() > 1:
        kinds |= {torch.bfloat16, torch.float16}
    return {str(kind): fingerprint(tensor.detach().to(kind)) for kind in kinds}


def _entry(found: Found, keep: Keep | None, why: str) -> Entry:
    t = found.tensor
    dtype = str(t.dtype).removeprefix("torch.")
    return Entry(found.name, type(found.module).__name__, found.kind, dtype, tuple(t.shape), t.nbytes, keep, why)


def _refusals(bad: Sequence[Entry]) -> Iterator[str]:
    """One sentence for each reason, with the tensors it holds for."""
    for why in dict.fromkeys(entry.why for entry in bad):
        names = [f"{e.name} ({e.kind} of {e.module})" for e in bad if e.why == why]
        yield f"{len(names)} tensors would not be kept right, {listed(names)}: {why}"


def _marker(tensor: torch.Tensor) -> Any:
    """A value that no weight computes to: the lowest finite number of a floating dtype, the highest of another.

    Of eight-bit floats it is NaN: what is quantised has the lowest and highest numbers in it.
    """
    import torch

    if not tensor.is_floating_point():
        return torch.iinfo(tensor.dtype).max
    return float("nan") if tensor.itemsize == 1 else torch.finfo(tensor.dtype).min


def _fill(tensor: torch.Tensor) -> None:
    import torch

    with torch.no_grad():
        tensor.detach().fill_(_marker(tensor))


def _filled(tensor: torch.Tensor) -> bool:
    """Whether the marker is still there: in any element of a floating tensor, in all of another (whose codes may be any)."""
    import torch

    if not tensor.is_floating_point():
        return bool((tensor.detach() == _marker(tensor)).all())
    if tensor.itemsize == 1:
        return bool(tensor.detach().to(torch.float32).isnan().any())
    return bool((tensor.detach().to(torch.float64) == _marker(tensor)).any())
