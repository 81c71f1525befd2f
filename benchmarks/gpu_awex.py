"""Shard to shard against awex, on the same bytes and GPUs, in one run.

    python benchmarks/gpu_awex.py [--layers 48] [--rounds 5]

Needs what gpu_p2p.py needs, and awex (made for 0.9.0) with requests, aiohttp, psutil, transformers; no engine or Megatron.
Qwen3-30B-A3B shapes in bf16, trainer on GPU 0, engine on GPU 1, as in gpu_p2p.py. In turn, several times:

    limit   one copy of as many bytes by the copy engine, from GPU 0 to GPU 1
    ours    our sync over cuda_ipc: pause, write, verify every digest on both GPUs, commit, resume (an in-process double)
    awex    its own MegatronEngine.write_weights on the trainer and WeightsReader.update_weights on the engine, both over the
            parameters that ours reads and writes. Its NCCL writer converts Megatron's tensors to HF's, builds its sends and
            hands them to NCCL in one group; its NCCL reader receives into views of the engine's fused parameters

Everything between is awex's: meta server, converters of Qwen3-MoE for mcore and SGLang, metadata, plan, process group, writer,
reader. Put in their place are only those around it: Megatron's parallel_state (says that there is one rank), an object that
names the model's parameters, and an engine that runs its tasks in this process.

In its favour: the first sync, with its plan and communicator, is not counted; it verifies nothing, as it does by default; it
neither pauses nor flushes a cache; it logs only warnings; NCCL as it comes; objects that exist after the first round are
frozen, so its gc.collect() in every sync passes over neither its plan nor ours. `convert`, `build` and `send` are parts of
`awex` on the trainer, by the host's clock. Peak extra memory is what torch allocates: NCCL's own buffers are not in it.

After both the engine's parameters are digested and must be equal.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from types import SimpleNamespace
from typing import Any

import gpu_p2p
from gpu_p2p import Side
from workers import Phases, Remote, all_of, free_port

HOST = "127.0.0.1"
PARTS = {"convert": "convert_parameters", "build": "nccl_build_send_ops", "send": "batch_send_recv"}


def import_awex() -> Any:
    """awex, with what it asks of Megatron answered for one rank: its reader, too, imports all of it."""
    names = ("megatron", "megatron.core", "megatron.core.parallel_state")
    names += ("megatron.core.transformer", "megatron.core.transformer.transformer_config")
    modules = {name: module_from_spec(ModuleSpec(name, None)) for name in names}
    for kind in ("data", "tensor_model", "pipeline_model", "expert_model", "expert_tensor"):
        setattr(modules[names[2]], f"get_{kind}_parallel_world_size", lambda: 1)
        setattr(modules[names[2]], f"get_{kind}_parallel_rank", lambda: 0)
    modules["megatron.core"].parallel_state = modules[names[2]]  # type: ignore[attr-defined]
    modules[names[4]].TransformerConfig = object  # type: ignore[attr-defined]
    sys.modules.update(modules)
    os.environ["AWEX_MASTER_ADDR"] = HOST  # else it asks the network which address is its own
    os.environ.setdefault("AWEX_DEVICE_TYPE", "cuda")  # else it tries to import torch_npu whenever it synchronizes
    import awex
    from awex import logging

    logging.setLevel("WARNING")
    return awex


def alone() -> None:
    """The default process group of a side: awex wants one on both, and makes that between them itself."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"tcp://{HOST}:{free_port()}", rank=0, world_size=1)


class Meta:
    """awex's meta server, in a process of its own."""

    def __init__(self, port: int) -> None:
        import_awex()
        from awex.meta.meta_server import MetaServer

        self._server = MetaServer(HOST, port)
        self._server.start()


class Config(SimpleNamespace):
    """A model's HF config, of which awex reads attributes."""

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


class Qwen3MoeForCausalLM:
    """A model as awex sees one: parameters by name. It takes the architecture from the name of the class."""

    def __init__(self, tensors: Mapping[str, Any], config: Config) -> None:
        self._tensors, self.config = tensors, config

    def named_parameters(self) -> Iterator[tuple[str, Any]]:
        return iter(self._tensors.items())

    def state_dict(self) -> dict[str, Any]:
        return dict(self._tensors)


class Writer:
    """awex on a trainer of one rank."""

    def __init__(self, tensors: Mapping[str, Any], model: Mapping[str, Any], port: int) -> None:
        import_awex()
        from awex.engine.mcore import MegatronEngine
        from awex.writer import nccl_writer

        config = Config(**model)
        options = {"meta_server_addr": f"{HOST}:{port}", "comm_backend": "nccl"}
        self.engine = MegatronEngine(options, config, Qwen3MoeForCausalLM(tensors, config))
        self.engine.initialize()
        self.seconds: dict[str, float] = {}
        for part, name in PARTS.items():
            owner = self.engine.weights_exchange_writer if part == "convert" else nccl_writer
            setattr(owner, name, self._timed(part, getattr(owner, name)))

    def _timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            began = time.perf_counter()
            result = function(*arguments, **named)
            self.seconds[part] = time.perf_counter() - began
            return result

        return timed

    def write(self, version: int) -> dict[str, float]:
        self.engine.set_global_step(version)
        self.engine.write_weights()
        return dict(self.seconds)


class Reader:
    """awex on an engine of one rank, whose control process and worker are both this one."""

    engine_name, num_engines, engine_rank = "sglang", 1, 0

    def __init__(self, tensors: Mapping[str, Any], model: Mapping[str, Any], port: int, gpu: int) -> None:
        import_awex()
        from awex.config import InferenceConfig
        from awex.reader.weights_reader import get_weights_exchange_reader

        self.hf_config = Config(**model)
        self.config = InferenceConfig(
            tp_size=1, pp_size=1, dp_size=1, ep_size=1, enable_dp_attention=False, enable_dp_lm_head=False,
            meta_server_addr=f"{HOST}:{port}", comm_backend="nccl",
        )  # fmt: skip
        scheduler = SimpleNamespace(server_args=self.config, gpu_id=gpu, flush_cache=lambda: True)
        sizes = {f"{kind}_size": 1 for kind in ("tp", "pp", "dp", "attn_tp", "world")}
        ranks = {f"{kind}_rank": 0 for kind in ("tp", "pp", "attn_tp", "attn_dp", "global", "local")}
        self._worker = {
            "model": Qwen3MoeForCausalLM(tensors, self.hf_config),
            "model_context": {"scheduler": scheduler, "infer_engine_config": self.config, **sizes, **ranks},
        }
        self.reader = get_weights_exchange_reader(self)
        self.reader.initialize()

    def execute_task_in_model_worker(self, task: Callable[..., Any], **arguments: Any) -> list[Any]:
        return [task(**arguments, **self._worker)]

    def update(self, version: int) -> None:
        self.reader.update_weights(version)


class PeerSide(Side):
    """Side of gpu_p2p.py with awex beside our agent, over the same parameters."""

    def __init__(self, trainer: bool, layers: int, port: int) -> None:
        super().__init__(trainer, layers, "same", port, ["ours"])
        model = gpu_p2p.specs(layers, "same")[0].config
        self.awex = Writer(self.params[0], model, port) if trainer else Reader(self.params[0], model, port, self.gpu)

    def _join(self, port: int) -> None:
        alone()

    def exchange(self, version: int) -> Any:
        return self.awex.write(version) if isinstance(self.awex, Writer) else self.awex.update(version)

    def freeze(self) -> None:
        gc.collect()
        gc.freeze()


def together(remotes: list[Remote], name: str, *args: Any) -> list[Any]:
    """All at once; the first error ends it, for the other side would wait for hours."""
    pool = ThreadPoolExecutor(len(remotes))
    futures = [pool.submit(remote, name, *args) for remote in remotes]
    wait(futures, return_when=FIRST_EXCEPTION)
    pool.shutdown(wait=False)
    for future in futures:
        if future.done() and (error := future.exception()):
            for remote in remotes:
                remote.process.kill()
            raise error
    return [future.result() for future in futures]


def run(layers: int, rounds: int) -> None:
    port = free_port()
    meta = Remote(Meta, port)
    meta.ready()
    sides = [Remote(PeerSide, trainer, layers, port) for trainer in (True, False)]
    for side in sides:
        side.ready()
    trainer, engine = sides
    watch = Phases()
    sync = gpu_p2p.session(sides, "ours", gpu_p2p.specs(layers, "same"), watch)
    nbytes = int(sync.connect().plan.nbytes.sum())
    trainer("map_peer", engine("export"))
    seconds: dict[str, list[float]] = {name: [] for name in ("limit", "ours", "awex", *PARTS)}
    peaks: dict[str, list[int]] = {}
    for version in range(1, rounds + 2):
        if version == 2:  # the first round opens handles, compiles kernels, makes awex's plan and NCCL's communicator
            seconds = {name: [] for name in seconds}
            watch.seconds.clear()
            all_of(sides, "freeze")
        expected: list[str] = []
        parts: dict[str, float] = {}
        for name in ("limit", "ours", "awex"):
            engine("scramble")
            all_of(sides, "reset_peak")
            began = time.perf_counter()
            if name == "limit":
                trainer("limit", nbytes)
            elif name == "ours":
                sync.sync(version)
            else:
                parts = together(sides, "exchange", version)[0]
            seconds[name].append(time.perf_counter() - began)
            peaks[name] = all_of(sides, "peak")
            if name == "ours":
                expected = engine("digest")
        for part, value in parts.items():
            seconds[part].append(value)
        found = engine("digest")
        if wrong := [n for n, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b]:
            raise SystemExit(f"both left other bytes in parameters {engine('names', wrong)}")
    print(f"{layers} layers, {nbytes / 1e9:.2f} GB, {rounds} rounds after one to warm up; medians (least, most)")
    ours = statistics.median(seconds["ours"])
    for name, values in seconds.items():
        middle = statistics.median(values)
        extra = "".join(f" {peak / 1e6:8.1f} MB" for peak in peaks.get(name, ()))
        print(f"{name:8} {middle:8.4f} s ({min(values):.4f}, {max(values):.4f}) {middle / ours:6.2f} of ours{extra}")
    ratio = statistics.median(a / b for a, b in zip(seconds["awex"], seconds["ours"], strict=True))
    print(f"awex takes {ratio:.2f} of ours, median of rounds in turn; MB: peak extra memory of trainer and engine, last round")
    print("ours by phase:", ", ".join(f"{phase} {statistics.median(v):.4f}" for phase, v in watch.seconds.items()))
    for remote in (*sides, meta):
        remote.process.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=48)
    options = parser.parse_args()
    run(options.layers, options.rounds)


if __name__ == "__main__":
    main()
