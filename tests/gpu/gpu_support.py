"""Two processes with live parameters on GPUs: trainer ranks here, engine workers in a process of their own.

The engine's process is on the second GPU where there is one. What must arrive is computed from the trainer's tensors in numpy,
through the declared layouts, without plan, session or transport.
"""

from __future__ import annotations

import multiprocessing as mp
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np

from weight_sync.delta.spec import DeltaSpec
from weight_sync.ids import ITEMSIZE, Deadline
from weight_sync.layout.table import Layout
from weight_sync.plan.schedule import Budget, CostModel
from weight_sync.session.connect import SyncSpec
from weight_sync.session.contracts import EngineDescription, RankDescription
from weight_sync.session.inprocess import InProcessEngine, InProcessTrainers
from weight_sync.session.inputs import Declared, computed_names, dims_of, layout_of
from weight_sync.session.landing import Landing
from weight_sync.session.memory import memory_of
from weight_sync.session.session import WeightSync
from weight_sync.session.source import SourceAgent
from weight_sync.session.target import TargetAgent
from weight_sync.session.verify import Level
from weight_sync.transport import registry


def tensors_of(layout: Layout, rank: int, seed: int) -> dict[str, Any]:
    """A rank's parameters on the current device, of random bits."""
    import torch

    generator = torch.Generator(device="cuda").manual_seed(1000 * seed + rank)
    result = {}
    for p in layout.rank_params(rank):
        raw = torch.randint(0, 256, (p.numel * ITEMSIZE[p.dtype],), dtype=torch.uint8, device="cuda", generator=generator)
        result[p.name] = raw.view(getattr(torch, p.dtype)).view(p.shape)
    return result


def words(tensor: Any) -> np.ndarray[Any, Any]:
    """The bits of a tensor as unsigned words, flat, on the host."""
    import torch

    size = tensor.element_size()
    return tensor.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy().view(f"u{size}")


class Source:
    """TrainerSource over tensors that nobody steps while a sync runs."""

    def __init__(self, rank: int, tensors: dict[str, Any], coords: Mapping[str, int]) -> None:
        self.rank, self.live, self.coords, self.quiet = rank, tensors, dict(coords), False

    def describe(self) -> RankDescription:
        memory = memory_of(self.live, f"trainer rank {self.rank}")
        return RankDescription(
            self.rank, "localhost", self.coords, memory.epoch, memory.params, memory.storages, device=memory.device
        )

    def tensors(self) -> Mapping[str, Any]:
        return self.live

    def quiesce(self) -> None:
        self.quiet = True

    def release(self) -> None:
        self.quiet = False


class Slow:
    """A worker's own loader that asks the GPU for its copies, behind something else, and returns before they are done."""

    CYCLES = 20_000_000

    def __init__(self, layout: Layout, rank: int, live: Mapping[str, Any]) -> None:
        self.shards, self.live = layout.rank_shards(rank), live

    def allocate(self, nbytes: int, places: Mapping[str, tuple[list[int], str, int]]) -> dict[str, Any]:
        import torch

        raw = torch.zeros(nbytes, dtype=torch.uint8, device="cuda")
        return {
            name: raw[at : at + prod(shape) * ITEMSIZE[dtype]].view(getattr(torch, dtype)).view(list(shape))
            for name, (shape, dtype, at) in places.items()
        }

    def feed(self, tensors: Mapping[str, Any], first: bool, last: bool) -> None:
        import torch

        torch.cuda._sleep(self.CYCLES)
        for shard in self.shards:
            if shard.tensor in tensors:
                cut = tuple(slice(o, e) for o, e in zip(shard.box.offset, shard.box.end, strict=True))
                view = self.live[shard.param].view(-1).as_strided(shard.box.shape, shard.strides, shard.start)
                view.copy_(tensors[shard.tensor][cut])

    def abandon(self) -> None: ...

    def settle(self) -> dict[str, int]:
        return {}


class Workers:
    """All workers of one engine. Runs in the engine's process; called through Remote."""

    def __init__(self, side: Declared, transport: dict[str, Any], seed: int) -> None:
        import torch

        torch.cuda.set_device(torch.cuda.device_count() - 1)
        self.layout, dims = layout_of(side, "rollout"), dims_of(side, "rollout")
        self.live = [tensors_of(self.layout, rank, seed) for rank in range(dims.world)]
        self.agents = [
            TargetAgent(
                rank=rank, host="localhost", coords=dims.coords(rank), tensors=lambda r=rank: self.live[r],
                transport=lambda: registry.create(**transport), loader=lambda r=rank: Slow(self.layout, r, self.live[r]),
            )
            for rank in range(dims.world)
        ]  # fmt: skip

    def call(self, rank: int, method: str, payload: Mapping[str, Any]) -> dict[str, Any]:
        return self.agents[rank].call(method, payload)

    def content(self) -> list[dict[str, np.ndarray[Any, Any]]]:
        return [{name: words(t) for name, t in tensors.items()} for tensors in self.live]

    def flip_staged(self, rank: int, byte: int) -> None:
        """Invert one byte of the staging buffer, of what arrived there."""
        import torch

        raw = self.agents[rank]._stage.bytes(byte, 1)
        raw[...] = ~raw
        torch.cuda.synchronize()

    def flip(self, rank: int, name: str, byte: int) -> None:
        """Invert one byte of a live parameter."""
        import torch

        raw = self.live[rank][name].view(-1).view(torch.uint8)
        raw[byte] = ~raw[byte]
        torch.cuda.synchronize()


def _serve(connection: Any, *arguments: Any) -> None:
    workers = Workers(*arguments)
    connection.send(None)
    while (message := connection.recv()) is not None:
        try:
            connection.send((True, getattr(workers, message[0])(*message[1:])))
        except Exception as error:  # noqa: BLE001 - goes to the test, which raises it
            connection.send((False, error))


class Remote:
    """The engine's process."""

    def __init__(self, *arguments: Any) -> None:
        context = mp.get_context("spawn")
        self._connection, child = context.Pipe()
        self.process = context.Process(target=_serve, args=(child, *arguments), daemon=True)
        self.process.start()
        if not self._connection.poll(120):
            raise RuntimeError("the engine's process did not start")
        self._connection.recv()

    def __call__(self, *message: Any) -> Any:
        self._connection.send(message)
        if not self._connection.poll(120):
            raise RuntimeError(f"no answer to {message[0]}")
        good, value = self._connection.recv()
        if not good:
            raise value
        return value


class Engine(InProcessEngine):
    """The double of an engine whose workers are in another process. before: run by name of the verb, once."""

    def __init__(self, name: str, remote: Remote, side: Declared, layout: Layout) -> None:
        dims = dims_of(side, "rollout")
        computed = computed_names(side, "rollout")
        recording: dict[int, dict[str, Any]] = {}
        for rank in range(dims.world):
            shards = layout.rank_to_json(rank)
            cast = {s["tensor"]: computed[s["tensor"]] for s in shards if s["tensor"] in computed}
            recording[rank] = {"shards": shards, "unexplained": cast}
        ranks = [_Rank(rank) for rank in range(dims.world)]
        super().__init__(name, ranks, model=side.config, sizes=dims.sizes, recording=recording)  # type: ignore[arg-type]
        self.remote = remote
        self.before: dict[str, Any] = {}

    def describe(self, deadline: Deadline) -> EngineDescription:
        return replace(super().describe(deadline), no_loader="")

    def _each(self, method: str, payloads: Mapping[int, Mapping[str, Any]], deadline: Deadline) -> dict[int, dict[str, Any]]:
        if method in self.before:
            self.before.pop(method)()
        return {rank: self.remote("call", rank, method, dict(payload)) for rank, payload in payloads.items()}


class _Rank:
    def __init__(self, rank: int) -> None:
        self.rank = rank


class Job:
    """One trainer here, engines in their processes, a session between them."""

    def __init__(
        self,
        sides: tuple[Declared, Declared],
        transport: dict[str, Any],
        *,
        costs: CostModel | None = None,
        budget: Budget | None = None,
        level: Level = Level.DIGEST,
        delta: DeltaSpec | None = None,
        landing: Landing | None = None,
    ) -> None:
        import torch

        torch.cuda.set_device(0)
        self.sides, self.transport = sides, transport
        self.layouts = layout_of(sides[0], "trainer"), layout_of(sides[1], "rollout")
        dims = dims_of(sides[0], "trainer")
        self.sources = [Source(r, tensors_of(self.layouts[0], r, 1), dims.coords(r)) for r in range(dims.world)]
        self._same_where_replicated()
        agents = [SourceAgent(source, lambda: registry.create(**transport)) for source in self.sources]
        self.source_agents = agents
        self.engine = self.start("e0", 2)
        spec = SyncSpec(
            *sides, costs=costs or CostModel(), budget=budget or Budget(), delta=delta, landing=landing or Landing()
        )
        self.trainers = InProcessTrainers(agents)
        self.sync = WeightSync(self.trainers, [self.engine], spec, level=level)

    def start(self, name: str, seed: int) -> Engine:
        return Engine(name, Remote(self.sides[1], self.transport, seed), self.sides[1], self.layouts[1])

    def step(self) -> None:
        """Other values everywhere."""
        for source in self.sources:
            for tensor in source.live.values():
                size = tensor.element_size()
                kind = {2: "int16", 4: "int32"}[size]
                import torch

                tensor.view(getattr(torch, kind)).bitwise_xor_(0x0155)
        torch.cuda.synchronize()

    def nudge(self, share: float) -> None:
        """Other values in this share of the elements, the same ones wherever a box is held."""
        import torch

        for source in self.sources:
            for tensor in source.live.values():
                words = tensor.view(-1).view(getattr(torch, {2: "int16", 4: "int32"}[tensor.element_size()]))
                # By the value, so that ranks with the same box change the same elements of it.
                hit = (words.long() * 2654435761 >> 7) % 1_000_000 < int(share * 1e6)
                words[hit] ^= 0x0055
        torch.cuda.synchronize()

    def _same_where_replicated(self) -> None:
        """Ranks that hold the same box hold the same values: each tensor is made once and cut."""
        import torch

        whole: dict[str, Any] = {}
        layout = self.layouts[0]
        for pattern in layout.catalog.patterns:
            for name in pattern.names():
                bits = np.random.default_rng(len(whole)).integers(
                    0, 256, prod(pattern.shape) * ITEMSIZE[pattern.dtype], np.uint8
                )
                whole[name] = bits.view(f"u{ITEMSIZE[pattern.dtype]}").reshape(pattern.shape)
        for source in self.sources:
            params = {p.name: p for p in layout.rank_params(source.rank)}
            host = {name: words(t).copy() for name, t in source.live.items()}
            for shard in layout.rank_shards(source.rank):
                cut = tuple(slice(o, e) for o, e in zip(shard.box.offset, shard.box.end, strict=True))
                flat = host[shard.param]
                steps = tuple(s * flat.itemsize for s in shard.strides)
                view = np.lib.stride_tricks.as_strided(flat[shard.start :], shard.box.shape, steps)
                piece = whole[shard.tensor][cut]
                view[...] = piece if piece.itemsize == view.itemsize else piece.astype(np.uint32) << 16
            for name in params:
                raw = torch.from_numpy(host[name].view(np.uint8)).cuda()
                source.live[name].view(-1).view(torch.uint8).copy_(raw)
        torch.cuda.synchronize()

    def expected(self, held: list[dict[str, np.ndarray[Any, Any]]]) -> list[dict[str, np.ndarray[Any, Any]]]:
        """The engine's parameters after a sync, from the trainer's now; what no HF tensor fills stays as in `held`."""
        whole: dict[str, np.ndarray[Any, Any]] = {}
        shapes = {name: pattern.shape for pattern in self.layouts[0].catalog.patterns for name in pattern.names()}
        dtypes = {name: pattern.dtype for pattern in self.layouts[0].catalog.patterns for name in pattern.names()}
        for source in self.sources:
            flat = {name: words(t) for name, t in source.live.items()}
            for shard in self.layouts[0].rank_shards(source.rank):
                live = flat[shard.param]
                steps = tuple(s * live.itemsize for s in shard.strides)
                view = np.lib.stride_tricks.as_strided(live[shard.start :], shard.box.shape, steps)
                full = whole.setdefault(shard.tensor, np.zeros(shapes[shard.tensor], live.dtype))
                full[tuple(slice(o, e) for o, e in zip(shard.box.offset, shard.box.end, strict=True))] = view
        result = []
        for rank, parameters in enumerate(held):
            after = {name: array.copy() for name, array in parameters.items()}
            for shard in self.layouts[1].rank_shards(rank):
                flat = after[shard.param]
                steps = tuple(s * flat.itemsize for s in shard.strides)
                view = np.lib.stride_tricks.as_strided(flat[shard.start :], shard.box.shape, steps)
                piece = whole[shard.tensor][tuple(slice(o, e) for o, e in zip(shard.box.offset, shard.box.end, strict=True))]
                if piece.itemsize != view.itemsize:  # a declared cast; `dtypes` says what the checkpoint has
                    assert dtypes[shard.tensor] in ("bfloat16", "float32")
                    piece = piece.astype(np.uint32) << 16 if view.itemsize == 4 else _to_bfloat16(piece)
                view[...] = piece
            result.append(after)
        return result

    def commit(self, version: int) -> None:
        """A sync that must succeed, every byte compared."""
        want = self.expected(self.engine.remote("content"))
        self.sync.sync(version)
        self.check(self.engine, want)
        assert (self.sync.version, self.engine.version, self.engine.serving) == (version, version, True)
        assert not any(source.quiet for source in self.sources)

    def check(self, engine: Engine, want: list[dict[str, np.ndarray[Any, Any]]]) -> None:
        for rank, (a, b) in enumerate(zip(want, engine.remote("content"), strict=True)):
            assert a.keys() == b.keys()
            wrong = [name for name in a if not np.array_equal(a[name], b[name])]
            assert not wrong, f"rollout rank {rank}: {wrong}"

    def close(self) -> None:
        for replica in self.sync.replicas:
            replica.engine.remote.process.kill()  # type: ignore[attr-defined]


def _to_bfloat16(piece: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    import ml_dtypes

    return piece.view(np.float32).astype(ml_dtypes.bfloat16).view(np.uint16)
