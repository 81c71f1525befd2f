"""Parallel dims: which index a rank has on every axis, on both sides.

Trainer axes follow Megatron-Core's rank order (parallel_state.RankGenerator): the world is decoded twice, once for dense
parameters (tp, cp, dp, pp) and once for experts (etp, ep, edp, pp). Engine axes follow SGLang and vLLM: tensor ranks are
fastest, pipeline stages slowest, and attention-dp and expert-parallel groups are cut out of the tensor ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Protocol

from weight_sync.errors import ParallelError

TRAINER_ORDERS = ("tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp")


class Dims(Protocol):
    """What resolve needs to know of a side."""

    @property
    def world(self) -> int: ...

    @property
    def sizes(self) -> Mapping[str, int]: ...

    def coords(self, rank: int) -> Mapping[str, int]: ...

    def stage_layers(self, layers: int, stage: int) -> Sequence[Sequence[int]]:
        """Global layer indices of a pipeline stage, one list for each model chunk (virtual stage)."""
        ...


def _positive(**sizes: int) -> None:
    for name, size in sizes.items():
        if type(size) is not int or size < 1:
            raise ParallelError(f"parallel size {name}={size!r}: must be an integer of at least 1")


def _stage_counts(pipeline: Sequence[int], side: str) -> None:
    if any(count < 0 for count in pipeline):
        raise ParallelError(f"{side}.pipeline {list(pipeline)}: layer counts must be 0 or more")


def _decode(rank: int, order: Sequence[str], sizes: Mapping[str, int]) -> dict[str, int]:
    coords: dict[str, int] = {}
    for axis in order:
        rank, coords[axis] = divmod(rank, sizes[axis])
    return coords


@dataclass(frozen=True, slots=True)
class TrainerDims:
    """Trainer parallelism. dp is derived: world / (tp * cp * pp); edp likewise: world / (etp * ep * pp).

    vpp: model chunks on each stage. pipeline: layers of each virtual stage in model order (length pp * vpp); None splits
    evenly. order: Megatron's rank order, fastest axis first.
    """

    ranks: int
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    etp: int = 1
    cp: int = 1
    order: str = TRAINER_ORDERS[0]
    pipeline: tuple[int, ...] | None = None
    dp: int = field(init=False)
    edp: int = field(init=False)

    def __post_init__(self) -> None:
        _positive(ranks=self.ranks, tp=self.tp, pp=self.pp, vpp=self.vpp, ep=self.ep, etp=self.etp, cp=self.cp)
        if self.order not in TRAINER_ORDERS:
            raise ParallelError(f"trainer rank order {self.order!r}: must be one of {', '.join(TRAINER_ORDERS)}")
        for what, size, product in (
            ("tp * cp * pp", self.tp * self.cp * self.pp, f"{self.tp} * {self.cp} * {self.pp}"),
            ("etp * ep * pp", self.etp * self.ep * self.pp, f"{self.etp} * {self.ep} * {self.pp}"),
        ):
            if self.ranks % size:
                raise ParallelError(
                    f"trainer world of {self.ranks} ranks is not a multiple of {what} = {product} = {size}; "
                    f"legal worlds: {size}, {2 * size}, {3 * size}, ..."
                )
        object.__setattr__(self, "dp", self.ranks // (self.tp * self.cp * self.pp))
        object.__setattr__(self, "edp", self.ranks // (self.etp * self.ep * self.pp))
        dense = [self.coords(rank)["pp"] for rank in range(self.ranks)]
        expert = [_decode(rank, self._axes(expert=True), self._expert_sizes())["pp"] for rank in range(self.ranks)]
        if dense != expert:
            raise ParallelError(
                f"with order {self.order} dense and expert pipeline groups differ: tp * cp = {self.tp * self.cp} "
                f"but etp * ep = {self.etp * self.ep}; make them equal or use order {TRAINER_ORDERS[0]}"
            )
        if self.pipeline is not None and len(self.pipeline) != self.pp * self.vpp:
            raise ParallelError(
                f"trainer.pipeline {list(self.pipeline)} gives {len(self.pipeline)} virtual stages, "
                f"but pp * vpp = {self.pp} * {self.vpp} = {self.pp * self.vpp}"
            )
        _stage_counts(self.pipeline or (), "trainer")

    @property
    def world(self) -> int:
        return self.ranks

    @property
    def sizes(self) -> Mapping[str, int]:
        return {
            "tp": self.tp, "pp": self.pp, "vpp": self.vpp, "ep": self.ep, "etp": self.etp,
            "cp": self.cp, "dp": self.dp, "edp": self.edp,
        }  # fmt: skip

    def _axes(self, *, expert: bool) -> list[str]:
        names = {"tp": "etp", "cp": None, "ep": "ep", "dp": "edp", "pp": "pp"} if expert else {"ep": None}
        axes = [names.get(axis, axis) for axis in self.order.split("-")]
        return [axis for axis in axes if axis is not None]

    def _expert_sizes(self) -> dict[str, int]:
        return {"etp": self.etp, "ep": self.ep, "edp": self.edp, "pp": self.pp}

    def coords(self, rank: int) -> Mapping[str, int]:
        if not 0 <= rank < self.ranks:
            raise ParallelError(f"trainer rank {rank} is outside the world of {self.ranks}")
        dense = {"tp": self.tp, "cp": self.cp, "dp": self.dp, "pp": self.pp}
        return _decode(rank, self._axes(expert=True), self._expert_sizes()) | _decode(rank, self._axes(expert=False), dense)

    def stage_layers(self, layers: int, stage: int) -> Sequence[Sequence[int]]:
        stages = self.pp * self.vpp
        if self.pipeline is None:
            if layers % stages:
                raise ParallelError(
                    f"{layers} layers do not divide into pp * vpp = {self.pp} * {self.vpp} = {stages} equal stages; "
                    f"choose sizes that divide {layers}, or give trainer.pipeline with {stages} layer counts"
                )
            counts: Sequence[int] = (layers // stages,) * stages
        else:
            counts = self.pipeline
            if sum(counts) != layers:
                raise ParallelError(f"trainer.pipeline {list(counts)} adds up to {sum(counts)}, the model has {layers}")
        first = [sum(counts[:i]) for i in range(stages)]
        virtual = [chunk * self.pp + stage for chunk in range(self.vpp)]
        return [range(first[i], first[i] + counts[i]) for i in virtual]


@dataclass(frozen=True, slots=True)
class EngineDims:
    """Rollout parallelism: `engines` identical engines of tp * pp workers each.

    attn_dp: attention data-parallel groups inside the tp ranks (attn_tp = tp / attn_dp). moe_ep: expert-parallel size
    inside the tp ranks (moe_tp = tp / moe_ep). Rollout rank = engine * tp * pp + stage * tp + tensor rank.
    pipeline: layers of each stage; None uses `remainder`, the engine's own rule (get_pp_indices) for layers that do not
    divide: "inner" gives one more to the stages before the last, going backwards (vLLM); "last" to the last ones (SGLang).
    """

    tp: int = 1
    pp: int = 1
    attn_dp: int = 1
    moe_ep: int = 1
    engines: int = 1
    pipeline: tuple[int, ...] | None = None
    remainder: str = "inner"

    def __post_init__(self) -> None:
        _positive(tp=self.tp, pp=self.pp, attn_dp=self.attn_dp, moe_ep=self.moe_ep, engines=self.engines)
        for name in ("attn_dp", "moe_ep"):
            size = getattr(self, name)
            if self.tp % size:
                legal = [n for n in range(1, self.tp + 1) if self.tp % n == 0]
                raise ParallelError(f"rollout {name}={size} does not divide tp={self.tp}; legal: {legal}")
        if self.remainder not in ("inner", "last"):
            raise ParallelError(f"pipeline remainder rule {self.remainder!r}: must be inner or last")
        if self.pipeline is not None and len(self.pipeline) != self.pp:
            raise ParallelError(f"rollout.pipeline {list(self.pipeline)} gives {len(self.pipeline)} stages, but pp={self.pp}")
        _stage_counts(self.pipeline or (), "rollout")

    @property
    def world(self) -> int:
        return self.engine_world * self.engines

    @property
    def engine_world(self) -> int:
        return self.tp * self.pp

    @property
    def sizes(self) -> Mapping[str, int]:
        return {
            "tp": self.tp, "pp": self.pp, "attn_dp": self.attn_dp, "attn_tp": self.tp // self.attn_dp,
            "moe_ep": self.moe_ep, "moe_tp": self.tp // self.moe_ep, "engine": self.engines,
        }  # fmt: skip

    def coords(self, rank: int) -> Mapping[str, int]:
        if not 0 <= rank < self.world:
            raise ParallelError(f"rollout rank {rank} is outside the world of {self.world}")
        engine, local = divmod(rank, self.engine_world)
        pp, tp = divmod(local, self.tp)
        attn_dp, attn_tp = divmod(tp, self.tp // self.attn_dp)
        moe_ep, moe_tp = divmod(tp, self.tp // self.moe_ep)
        return {
            "tp": tp, "pp": pp, "attn_dp": attn_dp, "attn_tp": attn_tp,
            "moe_ep": moe_ep, "moe_tp": moe_tp, "engine": engine,
        }  # fmt: skip

    def stage_layers(self, layers: int, stage: int) -> Sequence[Sequence[int]]:
        if self.pipeline is not None:
            counts = list(self.pipeline)
            if sum(counts) != layers:
                raise ParallelError(f"rollout.pipeline {counts} adds up to {sum(counts)}, the model has {layers} layers")
        else:
            if layers < self.pp:
                raise ParallelError(f"{layers} layers cannot fill rollout pp={self.pp} stages; legal: 1 to {layers}")
            each, left = divmod(layers, self.pp)
            counts = [each] * self.pp
            for i in range(left):
                counts[-(i + 2) if self.remainder == "inner" else -(i + 1)] += 1
        first = sum(counts[:stage])
        return [range(first, first + counts[stage])]


def gather_rank_map(trainer: TrainerDims, rollout: EngineDims) -> dict[int, list[int]]:
    """Trainer rank -> rollout ranks it sends to when every pipeline stage gathers full tensors first.

    Used by strategies that gather: the sources of one stage (its ranks, in rank order) take the ranks of every engine in
    turn, so that source i of a stage feeds engine ranks i, i + n, i + 2n, ... (n = ranks in a stage) of every engine. What
    is left over when n does not divide an engine is dealt out one by one, so that no two sources of a stage differ by more
    than one target. PP4 with 32 trainer ranks and two engines of 16: source 0 of each stage feeds 0, 16, 8, 24, source 1
    feeds 1, 17, 9, 25: two replicas of each shard, equal loads.
    """
    width = rollout.engine_world
    result: dict[int, list[int]] = {}
    for stage in range(trainer.pp):
        members = [rank for rank in range(trainer.world) if trainer.coords(rank)["pp"] == stage]
        n = len(members)
        whole = width - width % n
        for i, rank in enumerate(members):
            local = range(i, whole, n)
            result[rank] = [engine * width + r for r in local for engine in range(rollout.engines)]
        left = [engine * width + r for engine in range(rollout.engines) for r in range(whole, width)]
        for k, target in enumerate(left):
            result[members[k % n]].append(target)
    return result


def world_error(side: str, sizes: Mapping[str, int], world: int) -> ParallelError:
    """The error for sizes that do not multiply to the processes that exist."""
    text = " * ".join(f"{name}={size}" for name, size in sizes.items())
    return ParallelError(f"{side}: {text} = {prod(sizes.values())}, but there are {world} ranks")
