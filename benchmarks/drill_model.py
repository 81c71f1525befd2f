"""What the drills' trainers hold and what their engines must hold: one made-up model whose every value follows from a number.

A `step` stands for an optimiser step: any process can compute every tensor of any step, so nothing has to be kept or passed
around to know, byte for byte, what a live engine must contain.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from weight_sync.config import engine_yaml, family_yaml
from weight_sync.ids import ITEMSIZE
from weight_sync.layout.table import Layout
from weight_sync.session.contracts import EngineDescription, LiveParam
from weight_sync.session.inputs import Declared, layout_of

KIND = "qwen3"
SIZES = {"vocab_size": 65536, "num_hidden_layers": 2, "dtype": "bfloat16"}
"""34 MB in two large tensors and 17 small ones: long enough on the wire to be interrupted there, and no padding on any side."""

FEW = 1 << 20
"""A step of n * FEW + m is step m with n times a few elements changed (1 of 128 each time)."""

Words = np.ndarray[Any, np.dtype[np.uint16]]


def sides(config: Mapping[str, Any], engine: str, trainers: int, tp: int, engines: int) -> tuple[Declared, Declared]:
    """(trainer of `trainers` tensor-parallel ranks, rollout of `engines` engines of `tp` workers)."""
    family, convention = family_yaml(KIND), engine_yaml(engine)
    ours = {"ranks": trainers, "tp": trainers}
    theirs = {"tp": tp, "engines": engines, "remainder": convention.get("remainder", "inner")}
    return Declared(family, dict(config), ours, None, {"vocab_multiple": 1}), Declared(family, dict(config), theirs, convention)


class Values:
    """The tensors of a layout at any step, as the 16-bit words of bfloat16 numbers between 1/64 and 1/32 of either sign."""

    def __init__(self, side: Declared, name: str) -> None:
        self.layout: Layout = layout_of(side, name)
        self._shape = {n: p.shape for p in self.layout.catalog.patterns for n in p.names()}
        assert {p.dtype for p in self.layout.catalog.patterns} == {"bfloat16"}
        largest = max(prod(shape) for shape in self._shape.values())
        self._noise = np.arange(largest, dtype=np.uint32) * np.uint32(2654435761)

    def tensor(self, name: str, step: int) -> Words:
        shape = self._shape[name]
        few, step = divmod(step, FEW)
        start = np.uint32(zlib.crc32(f"{name} {step}".encode()))
        mixed = (self._noise[: prod(shape)] + start) >> np.uint32(13)
        words = mixed.astype(np.uint16) & np.uint16(0x807F) | np.uint16(0x3C80)
        if few:
            words[few % 128 :: 128] ^= np.uint16(1)
        return words.reshape(shape)

    def fill(self, rank: int, step: int, params: Mapping[str, Words]) -> None:
        """Set the parameters of a rank (flat words by name)."""
        for words, live in self._regions(rank, step, params.__getitem__):
            live[...] = words

    def wrong(self, rank: int, step: int, read: Callable[[str, int], Words]) -> list[str]:
        """Parameters of a rank that differ from what they are at this step. read(name, elements): their flat words."""
        found: dict[str, int] = {}
        held = {p.name: read(p.name, p.numel) for p in self.layout.rank_params(rank)}
        covered = 0
        regions = self._regions(rank, step, held.__getitem__)
        for shard, (words, live) in zip(self.layout.rank_shards(rank), regions, strict=True):
            covered += words.size
            if count := int(np.count_nonzero(words != live)):
                found[shard.param] = found.get(shard.param, 0) + count
        assert covered == sum(p.numel - p.filling for p in self.layout.rank_params(rank))
        return [f"{name}: {count} elements" for name, count in found.items()]

    def _regions(self, rank: int, step: int, flat: Callable[[str], Words]) -> Any:
        made: tuple[str, Any] = ("", None)  # shards of one tensor come in a row, and large ones take a while to compute
        for shard in self.layout.rank_shards(rank):
            if made[0] != shard.tensor:
                made = (shard.tensor, self.tensor(shard.tensor, step))
            cut = tuple(slice(o, e) for o, e in zip(shard.box.offset, shard.box.end, strict=True))
            strides = tuple(s * 2 for s in shard.strides)
            yield made[1][cut], np.lib.stride_tricks.as_strided(flat(shard.param)[shard.start :], shard.box.shape, strides)


def wrong_in_engine(values: Values, about: EngineDescription, pids: list[int], step: int) -> list[str]:
    """Live parameters of an engine that are not those of `step`, read by the kernel out of its workers' memory.

    Nothing of the engine, the plug-in or a transport takes part, so it also works on a stopped process. values: of one engine.
    """
    lines: list[str] = []
    for rank, pid in zip(about.ranks, pids, strict=True):
        places = {p.name: (rank.storages[p.storage].address + p.offset, p) for p in rank.params}
        with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:

            def read(name: str, count: int, memory: Any = memory, places: Any = places) -> Words:
                address, param = places[name]
                assert count == prod(param.shape)
                assert _contiguous(param)
                memory.seek(address)
                return np.frombuffer(_exactly(memory, count * ITEMSIZE[param.dtype]), np.uint16)

            lines += [f"{about.name} rank {rank.rank} {line}" for line in values.wrong(rank.rank, step, read)]
    return lines


def _contiguous(param: LiveParam) -> bool:
    return all(step == prod(param.shape[i + 1 :]) for i, step in enumerate(param.stride) if param.shape[i] > 1)


def _exactly(memory: Any, nbytes: int) -> bytes:
    data = b""
    while len(data) < nbytes:
        part = memory.read(nbytes - len(data))
        if not part:
            raise OSError(f"memory ended after {len(data)} of {nbytes} bytes")
        data += part
    return data
