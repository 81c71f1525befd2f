"""Shard to shard between two GPUs against what people use today, on the same bytes, in one run.

    python benchmarks/gpu_p2p.py [--layers 48] [--case same|gather|scatter|tiny] [--rounds 5] [--methods ...]

Needs two CUDA devices with peer access, torch, triton and cuda-bindings; Mooncake's CUDA build for `mooncake`. Qwen3-30B-A3B
shapes in bf16: the trainer's ranks (Megatron layout, one contiguous buffer each) lie on GPU 0, the engine's (SGLang layout) on
GPU 1, each side in a process of its own. In turn, several times:

    limit       one copy of as many bytes by the copy engine, from GPU 0 to GPU 1
    ours        our sync over cuda_ipc: pause, write, verify every digest on both GPUs, commit, resume (an in-process double)
    mooncake    the same over Mooncake nvlink_intra
    buckets     NCCL broadcast of packed 512 MB buckets of HF tensors, then copies into the engine's parameters; packed and
                unpacked by one call each over views made before, which is the least that it can cost
    loaders     the same buckets, filled and emptied as frameworks do: a copy for each tensor, each by a call of its own
    tensors     NCCL broadcast tensor by tensor, then copies into the engine's parameters

Cases: same: one rank to one rank. gather: 8 trainer ranks (tp8 etp8) to 1; scatter: 1 to 8 engine ranks (tp8): row-parallel
weights become strided. tiny: as same, with as many tensors but small ones (an expert's matrix has 32 KB). After every method
the engine's parameters are digested and must equal those of the first. See gpu_fp8.py for quantising, gpu_delta.py for deltas.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from workers import Phases, Remote, all_of, buckets, free_port

from weight_sync.config import engine_yaml, family_yaml
from weight_sync.ids import Deadline
from weight_sync.layout.table import Layout
from weight_sync.plan.schedule import CostModel
from weight_sync.session.connect import SyncSpec
from weight_sync.session.inprocess import InProcessEngine
from weight_sync.session.inputs import Declared, dims_of, layout_of
from weight_sync.session.session import WeightSync
from weight_sync.session.source import SourceAgent
from weight_sync.session.target import TargetAgent

TRANSPORTS: dict[str, dict[str, Any]] = {
    "ours": {"name": "cuda_ipc"},
    "mooncake": {"name": "mooncake", "protocol": "nvlink_intra", "host": "127.0.0.1"},
}
COSTS = {
    # A run costs one row of a table, 0.1 ns of a GPU's time; nothing is worth packing.
    "ours": CostModel(seconds_per_write=1e-10, wire=3.7e11, copy=1.5e12),
    "mooncake": CostModel(seconds_per_write=3.7e-6, wire=3.9e11, copy=1.5e12),
}
CASES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "same": ({"ranks": 1}, {"tp": 1}),
    "gather": ({"ranks": 8, "tp": 8, "etp": 8}, {"tp": 1}),
    "scatter": ({"ranks": 1}, {"tp": 8}),
    "tiny": ({"ranks": 1}, {"tp": 1}),
}
TINY = {"hidden_size": 256, "moe_intermediate_size": 64, "num_attention_heads": 4, "head_dim": 64, "vocab_size": 4096}
BUCKET = 512 << 20


def specs(layers: int, case: str) -> tuple[Declared, Declared]:
    config = {
        "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 2048, "num_hidden_layers": layers, "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144, "vocab_size": 151936, "num_experts": 128,
        "moe_intermediate_size": 768, "decoder_sparse_step": 1, "mlp_only_layers": [], "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }  # fmt: skip
    if case == "tiny":
        config |= TINY
    family = family_yaml("qwen3_moe")
    trainer, rollout = CASES[case]
    source = Declared(family, config, trainer, None, {"vocab_multiple": 128})
    return source, Declared(family, config, rollout, engine_yaml("sglang"))


class LiveSource:
    """TrainerSource over tensors that nobody steps."""

    def __init__(self, rank: int, tensors: dict[str, Any], coords: Any) -> None:
        self._rank, self._tensors, self._coords = rank, tensors, dict(coords)

    def describe(self) -> Any:
        from weight_sync.session.contracts import RankDescription
        from weight_sync.session.memory import memory_of

        memory = memory_of(self._tensors, f"trainer rank {self._rank}")
        return RankDescription(
            self._rank, "localhost", self._coords, memory.epoch, memory.params, memory.storages, device=memory.device
        )

    def tensors(self) -> Any:
        return self._tensors

    def quiesce(self) -> None:
        import torch

        torch.cuda.synchronize()

    def release(self) -> None:
        return


class Side:
    """All ranks of one side, on one GPU."""

    def __init__(self, trainer: bool, layers: int, case: str, port: int, methods: list[str]) -> None:
        import torch

        self.torch, self.trainer = torch, trainer
        self.gpu = 0 if trainer else 1
        torch.cuda.set_device(self.gpu)
        declared = specs(layers, case)
        self.source, self.target = layout_of(declared[0], "trainer"), layout_of(declared[1], "rollout")
        self.layout = self.source if trainer else self.target
        dims = dims_of(declared[not trainer], "trainer" if trainer else "rollout")
        self.params: list[dict[str, Any]] = []
        self.buffers: list[Any] = []
        for rank in range(dims.world):
            params = self.layout.rank_params(rank)
            # One contiguous buffer, as Megatron's distributed optimizer keeps parameters; an engine has a tensor for each.
            total = sum(-(-p.numel // 64) * 64 for p in params)
            buffer = torch.zeros(total, dtype=torch.bfloat16, device="cuda")
            if trainer:
                buffer.view(torch.int16).random_(-(2**15), 2**15)
            self.buffers.append(buffer)
            tensors, at = {}, 0
            for p in params:
                tensors[p.name] = buffer[at : at + p.numel].view(p.shape)
                at += -(-p.numel // 64) * 64
                if trainer and p.numel < 1 << 20:  # norms and routers, which all ranks hold alike
                    torch.manual_seed(len(tensors))
                    tensors[p.name].view(torch.int16).random_(-(2**15), 2**15)
            self.params.append(tensors)
        self.agents = {
            (name, rank): self._agent(TRANSPORTS[name], rank, dims.coords(rank))
            for name in methods if name in TRANSPORTS
            for rank in range(dims.world)
        }  # fmt: skip
        self.threads = [ThreadPoolExecutor(1) for _ in range(dims.world)]
        self._join(port)
        self._cache: dict[Any, Any] = {}

    def _join(self, port: int) -> None:
        """The two sides' communicator."""
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        device = self.torch.device("cuda", self.gpu)
        self.torch.distributed.init_process_group("nccl", rank=self.gpu, world_size=2, device_id=device)

    def _agent(self, options: dict[str, Any], rank: int, coords: Any) -> Any:
        from weight_sync.transport import registry

        def open_transport() -> Any:
            rest = dict(options)
            return registry.create(rest.pop("name"), **rest)

        if self.trainer:
            return SourceAgent(LiveSource(rank, self.params[rank], coords), open_transport)
        tensors = self.params[rank]
        return TargetAgent(rank=rank, host="localhost", coords=coords, tensors=lambda: tensors, transport=open_transport)

    def agents_of(self, name: str, method: str, payloads: dict[int, Any]) -> dict[int, Any]:
        """Call several ranks' agents at once, each on a thread of its own, as they would be on GPUs of their own."""
        futures = {rank: self.threads[rank].submit(self._call, name, rank, method, p) for rank, p in payloads.items()}
        return {rank: future.result() for rank, future in futures.items()}

    def _call(self, name: str, rank: int, method: str, payload: Any) -> Any:
        self.torch.cuda.set_device(self.gpu)
        return self.agents[name, rank].call(method, payload)

    def scramble(self) -> None:
        for buffer in self.buffers:
            buffer.view(self.torch.int16).fill_(-21846)

    def digest(self) -> list[str]:
        """Of every parameter of every rank, in order: what must come out equal, whatever moved the bytes."""
        from weight_sync.session.digests import LANES
        from weight_sync.session.memory import memory_of

        found: list[str] = []
        for tensors in self.params:
            memory = memory_of(tensors, "engine")
            digests = memory.digests(LANES)
            digests.whole("all", list(tensors), lambda t=tensors: [x.view(self.torch.int16) for x in t.values()])
            found += digests.hex(list(tensors))
        return found

    def names(self, numbers: list[int]) -> list[str]:
        every = [name for tensors in self.params for name in tensors]
        return [every[number] for number in numbers[:8]]

    def reset_peak(self) -> None:
        self.torch.cuda.synchronize()
        self.torch.cuda.reset_peak_memory_stats()
        self._before = self.torch.cuda.memory_allocated()

    def peak(self) -> int:
        return self.torch.cuda.max_memory_allocated() - self._before

    # -- limit -----------------------------------------------------------------------------------------------------

    def export(self) -> list[tuple[int, str, int]]:
        from weight_sync.device import ipc

        return [(b.data_ptr() - ipc.export(b.data_ptr())[0], ipc.export(b.data_ptr())[2], b.nbytes) for b in self.buffers]

    def map_peer(self, exported: list[tuple[int, str, int]]) -> None:
        from weight_sync.device import ipc

        self.peer = [(ipc.open_handle(handle) + offset, nbytes) for offset, handle, nbytes in exported]

    def limit(self, nbytes: int) -> None:
        """Copies of the whole buffers, cut only where the two sides' buffers end."""
        from cuda.bindings import driver

        here = [(b.data_ptr(), b.nbytes) for b in self.buffers]
        moved, i, j, a, b = 0, 0, 0, 0, 0
        stream = self.torch.cuda.current_stream().cuda_stream
        while moved < nbytes:
            size = min(here[i][1] - a, self.peer[j][1] - b, nbytes - moved)
            driver.cuMemcpyDtoDAsync(self.peer[j][0] + b, here[i][0] + a, size, stream)
            moved, a, b = moved + size, a + size, b + size
            if a == here[i][1]:  # begin again: replicas make the engine's bytes more than the trainer's
                i, a = (i + 1) % len(here), 0
            if b == self.peer[j][1]:
                j, b = (j + 1) % len(self.peer), 0
        self.torch.cuda.synchronize()

    # -- NCCL ------------------------------------------------------------------------------------------------------

    def nccl(self, limit: int, together: bool = True) -> int:
        """Broadcast from GPU 0 in buckets of whole HF tensors; the bytes sent. limit 0: tensor by tensor.

        together: all copies of a bucket in one call.
        """
        import torch.distributed as dist

        sent = 0
        for tensors in self._buckets(limit):
            views, places, total = self._regions(tensors)
            # As words: a copy of bf16 values may change the bits of a NaN.
            full = self.torch.empty(total, dtype=self.torch.int16, device="cuda")
            parts = [full[at : at + n].view(shape)[box] for at, n, shape, box in places]
            if self.trainer:
                self._copy(parts, views, together)
            dist.broadcast(full.view(self.torch.uint8), src=0)
            if not self.trainer:
                self._copy(views, parts, together)
            sent += full.nbytes
        self.torch.cuda.synchronize()
        return sent

    def _copy(self, to: list[Any], from_: list[Any], together: bool) -> None:
        if together:
            self.torch._foreach_copy_(to, from_)
            return
        for target, source in zip(to, from_, strict=True):
            target.copy_(source)

    def _buckets(self, limit: int) -> list[range]:
        if limit not in self._cache:
            self._cache[limit] = buckets(self.layout, limit) if limit else [
                range(t, t + 1) for t in range(len(self.layout.catalog.shapes))
            ]  # fmt: skip
        return self._cache[limit]

    def _regions(self, tensors: range) -> Any:
        """(live views, places in the bucket, its elements), made once. Of replicated shards the first is sent."""
        key = tensors.start, tensors.stop
        if key in self._cache:
            return self._cache[key]
        layout, at, where = self.layout, 0, dict[int, tuple[int, tuple[int, ...]]]()
        for tensor in tensors:
            shape = layout.catalog.pattern_of(tensor).shape
            where[tensor] = at, shape
            at += int(np.prod(shape))
        rows = self._rows(layout, tensors)
        views, places, seen = [], [], set[Any]()
        for row, shard in zip(rows.tolist(), layout.shards(rows.tolist()), strict=True):
            tensor = int(layout.tensor[row])
            box = tuple(slice(o, o + n) for o, n in zip(shard.box.offset, shard.box.shape, strict=True))
            if self.trainer and (tensor, str(box)) in seen:
                continue
            seen.add((tensor, str(box)))
            flat = self.params[int(layout.rank[row])][shard.param].view(self.torch.int16).reshape(-1)
            views.append(flat.as_strided(shard.box.shape, shard.strides, flat.storage_offset() + shard.start))
            start, shape = where[tensor]
            places.append((start, int(np.prod(shape)), shape, box))
        self._cache[key] = views, places, at
        return self._cache[key]

    def _rows(self, layout: Layout, tensors: range) -> Any:
        if "order" not in self._cache:
            self._cache["order"] = np.argsort(layout.tensor, kind="stable")
            self._cache["sorted"] = layout.tensor[self._cache["order"]]
        low, high = np.searchsorted(self._cache["sorted"], [tensors.start, tensors.stop])
        return self._cache["order"][low:high]


class SideTrainers:
    """TrainerGroup of all ranks of the trainer's process."""

    def __init__(self, side: Remote, name: str, world: int) -> None:
        self.world, self._side, self._name = world, side, name

    def call(self, method: str, payloads: Mapping[int, Mapping[str, Any]], deadline: Deadline) -> dict[int, dict[str, Any]]:
        return self._side("agents_of", self._name, method, dict(payloads))


class SideEngine(InProcessEngine):
    """The double of an engine, with its agents in the engine's process."""

    def __init__(self, side: Remote, method: str, world: int, **facts: Any) -> None:
        super().__init__("engine", [_Named(rank) for rank in range(world)], **facts)  # type: ignore[arg-type]
        self._side, self._method = side, method

    def _each(self, method: str, payloads: Mapping[int, Mapping[str, Any]], deadline: Deadline) -> dict[int, dict[str, Any]]:
        return self._side("agents_of", self._method, method, dict(payloads))


class _Named:
    def __init__(self, rank: int) -> None:
        self.rank = rank


def session(sides: list[Remote], name: str, declared: tuple[Declared, Declared], watch: Phases) -> WeightSync:
    source, target = declared
    worlds = dims_of(source, "trainer").world, dims_of(target, "rollout").world
    trainers = SideTrainers(sides[0], name, worlds[0])
    engine = SideEngine(sides[1], name, worlds[1], model=target.config, sizes=dict(dims_of(target, "rollout").sizes))
    spec = SyncSpec(source, target, witness=False, costs=COSTS[name])
    return WeightSync(trainers, [engine], spec, observer=watch)


def run(layers: int, case: str, rounds: int, methods: list[str]) -> dict[str, Any]:
    port = free_port()
    sides = [Remote(Side, trainer, layers, case, port, methods) for trainer in (True, False)]
    for side in sides:
        side.ready()
    declared = specs(layers, case)
    phases = {name: Phases() for name in methods if name in TRANSPORTS}
    began = time.perf_counter()
    syncs = {name: session(sides, name, declared, phases[name]) for name in phases}
    plans = {name: sync.connect() for name, sync in syncs.items()}
    connected = time.perf_counter() - began
    nbytes = int(next(iter(plans.values())).plan.nbytes.sum())
    transfers = len(next(iter(plans.values())).plan)
    sides[0]("map_peer", sides[1]("export"))
    seconds: dict[str, list[float]] = {name: [] for name in ["limit", *methods]}
    peaks: dict[str, list[int]] = {}
    expected: list[str] | None = None
    for version in range(1, rounds + 2):
        if version == 2:  # the first round opens handles, compiles kernels and makes NCCL's communicator
            seconds = {name: [] for name in seconds}
            for watch in phases.values():
                watch.seconds.clear()
        for name in seconds:
            sides[1]("scramble")
            all_of(sides, "reset_peak")
            began = time.perf_counter()
            if name == "limit":
                sides[0]("limit", nbytes)
            elif name in syncs:
                syncs[name].sync(version)
            else:
                all_of(sides, "nccl", 0 if name == "tensors" else BUCKET, name != "loaders")
            seconds[name].append(time.perf_counter() - began)
            peaks[name] = all_of(sides, "peak")
            if name != "limit":
                found = sides[1]("digest")
                expected = expected or found
                if wrong := [n for n, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b]:
                    raise SystemExit(f"{name} left other bytes than the first method in parameters {sides[1]('names', wrong)}")
    for side in sides:
        side.process.kill()
    shares = {name: {k: statistics.median(v) for k, v in watch.seconds.items()} for name, watch in phases.items()}
    summary = {name: plan.schedule.summary() for name, plan in plans.items()}
    return {
        "bytes": nbytes, "transfers": transfers, "seconds": seconds, "peaks": peaks, "phases": shares, "methods": summary,
        "connect_seconds": connected,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--case", choices=tuple(CASES), default="same")
    parser.add_argument("--methods", nargs="+", default=["ours", "mooncake", "buckets", "loaders", "tensors"])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    result = run(options.layers, options.case, options.rounds, options.methods)
    nbytes, seconds = result["bytes"], result["seconds"]
    print(
        f"{options.case}: {nbytes / 1e9:.2f} GB in {result['transfers']} transfers, {options.layers} layers, {options.rounds} "
        f"rounds after one to warm up; connecting both sessions took {result['connect_seconds']:.1f} s"
    )
    print(f"{'':10} {'median s':>9} {'min':>8} {'max':>8} {'GB/s':>7} {'of limit':>8} {'peak extra MB (trainer, engine)':>32}")
    for name, values in seconds.items():
        share = statistics.median(a / b for a, b in zip(seconds["limit"], values, strict=True))
        middle = statistics.median(values)
        extra = ", ".join(f"{peak / 1e6:.1f}" for peak in result["peaks"][name])
        times = f"{middle:9.4f} {min(values):8.4f} {max(values):8.4f}"
        print(f"{name:10} {times} {nbytes / middle / 1e9:7.1f} {share:8.3f} {extra:>32}")
    for name in seconds.keys() & {"buckets", "loaders", "tensors"} if "ours" in seconds else ():
        ratio = statistics.median(a / b for a, b in zip(seconds[name], seconds["ours"], strict=True))
        print(f"{name} take {ratio:.2f} of ours, median of rounds in turn")
    for name, parts in result["phases"].items():
        print(f"{name} by phase: {', '.join(f'{phase} {value:.4f}' for phase, value in parts.items())}")
        print(f"{name}: {result['methods'][name]}")
    if options.json:
        options.json.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
