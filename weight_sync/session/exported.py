"""The trainer's own witness: what its framework would save as a Hugging Face checkpoint, against the layout that is declared.

Digests prove that the bytes of declared boxes arrive, and the engines' recordings that engines put HF tensors where it is
declared. Neither would see a trainer whose parameters hold other HF elements than declared. An export does: the framework
gathers each HF tensor by rules of its own, and every rank compares its declared shards with it, bit by bit.

An export is a collective of all trainer ranks. A rank that finds something wrong goes on to the end of it and raises then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from math import prod
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from weight_sync.errors import BindError, WitnessError, listed
from weight_sync.ids import ITEMSIZE, Deadline
from weight_sync.layout.table import Layout, Param, Shard
from weight_sync.session.arrays import PIECE, on_host, to_host
from weight_sync.session.casts import cast_into
from weight_sync.session.contracts import TrainerGroup
from weight_sync.session.device_memory import word_dtype
from weight_sync.session.memory import Memory, dtype_name

Export = Callable[[], Iterable[tuple[str, Any]]]
"""All HF tensors of the trainer, (name, whole tensor), one after another. Called on every rank at once; it may be a collective.

Every rank is given every tensor, in the order that the trainer likes, in the dtype of the parameters or in that of the model.
"""


def refuse_without_export(described: Mapping[int, Mapping[str, Any]]) -> None:
    """Raise BindError unless every trainer rank can export. described: what SourceAgent's describe answered, by rank."""
    without = {rank: answer.get("source", "its agent") for rank, answer in described.items() if not answer.get("exports")}
    if without:
        kinds = listed(sorted(set(without.values())))
        raise BindError(
            f"weight_sync.verify.trainer_witness needs the trainer's own export, and trainer ranks {listed(without)} ({kinds}) "
            "have none: pass export= to SourceAgent, or leave the key at false"
        )


def check_export(
    trainers: TrainerGroup,
    described: Mapping[int, Mapping[str, Any]],
    declared: Layout,
    plan: str,
    controller: str,
    deadline: Deadline,
) -> str:
    """Let every trainer rank compare, unless all have done so with this very layout since their process began.

    plan: digest of the schedule that ranks were told to make. Returns what a person should know of it, "" where nothing was
    compared. Raises BindError, the first rank's with the others' as notes.
    """
    if all(described[rank].get("witnessed") == declared.digest for rank in range(trainers.world)):
        return ""
    payload = {"plan": plan, "controller": controller}
    answers = trainers.call("witness", dict.fromkeys(range(trainers.world), payload), deadline)
    elements = sum(int(answer["elements"]) for answer in answers.values())
    return f"the trainer's own export agrees with its layout: {elements} elements compared on {trainers.world} ranks"


def compare_export(begin: Callable[[], Comparison], export: Export, rank: int) -> Comparison:
    """Compare this rank's shards with all that is exported. Returns a comparison without problems.

    begin: makes the comparison. Whatever it raises is raised after the export: other ranks are waiting in it.
    Raises BindError for differences, and for an export that fails.
    """
    comparison: Comparison | None = None
    broken: Exception | None = None
    try:
        comparison = begin()
    except Exception as error:  # noqa: BLE001 - raised below, after the collective
        broken = error
    name, count = "", 0
    try:
        for name, tensor in export():
            count += 1
            if comparison is None or broken is not None:
                continue
            try:
                comparison.take(name, tensor)
            except Exception as error:  # noqa: BLE001 - raised below, after the collective
                broken = error
                broken.add_note(f"trainer rank {rank}: while {name} was compared with the trainer's own export")
    except Exception as error:
        found = f"; found until then: {listed(comparison.problems)}" if comparison is not None and comparison.problems else ""
        after = f"after {name}, its tensor number {count}" if count else "before its first tensor"
        failed = BindError(
            f"trainer rank {rank}: the trainer's own export failed {after}: {type(error).__name__}: {error}{found}"
        )
        if broken is not None:
            failed.add_note(f"trainer rank {rank}: and before that {type(broken).__name__}: {broken}")
        raise failed from error
    if broken is not None:
        raise broken
    assert comparison is not None
    comparison.end()
    return comparison


class Comparison:
    """One rank's declared shards against HF tensors as they are exported.

    problems: what was wrong so far. elements: how many of this rank's were compared.
    """

    def __init__(self, declared: Layout, rank: int, memory: Memory) -> None:
        self.declared, self.elements = declared, 0
        self.problems: list[str] = []
        self._rank, self._memory, self._catalog = rank, memory, declared.catalog
        self._params = {p.name: p for p in declared.rank_params(rank)}
        self._shards: dict[str, list[Shard]] = {}
        for shard in declared.rank_shards(rank):
            self._shards.setdefault(shard.tensor, []).append(shard)
        self._missing = dict.fromkeys(self._shards)
        self._held = np.unique(declared.tensor).tolist()

    def take(self, name: str, tensor: Any) -> None:
        """Compare what this rank holds of one exported tensor, given whole."""
        number = self._catalog.ids.get(name)
        if number is None:
            if not self._is_copy(tensor):
                self.problems.append(
                    f"{name} {list(tensor.shape)}: exported, but the plan has no such tensor, and it is not another name for "
                    "the only one of that shape"
                )
            return
        self._missing.pop(name, None)
        shape = self._catalog.pattern_of(number).shape
        if tuple(tensor.shape) != shape:
            self.problems.append(f"{name}: exported with shape {list(tensor.shape)}, declared {list(shape)}")
            return
        for shard in self._shards.get(name, ()):
            if problem := self._differs(shard, tensor):
                self.problems.append(f"{name} in {shard.param}: {problem}")
            self.elements += shard.box.volume

    def end(self) -> None:
        """Raise WitnessError if anything was wrong or never came."""
        problems = self.problems + [
            f"{name}: declared to be in {listed(shard.param for shard in self._shards[name])}, but never exported"
            for name in self._missing
        ]
        if problems:
            where = f"trainer rank {self._rank}"
            raise WitnessError(
                f"{where}: the declared layout is not what the trainer's own export holds: {listed(problems, 4)}"
            )

    def _is_copy(self, tensor: Any) -> bool:
        """Whether a tensor that no plan has may be another name for one that it has: the head of a tied model.

        Only where one tensor alone has that shape. The ranks that hold it compare, and all its elements are held by some. With
        several, one rank could find it equal to this and another to that.
        """
        shape = tuple(tensor.shape)
        alike = [number for number in self._held if self._catalog.pattern_of(number).shape == shape]
        return len(alike) == 1 and not any(
            self._differs(shard, tensor) for shard in self._shards.get(self._catalog.name(alike[0]), ())
        )

    def _differs(self, shard: Shard, tensor: Any) -> str | None:
        """In what the live elements of a shard are not those of the whole tensor, or None."""
        param, dtype = self._params[shard.param], dtype_name(tensor)
        if dtype not in (param.dtype, param.cast_from):
            legal = dict.fromkeys(item for item in (param.dtype, param.cast_from) if item)
            return f"exported as {dtype}, which is not what is held or sent: {', '.join(legal)}"
        tensor = tensor if shard.box.shape else tensor.reshape(1)
        wrong, first = 0, ""
        for at, live in self._pieces(shard, param, dtype):
            part = tensor[tuple(slice(low, low + size) for low, size in zip(at, live.shape, strict=True))]
            theirs = _words(part, live.itemsize)
            differing = live != theirs
            if count := int(differing.sum()):
                if not wrong:
                    inside = np.unravel_index(int(np.argmax(differing)), live.shape)
                    index = [low + int(i) for low, i in zip(at, inside, strict=True)]
                    place = shard.start + sum(
                        (i - low) * step for i, low, step in zip(index, shard.box.offset, shard.strides, strict=False)
                    )
                    first = (
                        f"first at {index} (element {place} of the parameter), {_value(live[inside], dtype)} there and "
                        f"{_value(theirs[inside], dtype)} exported"
                    )
                wrong += count
        return f"{wrong} of {shard.box.volume} elements differ, {first}" if wrong else None

    def _pieces(self, shard: Shard, param: Param, dtype: str) -> Iterator[tuple[tuple[int, ...], NDArray[Any]]]:
        """(first index in the HF tensor, live words as a sync sends them in `dtype`), slice by slice along dim 0."""
        shape, offset, strides = shard.box.shape or (1,), shard.box.offset or (0,), shard.strides or (0,)
        row = prod(shape[1:]) * max(ITEMSIZE[param.dtype], ITEMSIZE[dtype])
        step = max(1, PIECE // max(row, 1))
        for low in range(0, shape[0], step):
            size = (min(step, shape[0] - low), *shape[1:])
            view = self._memory.view(shard.param, shard.start + low * strides[0], strides, size)
            if dtype != param.dtype:
                nbytes = prod(size) * ITEMSIZE[dtype]
                view = cast_into(self._memory.staging(nbytes).bytes(0, nbytes), view, param.dtype, dtype)
            yield (offset[0] + low, *offset[1:]), _words(view, ITEMSIZE[dtype])


def _words(part: Any, size: int) -> NDArray[Any]:
    """The elements of an array or a torch tensor, wherever they are, as unsigned words of `size` bytes on the host."""
    if not on_host(part):
        part = to_host(part.detach().contiguous().view(word_dtype(size)))
    return np.asarray(part, order="C").view(f"u{size}")


def _value(word: Any, dtype: str) -> str:
    """A word as the number that it is, with its bits: two that are printed alike may differ."""
    kind = np.dtype(getattr(ml_dtypes, dtype, None) or dtype)
    return f"{np.asarray([word]).view(kind)[0]} ({int(word):#0{2 * kind.itemsize + 2}x})"
