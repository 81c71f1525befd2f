"""Shard to shard against gather + broadcast + load, on one CPU machine, in one run.

    make bench            or    .venvs/trainer/bin/python benchmarks/cpu_p2p.py --rounds 7 --layers 8

Two trainer ranks (tp2 ep2, Megatron layout, one contiguous buffer each) feed two engine ranks (SGLang layout) with
Qwen3-MoE-shaped bf16 weights; every rank is a process. In turn, several times:

    a  one big Mooncake tcp write of the same bytes (transfer_sync_write), one process to another
    w  the same through our transport: cut into pieces and polled, what the wire can do here
    b  our sync: pause, write, verify every digest, commit, resume, over Mooncake tcp (the engine is the in-process double)
    c  gather to full tensors on rank 0 (gloo), broadcast packed buckets to the engines (gloo), each copies its part
    d  our sync over process_vm_writev (cma): no network at all, a lower bound to know

Medians and ratios are printed, with wire bytes and the peak memory each rank needed beyond its weights.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from workers import Phases, Remote, RemoteAgent, all_of, buckets, free_port

from weight_sync.config import engine_yaml, family_yaml
from weight_sync.ids import Deadline
from weight_sync.layout.table import Layout
from weight_sync.session.connect import SyncSpec
from weight_sync.session.inprocess import ArraySource, InProcessEngine, InProcessTrainers, typed
from weight_sync.session.inputs import Declared, dims_of, layout_of
from weight_sync.session.session import WeightSync
from weight_sync.session.source import SourceAgent
from weight_sync.session.target import TargetAgent

TRANSPORTS: dict[str, dict[str, Any]] = {
    "tcp": {"name": "mooncake", "protocol": "tcp", "host": "127.0.0.1"},
    "cma": {"name": "cma"},
}


def specs(layers: int, engine: str) -> tuple[Declared, Declared]:
    config = {
        "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 1024, "num_hidden_layers": layers, "num_attention_heads": 16,
        "num_key_value_heads": 4, "head_dim": 64, "intermediate_size": 3072, "vocab_size": 32000, "num_experts": 32,
        "moe_intermediate_size": 512, "decoder_sparse_step": 1, "mlp_only_layers": [], "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }  # fmt: skip
    family = family_yaml("qwen3_moe")
    source = Declared(family, config, {"ranks": 2, "tp": 2, "ep": 2}, None, {"vocab_multiple": 256})
    sizes = {"tp": 2, "moe_ep": 2 if engine == "ep" else 1, "remainder": "last"}
    return source, Declared(family, config, sizes, engine_yaml("sglang"))


class Rank:
    """One process: a trainer rank (0, 1) or an engine rank (2, 3)."""

    def __init__(self, index: int, layers: int, engine: str, port: int) -> None:
        import torch

        torch.set_num_threads(1)
        self.index, self.trainer, self.local = index, index < 2, index % 2
        declared = specs(layers, engine)
        self.source, self.target = layout_of(declared[0], "trainer"), layout_of(declared[1], "rollout")
        layout = self.source if self.trainer else self.target
        params = layout.rank_params(self.local)
        total = sum(p.numel for p in params)
        # One contiguous buffer, as Megatron's distributed optimizer keeps parameters.
        self.buffer = np.zeros(total, np.uint16)
        if self.trainer:
            self.buffer[:] = np.random.default_rng(index).integers(0, 2**16, total, dtype=np.uint16)
        self.arrays: dict[str, Any] = {}
        at = 0
        for p in params:
            self.arrays[p.name] = typed(self.buffer[at : at + p.numel].reshape(p.shape), p.dtype)
            at += p.numel
        coords = dims_of(declared[not self.trainer], "trainer" if self.trainer else "rollout").coords(self.local)
        self.agents = {name: self._agent(options, coords) for name, options in TRANSPORTS.items()}
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        torch.distributed.init_process_group("gloo", rank=index, world_size=4)
        self.to_engines = torch.distributed.new_group([0, 2, 3])

    def _agent(self, options: dict[str, Any], coords: Any) -> Any:
        from weight_sync.transport import registry

        def open_transport() -> Any:
            rest = dict(options)
            return registry.create(rest.pop("name"), **rest)

        if self.trainer:
            return SourceAgent(ArraySource(self.local, self.arrays, coords), open_transport)
        return TargetAgent(
            rank=self.local, host="localhost", coords=coords, tensors=lambda: self.arrays, transport=open_transport
        )

    def agent(self, name: str, method: str, payload: Any) -> Any:
        return self.agents[name].call(method, payload)

    def scramble(self) -> None:
        self.buffer[:] = 0xABCD

    # -- a: one big write ------------------------------------------------------------------------------------------

    def big_open(self, nbytes: int) -> Any:
        from weight_sync.transport import registry
        from weight_sync.transport.base import Region

        self.big = np.ones(nbytes, np.uint8)
        self.wire = registry.create("mooncake", protocol="tcp", host="127.0.0.1")
        self.wire.register([Region(self.big.ctypes.data, nbytes)])
        return self.big.ctypes.data, self.wire.describe().to_json()

    def big_probe(self, endpoint: dict[str, Any]) -> None:
        from weight_sync.transport.base import Endpoint

        self.wire.probe(Endpoint.from_json(endpoint), Deadline.after(30))

    def big_write(self, address: int, endpoint: dict[str, Any]) -> float:
        from weight_sync.transport.base import Batch, Endpoint

        one = [np.asarray([v], np.int64) for v in (self.big.ctypes.data, address, self.big.nbytes)]
        began = time.perf_counter()
        ticket = self.wire.write(Batch(Endpoint.from_json(endpoint), *one, ["one big write"]))
        self.wire.wait(ticket, Deadline.after(60))
        return time.perf_counter() - began

    def plain_open(self) -> None:
        from weight_sync.transport.preflight import load_mooncake

        self.plain = load_mooncake().TransferEngine()
        if self.plain.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""):
            raise RuntimeError("Mooncake did not initialise")
        if self.plain.register_memory(self.big.ctypes.data, self.big.nbytes):
            raise RuntimeError("Mooncake did not register the buffer")

    def plain_write(self, address: int, session: str) -> None:
        if self.plain.transfer_sync_write(session, self.big.ctypes.data, address, self.big.nbytes):
            raise RuntimeError("the plain write failed")

    def big_close(self) -> None:
        self.wire.close()
        del self.big

    # -- c: gather, broadcast, load --------------------------------------------------------------------------------

    def gather_broadcast(self, bucket_bytes: int) -> int:
        """The bytes this rank put on the wire. Buckets of whole HF tensors, in catalog order."""
        import torch.distributed as dist

        sent = 0
        for tensors in buckets(self.source, bucket_bytes):
            places, total = offsets(self.source, tensors)
            if not self.trainer:
                full = np.empty(total, np.uint16)
                dist.broadcast(_tensor(full), src=0, group=self.to_engines)
                self._load(self.target, tensors, places, full, to_params=True)
                continue
            if self.index == 1:
                mine = self._pack(tensors)
                dist.send(_tensor(mine), dst=0)
                sent += mine.nbytes
                continue
            full = np.empty(total, np.uint16)
            self._load(self.source, tensors, places, full, to_params=False)
            other = np.empty(self._packed_size(1, tensors), np.uint16)
            dist.recv(_tensor(other), src=1)
            self._unpack(tensors, places, other, full)
            dist.broadcast(_tensor(full), src=0, group=self.to_engines)
            sent += 2 * full.nbytes
        return sent

    def _regions(self, layout: Layout, rank: int, tensors: range) -> Any:
        cache = self.__dict__.setdefault("_cache", {})
        key = (layout.side, rank, tensors.start)
        if key not in cache:
            rows = np.flatnonzero((layout.rank == rank) & (layout.tensor >= tensors.start) & (layout.tensor < tensors.stop))
            cache[key] = [(int(layout.tensor[r]), s) for r, s in zip(rows.tolist(), layout.shards(rows.tolist()), strict=True)]
        return cache[key]

    def _load(self, layout: Layout, tensors: range, places: Any, full: Any, *, to_params: bool) -> None:
        for tensor, shard in self._regions(layout, self.local, tensors):
            at, shape = places[tensor]
            whole = full[at : at + int(np.prod(shape))].reshape(shape)
            piece = whole[tuple(slice(o, o + n) for o, n in zip(shard.box.offset, shard.box.shape, strict=True))]
            flat = np.asarray(self.arrays[shard.param]).reshape(-1)
            steps = tuple(2 * s for s in shard.strides)
            live = np.lib.stride_tricks.as_strided(flat[shard.start :], shard.box.shape, steps)
            if to_params:
                live[...] = piece
            else:
                piece[...] = live

    def _packed_size(self, rank: int, tensors: range) -> int:
        return sum(s.box.volume for _, s in self._regions(self.source, rank, tensors))

    def _pack(self, tensors: range) -> Any:
        parts: list[Any] = []
        for _, shard in self._regions(self.source, self.local, tensors):
            flat = np.asarray(self.arrays[shard.param]).reshape(-1)
            steps = tuple(2 * s for s in shard.strides)
            parts.append(np.lib.stride_tricks.as_strided(flat[shard.start :], shard.box.shape, steps).reshape(-1))
        return np.concatenate(parts)

    def _unpack(self, tensors: range, places: Any, packed: Any, full: Any) -> None:
        read = 0
        for tensor, shard in self._regions(self.source, 1, tensors):
            at, shape = places[tensor]
            whole = full[at : at + int(np.prod(shape))].reshape(shape)
            box = tuple(slice(o, o + n) for o, n in zip(shard.box.offset, shard.box.shape, strict=True))
            whole[box] = packed[read : read + shard.box.volume].reshape(shard.box.shape)
            read += shard.box.volume

    # -- what it costs ---------------------------------------------------------------------------------------------

    def reset_peak(self) -> int:
        Path("/proc/self/clear_refs").write_text("5")
        return _status("VmRSS")

    def peak(self) -> int:
        return _status("VmHWM")


def _status(key: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


def _tensor(array: Any) -> Any:
    import torch

    return torch.from_numpy(array.view(np.uint8))


def offsets(layout: Layout, tensors: range) -> tuple[dict[int, tuple[int, tuple[int, ...]]], int]:
    places: dict[int, tuple[int, tuple[int, ...]]] = {}
    at = 0
    for tensor in tensors:
        shape = layout.catalog.pattern_of(tensor).shape
        places[tensor] = (at, shape)
        at += int(np.prod(shape))
    return places, at


def run(layers: int, engine: str, rounds: int) -> dict[str, Any]:
    port = free_port()
    ranks = [Remote(Rank, i, layers, engine, port) for i in range(4)]
    for rank in ranks:
        rank.ready()
    source, target = specs(layers, engine)
    phases = {name: Phases() for name in TRANSPORTS}
    syncs = {name: _session(ranks, name, source, target, phases[name]) for name in TRANSPORTS}
    nbytes = int(syncs["tcp"].connect().plan.nbytes.sum())
    syncs["cma"].connect()
    address, endpoint = ranks[2]("big_open", nbytes)
    ranks[0]("big_open", nbytes)
    ranks[0]("big_probe", endpoint)
    ranks[0]("plain_open")
    seconds: dict[str, list[float]] = {key: [] for key in "awbcd"}
    peaks: dict[str, list[int]] = {}
    wire: dict[str, int] = {"a": nbytes, "w": nbytes, "b": nbytes, "d": nbytes}

    def timed(key: str, action: Callable[[], Any]) -> Any:
        before = all_of(ranks, "reset_peak")
        began = time.perf_counter()
        value = action()
        seconds[key].append(time.perf_counter() - began)
        extra = [p - b for p, b in zip(all_of(ranks, "peak"), before, strict=True)]
        peaks[key] = [max(x, y) for x, y in zip(peaks.get(key, extra), extra, strict=True)]
        return value

    for version in range(1, rounds + 2):
        all_of(ranks[2:], "scramble")
        timed("a", lambda: ranks[0]("plain_write", address, endpoint["address"]))
        timed("w", lambda: ranks[0]("big_write", address, endpoint))
        outcome = timed("b", lambda v=version: syncs["tcp"].sync(v))
        all_of(ranks[2:], "scramble")
        wire["c"] = sum(timed("c", lambda: all_of(ranks, "gather_broadcast", 512 << 20)))
        again = timed("d", lambda v=version: syncs["cma"].sync(v))
        if outcome.digest != again.digest:
            raise SystemExit("b and d moved different bytes")
        if version == 1:  # the first round opens connections and touches pages
            seconds = {key: [] for key in "awbcd"}
            peaks.clear()
            for watch in phases.values():
                watch.seconds.clear()
    for rank in (ranks[0], ranks[2]):
        rank("big_close")
    for rank in ranks:
        rank.process.kill()
    shares = {name: {k: statistics.median(v) for k, v in watch.seconds.items()} for name, watch in phases.items()}
    return {"bytes": nbytes, "seconds": seconds, "peaks": peaks, "wire": wire, "phases": shares}


def _session(ranks: list[Remote], name: str, source: Declared, target: Declared, watch: Phases) -> WeightSync:
    trainers = InProcessTrainers([RemoteAgent(ranks[r], name, r) for r in range(2)])  # type: ignore[list-item]
    agents = [RemoteAgent(ranks[2 + r], name, r) for r in range(2)]
    sizes = dict(dims_of(target, "rollout").sizes)
    engine = InProcessEngine("engine", agents, model=target.config, sizes=sizes)  # type: ignore[arg-type]
    return WeightSync(trainers, [engine], SyncSpec(source, target, witness=False), observer=watch)  # type: ignore[arg-type]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument(
        "--engine", choices=("ep", "tp"), default="ep", help="how the engine cuts experts: whole, or by columns"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    result = run(options.layers, options.engine, options.rounds)
    nbytes = result["bytes"]
    median = {key: statistics.median(values) for key, values in result["seconds"].items()}
    names = {
        "a": "one big Mooncake write",
        "w": "the same, cut and polled",
        "b": "shard to shard, tcp",
        "c": "gather + broadcast + load",
        "d": "shard to shard, cma",
    }
    print(
        f"{nbytes / 1e9:.3f} GB, 2 -> 2 ranks, engine experts by {options.engine}, {options.rounds} rounds after one to warm up"
    )
    print(f"{'':28} {'median s':>9} {'min':>7} {'max':>7} {'GB/s':>6} {'wire GB':>8} {'peak extra MB (t0 t1 e0 e1)':>30}")
    for key, name in names.items():
        values = result["seconds"][key]
        extra = " ".join(f"{peak / 1e6:.0f}" for peak in result["peaks"][key])
        print(
            f"{key} {name:26} {median[key]:9.3f} {min(values):7.3f} {max(values):7.3f} {nbytes / median[key] / 1e9:6.2f} "
            f"{result['wire'][key] / 1e9:8.3f} {extra:>30}"
        )
    for key, name in (("b", "tcp"), ("d", "cma")):
        print(f"{key} by phase: {', '.join(f'{phase} {value:.3f}' for phase, value in result['phases'][name].items())}")
    pairs = {key: [x / y for x, y in zip(result["seconds"][key], result["seconds"]["b"], strict=True)] for key in "awcd"}
    of = {key: statistics.median(values) for key, values in pairs.items()}
    print(f"b runs at {of['a']:.2f} of a's rate and {of['w']:.2f} of w's (medians of pairs)")
    print(f"b is {of['c']:.2f}x as fast as c, and {of['d']:.2f}x as fast as d")
    if options.json:
        options.json.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
