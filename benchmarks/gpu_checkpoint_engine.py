"""Shard to shard against checkpoint-engine, on the same bytes and GPUs, in one run.

    python benchmarks/gpu_checkpoint_engine.py [--layers 48] [--rounds 5]

Needs what gpu_p2p.py needs, and checkpoint-engine (0.4.2 was run) with its requirements. Qwen3-30B-A3B shapes in bf16, trainer
on GPU 0, engine on GPU 1, as in gpu_p2p.py. In turn, several times:

    limit   one copy of as many bytes by the copy engine, from GPU 0 to GPU 1
    ours    our sync over cuda_ipc: pause, write, verify every digest on both GPUs, commit, resume (an in-process double)
    peer    checkpoint-engine's parameter server, one rank on each GPU as it wants it. register: HF tensors of the trainer's
            weights into its pinned host memory (its shared pool: nothing is allocated after the first time); gather: what it
            calls gather_metas; update: bucket by bucket into rank 0's GPU, broadcast by NCCL, handed to a process on each GPU
            by its update_weights_from_ipc. On GPU 1 that is the engine, which copies into its live parameters with
            _foreach_copy_ over prepared views (its own worker extension calls load_weights, tensor by tensor); on GPU 0
            nobody wants them. Its process group is kept between updates (auto_pg off), buckets are as it chooses them

After both the engine's parameters are digested and must be equal. Nothing is verified by the peer.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import os
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import gpu_p2p
from gpu_p2p import Side
from workers import Phases, Remote, free_port

NAME = "weights"


class Server:
    """One rank of checkpoint-engine's parameter server, in a process that has its GPU."""

    def __init__(self, rank: int, port: int, handles: Any) -> None:
        import torch

        torch.cuda.set_device(rank)
        os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port - 1))
        # Its point-to-point store wants RDMA devices and is not used by a broadcast; without Mooncake it goes on without.
        sys.modules["mooncake"] = sys.modules["mooncake.engine"] = None  # type: ignore[assignment]
        from checkpoint_engine import ParameterServer
        from loguru import logger

        logger.remove()
        self._torch, self._handles = torch, handles
        self.server = ParameterServer(auto_pg=False)

    def join(self) -> None:
        self.server.init_process_group()

    def gather(self) -> None:
        self.server.gather_metas(NAME)

    def update(self) -> None:
        self.server.update(NAME, lambda paths: self._handles.put(dict(paths)[self.server._device_uuid]))

    def used(self) -> int:
        return self._torch.cuda.max_memory_allocated()


class Consumer:
    """Whoever takes the weights on the GPU of one server rank."""

    def __init__(self, gpu: int, handles: Any) -> None:
        import torch
        import zmq

        torch.cuda.set_device(gpu)
        self._gpu, self._handles, self._context = gpu, handles, zmq.Context()

    def consume(self) -> None:
        from checkpoint_engine import update_weights_from_ipc

        update_weights_from_ipc(self._context, self._handles.get(), self._gpu, run=self.take)

    def take(self, weights: Any) -> None:
        return


class TrainerSide(Side):
    """The trainer's process, with rank 0 of the parameter server in it."""

    def __init__(self, layers: int, port: int, handles: Any) -> None:
        super().__init__(True, layers, "same", port, ["ours"])
        self.rank = Server(0, port, handles)
        self.join, self.gather, self.update = self.rank.join, self.rank.gather, self.rank.update

    def _join(self, port: int) -> None:
        return

    def register(self) -> None:
        self.rank.server.unregister_checkpoint(NAME)
        tensors = self._hf()
        self.rank.server.register_checkpoint(NAME, named_tensors=tensors, use_shared_memory_pool=True)

    def _hf(self) -> dict[str, Any]:
        """HF tensors: views of the live parameters where they are contiguous there, else copies made anew."""
        torch, catalog = self.torch, self.layout.catalog
        if "hf" not in self._cache:
            found: dict[str, Any] = {}
            copies: list[tuple[list[Any], list[Any]]] = []
            for tensor in range(len(catalog.shapes)):
                views, places, total = self._regions(range(tensor, tensor + 1))
                shape = catalog.pattern_of(tensor).shape
                if len(views) == 1 and views[0].is_contiguous():
                    found[catalog.name(tensor)] = views[0].view(torch.bfloat16)
                else:
                    full = torch.empty(total, dtype=torch.int16, device="cuda").view(shape)
                    copies.append((views, [full[box] for _, _, _, box in places]))
                    found[catalog.name(tensor)] = full.view(torch.bfloat16)
            self._cache["hf"] = found, copies
        found, copies = self._cache["hf"]
        for views, parts in copies:
            torch._foreach_copy_(parts, views)
        torch.cuda.synchronize()
        return found


class EngineSide(Side, Consumer):
    """The engine's process: the parameters that ours writes into, and the peer's consumer that copies into them."""

    def __init__(self, layers: int, port: int, handles: Any) -> None:
        Consumer.__init__(self, 1, handles)
        Side.__init__(self, False, layers, "same", port, ["ours"])
        self._into: dict[str, tuple[list[Any], list[Any]]] = {}

    def _join(self, port: int) -> None:
        return

    def prepare(self) -> None:
        catalog = self.layout.catalog
        for tensor in range(len(catalog.shapes)):
            views, places, _ = self._regions(range(tensor, tensor + 1))
            self._into[catalog.name(tensor)] = views, [box for *_, box in places]

    def take(self, weights: Any) -> None:
        views, parts = [], []
        for name, tensor in weights:
            words = tensor.view(self.torch.int16)
            mine, boxes = self._into[name]
            views += mine
            parts += [words[box] for box in boxes]
        self.torch._foreach_copy_(views, parts)


def run(layers: int, rounds: int) -> None:
    port = free_port()
    context = mp.get_context("spawn")
    handles = [context.Queue(), context.Queue()]
    pool = ThreadPoolExecutor(4)
    trainer, engine, other, nobody = remotes = [
        Remote(TrainerSide, layers, port, handles[0]),
        Remote(EngineSide, layers, port, handles[1]),
        Remote(Server, 1, port, handles[1]),
        Remote(Consumer, 0, handles[0]),
    ]
    for remote in remotes:
        remote.ready()

    def together(*calls: tuple[Remote, str]) -> float:
        began = time.perf_counter()
        list(pool.map(lambda call: call[0](call[1]), calls))
        return time.perf_counter() - began

    together((trainer, "join"), (other, "join"), (engine, "prepare"))
    watch = Phases()
    sync = gpu_p2p.session([trainer, engine], "ours", gpu_p2p.specs(layers, "same"), watch)
    nbytes = int(sync.connect().plan.nbytes.sum())
    trainer("map_peer", engine("export"))
    seconds: dict[str, list[float]] = {name: [] for name in ("limit", "ours", "peer", "register", "gather", "update")}
    for version in range(1, rounds + 2):
        if version == 2:  # the first round opens handles, compiles kernels, pins memory and makes NCCL's communicator
            seconds = {name: [] for name in seconds}
            watch.seconds.clear()
        began = time.perf_counter()
        trainer("limit", nbytes)
        seconds["limit"].append(time.perf_counter() - began)
        engine("scramble")
        began = time.perf_counter()
        sync.sync(version)
        seconds["ours"].append(time.perf_counter() - began)
        expected = engine("digest")
        engine("scramble")
        seconds["register"].append(together((trainer, "register")))
        seconds["gather"].append(together((trainer, "gather"), (other, "gather")))
        seconds["update"].append(together((trainer, "update"), (other, "update"), (engine, "consume"), (nobody, "consume")))
        seconds["peer"].append(sum(seconds[part][-1] for part in ("register", "gather", "update")))
        found = engine("digest")
        if wrong := [n for n, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b]:
            raise SystemExit(f"both left other bytes in parameters {engine('names', wrong)}")
    print(f"{layers} layers, {nbytes / 1e9:.2f} GB, {rounds} rounds after one to warm up; medians (least, most)")
    ours = statistics.median(seconds["ours"])
    for name, values in seconds.items():
        middle = statistics.median(values)
        print(f"{name:9} {middle:8.4f} s ({min(values):.4f}, {max(values):.4f}) {middle / ours:6.2f} of ours")
    print(f"peer's parameter server on GPU 1: {other('used') / 1e9:.1f} GB of the GPU's memory at most")
    for remote in remotes:
        remote.process.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=48)
    options = parser.parse_args()
    run(options.layers, options.rounds)


if __name__ == "__main__":
    main()
