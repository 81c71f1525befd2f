"""A whole job in one process: trainer ranks and engines over plain arrays, with guard bytes, a log and traps.

Every rank's parameters lie in one buffer with guard bytes between them; the buffer is registered whole, so a write that
leaves its parameter lands in guard bytes, and World.check() finds it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import ml_dtypes
import numpy as np
from traps import Traps

from weight_sync.config import engine_yaml, family_yaml
from weight_sync.delta.spec import DeltaSpec
from weight_sync.ids import ITEMSIZE
from weight_sync.layout.box import row_major
from weight_sync.layout.table import Layout, Param, layout_from_shards
from weight_sync.plan.schedule import Budget, CostModel
from weight_sync.quant.emission import scheme_of
from weight_sync.quant.reference import reference
from weight_sync.session.connect import SyncSpec
from weight_sync.session.failure import FailurePolicy
from weight_sync.session.inprocess import ArraySource, InProcessEngine, InProcessTrainers, typed
from weight_sync.session.inputs import Declared, computed_names, dims_of, layout_of, model_of
from weight_sync.session.session import Outcome, Timeouts, WeightSync
from weight_sync.session.source import SourceAgent
from weight_sync.session.state import State
from weight_sync.session.target import TargetAgent
from weight_sync.session.verify import Level
from weight_sync.transport.base import Transport
from weight_sync.transport.memory import MemoryHub, MemoryTransport

GUARD = 64
"""Bytes before, between and after parameters."""

ALWAYS_DIRECT = CostModel(seconds_per_write=0.0)
NEVER_SHORT_RUNS = CostModel(seconds_per_write=1.0)
"""Every strided transfer is packed, unpacked or both."""

MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "head_dim": 4,
    "intermediate_size": 24,
    "vocab_size": 50,
    "num_experts": 6,
    "moe_intermediate_size": 12,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
DENSE = {k: v for k, v in MOE.items() if not k.startswith(("num_experts", "moe", "decoder", "mlp"))} | {
    "architectures": ["Qwen3ForCausalLM"]
}


def declared(
    config: Mapping[str, Any] = MOE, trainer: Mapping[str, Any] | None = None, rollout: Mapping[str, Any] | None = None,
    engine: str = "sglang",
) -> tuple[Declared, Declared]:  # fmt: skip
    """Both sides of a job; by default 2 trainer ranks (tp2, ep2) and one engine of 2 workers (tp2)."""
    family = family_yaml("qwen3_moe" if "num_experts" in config else "qwen3")
    ours = dict(trainer or ({"ranks": 2, "tp": 2, "ep": 2} if "num_experts" in config else {"ranks": 2, "tp": 2}))
    convention = engine_yaml(engine)
    theirs = {"remainder": convention.get("remainder", "inner"), **(rollout or {"tp": 2})}
    source = Declared(family, dict(config), ours, None, {"vocab_multiple": 8 * ours.get("tp", 1)})
    return source, Declared(family, dict(config), theirs, convention)


class TrappedSource(SourceAgent):
    traps: Traps

    def call(self, method: str, payload: Mapping[str, Any]) -> dict[str, Any]:
        self.traps.enter(f"trainer {self.rank}", method)
        reply = super().call(method, payload)
        self.traps.leave(f"trainer {self.rank}", method)
        return reply


class TrappedTarget(TargetAgent):
    traps: Traps
    world_rank: int

    def call(self, method: str, payload: Mapping[str, Any]) -> dict[str, Any]:
        self.traps.enter(f"worker {self.world_rank}", method)
        reply = super().call(method, payload)
        self.traps.leave(f"worker {self.world_rank}", method)
        return reply


class TrappedEngine(InProcessEngine):
    traps: Traps


def _trapped(verb: str) -> Callable[..., Any]:
    def call(self: TrappedEngine, *args: Any, **named: Any) -> Any:
        self.traps.enter(f"engine {self.name}", verb)
        result = getattr(InProcessEngine, verb)(self, *args, **named)
        self.traps.leave(f"engine {self.name}", verb)
        return result

    return call


for _verb in (
    "describe",
    "claim",
    "record",
    "bind",
    "pause",
    "begin",
    "place",
    "patch",
    "pull",
    "verify",
    "check",
    "finish",
    "resume",
    "abort",
):
    setattr(TrappedEngine, _verb, _trapped(_verb))


class Buffer:
    """One rank's parameters in one allocation, between guard bytes. noise: what is in it at first."""

    def __init__(self, params: Sequence[Param], noise: np.random.Generator) -> None:
        at = GUARD
        places: dict[str, tuple[int, Param]] = {}
        for p in params:
            places[p.name] = (at, p)
            at += -(-p.numel * ITEMSIZE[p.dtype] // 8) * 8 + GUARD
        self.bytes = noise.integers(0, 256, at, np.uint8)
        self.start = {name: place for name, (place, _) in places.items()}
        self.arrays: dict[str, Any] = {
            name: typed(self.words(self.bytes, name, p).reshape(p.shape), p.dtype) for name, (_, p) in places.items()
        }

    def words(self, raw: np.ndarray[Any, Any], name: str, p: Param) -> Any:
        size = ITEMSIZE[p.dtype]
        return raw[self.start[name] : self.start[name] + p.numel * size].view(f"u{size}")

    def elements(self, raw: np.ndarray[Any, Any], p: Param, start: int, strides: Sequence[int], shape: Sequence[int]) -> Any:
        """A region of a parameter in `raw` (this buffer or a copy of it), as the layout describes it."""
        flat = self.words(raw, p.name, p)
        return np.lib.stride_tricks.as_strided(flat[start:], tuple(shape), tuple(s * flat.itemsize for s in strides))


@dataclass
class World:
    """Everything of one job. See build()."""

    sync: WeightSync
    trainers: InProcessTrainers
    engines: list[TrappedEngine]
    sources: list[ArraySource]
    layouts: tuple[Layout, Layout]
    source: list[Buffer]
    target: list[Buffer]
    hub: MemoryHub
    traps: Traps
    noise: np.random.Generator
    source_agents: list[TrappedSource]
    target_agents: list[TrappedTarget]
    sides: tuple[Declared, Declared]
    open: OpenTransport
    spares: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    hf: dict[str, np.ndarray[Any, Any]] = field(default_factory=dict)
    served: dict[str, np.ndarray[Any, Any]] = field(default_factory=dict)
    """Words of the tensors that quantised weights become, in place of the weights'."""

    def step(self) -> None:
        """An optimiser step: other values everywhere. Refused while a sync holds the trainer, as a real one is."""
        assert not any(source.quiet for source in self.sources), "a step during a sync"
        layout = self.layouts[0]
        for pattern in layout.catalog.patterns:
            words = f"u{ITEMSIZE[pattern.dtype]}"
            if pattern.made is not None and pattern.made.base != pattern.template:
                continue
            for name in pattern.names():
                raw = self.noise.integers(0, 256, prod(pattern.shape) * ITEMSIZE[pattern.dtype], np.uint8)
                self.hf[name] = raw.view(words).reshape(pattern.shape)
        if layout.catalog.scheme:
            self.quantised()
        for rank, buffer in enumerate(self.source):
            self._fill(layout, rank, buffer, buffer.bytes)

    def quantised(self) -> None:
        """Numbers for the weights that are quantised, and what they become by the reference."""
        catalog = self.layouts[1].catalog
        scheme = scheme_of(catalog.scheme)
        weights = sorted({int(base) for base in catalog.base[catalog.is_made]})
        for base in weights:
            shape = catalog.pattern_of(base).shape
            spread = np.exp2(self.noise.integers(-12, 4, (shape[0], 1)))
            self.hf[catalog.name(base)] = (
                (self.noise.standard_normal(shape) * spread).astype(ml_dtypes.bfloat16).view(np.uint16)
            )
        self.become(scheme, weights)

    def become(self, scheme: Any, weights: Sequence[int]) -> None:
        catalog = self.layouts[1].catalog
        of: dict[int, list[int]] = {}
        for tensor in np.flatnonzero(catalog.is_made).tolist():
            of.setdefault(int(catalog.base[tensor]), []).append(tensor)
        values = {base: self.hf[catalog.name(base)].view(ml_dtypes.bfloat16) for base in weights}
        totals: dict[int, float] = {}
        for base, array in values.items():
            mate = int(catalog.sharer[base])
            totals[mate] = max(totals.get(mate, 0.0), float(np.abs(array.astype(np.float32)).max()))
        for base in weights:
            made = reference(scheme, values[base], total=totals[int(catalog.sharer[base])])
            for tensor in of[base]:
                pattern = catalog.pattern_of(tensor)
                words = made[pattern.made.part].view(f"u{ITEMSIZE[pattern.made.dtype]}")
                self.served[catalog.name(tensor)] = words.reshape(pattern.shape)

    def _fill(self, layout: Layout, rank: int, buffer: Buffer, raw: np.ndarray[Any, Any]) -> None:
        hf = self.hf if layout.side == "trainer" else self.hf | self.served
        params = {p.name: p for p in layout.rank_params(rank)}
        for shard in layout.rank_shards(rank):
            cut = tuple(slice(o, e) for o, e in zip(shard.box.offset, shard.box.end, strict=True))
            view = buffer.elements(raw, params[shard.param], shard.start, shard.strides, shard.box.shape)
            words = hf[shard.tensor][cut]
            if words.itemsize < view.itemsize:  # a declared cast from bfloat16 to float32
                words = words.astype(np.uint32) << 16
            view[...] = words

    def expected(self) -> list[np.ndarray[Any, Any]]:
        """Every rollout rank's whole buffer as it must be after a sync of the trainer's values now: guards unchanged."""
        result = []
        for rank, buffer in enumerate(self.target):
            raw = buffer.bytes.copy()
            self._fill(self.layouts[1], rank % self.width, buffer, raw)  # engines are alike
            result.append(raw)
        return result

    def commit(self, version: int) -> Outcome:
        """A sync that must succeed, with every byte of every engine compared."""
        expected = self.expected()
        kept = [buffer.bytes.copy() for buffer in self.source]
        outcome = self.sync.sync(version)
        self.check(expected)
        assert all(np.array_equal(a, b.bytes) for a, b in zip(kept, self.source, strict=True)), "the trainer's bytes changed"
        assert (self.sync.version, self.sync.state, outcome.version) == (version, State.IDLE, version)
        assert outcome.bytes == self.payload()
        assert [(e.version, e.serving, e.reason) for e in self.engines] == [(version, True, None)] * len(self.engines)
        assert not any(source.quiet for source in self.sources)
        return outcome

    def payload(self) -> int:
        """Bytes that a sync has to write: every engine element that is not padding."""
        params = [p for p in self.layouts[1].params if p.rank < self.width]
        return sum((p.numel - p.filling) * ITEMSIZE[p.dtype] for p in params) * len(self.engines)

    @property
    def width(self) -> int:
        """Workers of one engine."""
        return self.layouts[1].world // int(self.sides[1].dims.get("engines", 1))

    def check(self, expected: Sequence[np.ndarray[Any, Any]]) -> None:
        for rank, (want, buffer) in enumerate(zip(expected, self.target, strict=True)):
            wrong = np.flatnonzero(want != buffer.bytes)
            assert not len(wrong), f"rollout rank {rank}: {len(wrong)} bytes differ, first at {wrong[0]}"

    def restart_trainer(self, rank: int) -> None:
        """The rank's process is replaced by a new one with the same parameters at other addresses."""
        self.source[rank] = moved(self.source[rank], list(self.layouts[0].rank_params(rank)))
        self.sources[rank].arrays = self.source[rank].arrays
        agent = _source_agent(self.sources[rank], self.source_agents[rank]._open, self.traps)
        self.source_agents[rank] = self.trainers._agents[rank] = agent


def moved(buffer: Buffer, params: Sequence[Param]) -> Buffer:
    """The same content in another allocation."""
    other = Buffer(params, np.random.default_rng(0))
    other.bytes[:] = buffer.bytes
    return other


def fresh_target(world: World, rank: int) -> TrappedTarget:
    """A new agent for a rollout rank, as a restarted engine process has one; it takes the old one's place."""
    old = world.target_agents[rank]
    agent = TrappedTarget(rank=old.rank, host=old.host, coords=old.coords, tensors=old._tensors, transport=old._open)
    agent.traps, agent.world_rank = world.traps, rank
    width = len(world.target) // len(world.engines)
    world.target_agents[rank] = world.engines[rank // width]._agents[rank % width] = agent
    return agent


def _source_agent(source: Any, transport: Callable[[], Transport], traps: Traps) -> TrappedSource:
    agent = TrappedSource(source, transport)
    agent.traps = traps
    return agent


def _engine(
    name: str, ranks: range, layout: Layout, side: Declared, buffer: Callable[[int], Buffer],
    transport: Callable[[int], Transport], traps: Traps,
) -> TrappedEngine:  # fmt: skip
    """An engine of these rollout ranks, which are those of engine 0 moved on."""
    dims = dims_of(side, "rollout")
    agents = []
    for local, rank in enumerate(ranks):
        agent = TrappedTarget(
            rank=local, host="localhost", coords=dims.coords(local), tensors=lambda r=rank: buffer(r).arrays,
            transport=lambda r=rank: transport(r),
        )  # fmt: skip
        agent.traps, agent.world_rank = traps, rank
        agents.append(agent)
    computed = computed_names(side, "rollout")
    recording: dict[int, dict[str, Any]] = {}
    for local in range(len(ranks)):
        shards = layout.rank_to_json(local)
        cast = {s["tensor"]: computed[s["tensor"]] for s in shards if s["tensor"] in computed}
        recording[local] = {"shards": shards, "unexplained": cast}
    engine = TrappedEngine(name, agents, model=side.config, sizes=dims.sizes, recording=recording)
    engine.traps = traps
    return engine


@dataclass
class Spare:
    """An engine that is no member yet, with its buffers; its weights are noise."""

    engine: TrappedEngine
    buffers: list[Buffer]


def spare(world: World, name: str) -> Spare:
    """One more engine like the others. admitted() makes the world expect the weights there too."""
    layout, count = world.layouts[1], next(world.spares)
    buffers = [Buffer(list(layout.rank_params(local)), world.noise) for local in range(world.width)]
    first = 1000 * count
    engine = _engine(
        name, range(first, first + world.width), layout, world.sides[1], lambda rank: buffers[rank - first],
        lambda rank: world.open("rollout", rank, world.hub), world.traps,
    )  # fmt: skip
    return Spare(engine, buffers)


def admitted(world: World, one: Spare) -> None:
    world.engines.append(one.engine)
    world.target += one.buffers
    world.target_agents += one.engine._agents.values()  # type: ignore[arg-type]


def departed(world: World, name: str) -> Spare:
    """Expect nothing of this engine any more."""
    place = [engine.name for engine in world.engines].index(name)
    first, last = place * world.width, (place + 1) * world.width
    gone = Spare(world.engines.pop(place), world.target[first:last])
    # New lists: the first engines find their buffers by their place in the old one.
    world.target = world.target[:first] + world.target[last:]
    world.target_agents = world.target_agents[:first] + world.target_agents[last:]
    return gone


OpenTransport = Callable[[str, int, MemoryHub], Transport]
"""("trainer" or "rollout", rank, hub) -> a transport."""


def plain(side: str, rank: int, hub: MemoryHub) -> Transport:
    return MemoryTransport(hub)


def build(
    sides: tuple[Declared, Declared] | None = None,
    *,
    transport: OpenTransport = plain,
    seed: int = 0,
    explicit: bool = False,
    witness: bool = True,
    costs: CostModel | None = None,
    budget: Budget | None = None,
    timeouts: Timeouts | None = None,
    observer: Any = None,
    pause: Any = "retract",
    level: Level = Level.DIGEST,
    failure: FailurePolicy | None = None,
    delta: DeltaSpec | None = None,
) -> World:
    """A job that is ready to sync, its first optimiser step taken. explicit: the trainer publishes FSDP-like shards."""
    source_side, target_side = sides or declared()
    noise = np.random.default_rng(seed)
    shards: dict[int, list[dict[str, Any]]] = {}
    if explicit:
        source_layout = rows_over(source_side, dims_of(source_side, "trainer").world)
        shards = {rank: source_layout.rank_to_json(rank) for rank in range(source_layout.world)}
    else:
        source_layout = _resolved(source_side, "trainer")
    target_layout = _resolved(target_side, "rollout")
    source_dims, target_dims = dims_of(source_side, "trainer"), dims_of(target_side, "rollout")
    source = [Buffer(list(source_layout.rank_params(r)), noise) for r in range(source_layout.world)]
    target = [Buffer(list(target_layout.rank_params(r)), noise) for r in range(target_layout.world)]
    hub, traps = MemoryHub(), Traps()
    sources = [
        ArraySource(r, b.arrays, {} if explicit else source_dims.coords(r), shards=shards.get(r)) for r, b in enumerate(source)
    ]
    source_agents = [
        _source_agent(s, lambda r=r: transport("trainer", r, hub), traps) for r, s in enumerate(sources)
    ]  # fmt: skip
    engines_count = target_dims.sizes["engine"]
    width = target_layout.world // engines_count
    target_agents: list[TrappedTarget] = []
    engines: list[TrappedEngine] = []
    for i in range(engines_count):
        part = range(i * width, (i + 1) * width)
        engines.append(
            _engine(
                f"e{i}", part, target_layout, target_side, target.__getitem__, lambda r: transport("rollout", r, hub), traps
            )
        )
        target_agents += engines[-1]._agents.values()  # type: ignore[arg-type]
    spec = SyncSpec(
        None if explicit else source_side, target_side, witness=witness,
        costs=costs or CostModel(), budget=budget or Budget(), delta=delta,
    )  # fmt: skip
    trainers = InProcessTrainers(source_agents)
    sync = WeightSync(
        trainers, engines, spec, pause=pause, observer=observer, level=level, failure=failure,
        timeouts=timeouts or Timeouts(connect=60, sync=60, abort=30),
    )  # fmt: skip
    world = World(
        sync, trainers, engines, sources, (source_layout, target_layout), source, target, hub, traps, noise,
        source_agents, target_agents, (source_side, target_side), transport,
    )  # fmt: skip
    world.step()
    return world


_RESOLVED: dict[str, Layout] = {}


def _resolved(side: Declared, which: str) -> Layout:
    """layout_of(), once for equal inputs: what the test expects, not what is tested."""
    key = f"{which} {side}"
    if key not in _RESOLVED:
        _RESOLVED[key] = layout_of(side, which)
    return _RESOLVED[key]


def rows_over(side: Declared, ranks: int) -> Layout:
    """Every HF tensor cut along dim 0 over all ranks, unevenly where it does not divide: what FSDP2 does."""
    model, _ = model_of(side)
    params: list[list[Param]] = [[] for _ in range(ranks)]
    shards: list[list[dict[str, Any]]] = [[] for _ in range(ranks)]
    for pattern in model.catalog.patterns:
        if pattern.made is not None and pattern.made.base != pattern.template:
            continue
        each = -(-pattern.shape[0] // ranks)
        for name in pattern.names():
            for rank in range(ranks):
                low, high = min(rank * each, pattern.shape[0]), min((rank + 1) * each, pattern.shape[0])
                if low == high:
                    continue
                shape = (high - low, *pattern.shape[1:])
                params[rank].append(Param(rank, name, shape, side.held_as or pattern.dtype))
                offset = [low] + [0] * (len(shape) - 1)
                shards[rank].append(
                    {"tensor": name, "offset": offset, "shape": list(shape), "param": name, "start": 0,
                     "strides": list(row_major(shape))}
                )  # fmt: skip
    return layout_from_shards("trainer", model.catalog, params, shards)
