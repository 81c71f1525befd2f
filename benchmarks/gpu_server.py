"""A real SGLang server on a GPU, synced by us, against the same server after it loaded the same checkpoint from disk.

    python benchmarks/gpu_server.py [--schemes none fp8_block] [--layers 6] [--experts 32] [--rounds 5] [--graphs] [--json FILE]

Needs SGLang (0.5.16 or later, GPU build) in this Python, weight_sync installed with its entry point, torch, triton and
cuda-bindings, and one or two CUDA devices: the trainer takes the first, the servers the last. A trainer process holds a random
Qwen3-MoE model in bf16 as Megatron does. For each scheme, a server of its own with our plug-in, which serves weights B from
disk: a bf16 checkpoint (none), or the same quantised by the float64 reference: fp8 in blocks of 128 x 128 (fp8_block), fp8 with
a scale for each row (fp8_channel: SGLang transposes it), int4 groups in the experts (int4_experts: SGLang repacks them for
Marlin). What SGLang does not keep as loaded its own loader takes (docs/quant.md); --landing loader: with any scheme. Then:

    disk        greedy tokens of weights B as the server loaded them
    equal       check_weight_equal: the trainer, at B, overwrites every byte that the plan covers; all live bytes must be those
                that the disk load left
    other       the trainer goes to weights A; a sync must change the tokens
    sync        the trainer goes back to B; after a sync the tokens must be those of disk
    rounds      more syncs, timed by phase and by call, with A and B in turn; after the last the tokens must be B's again
    reload      SGLang's own /update_weights_from_disk of the checkpoint, timed; the tokens must be those of disk (not after
                syncs by SGLang's own loader: what it has transposed or packed, that route cannot fill)

Tensors of the server that the engine's table does not know are named, and declared constant for this run: then a fingerprint
proves that they do not change. --graphs: with CUDA graphs, which read tensors by their addresses. --device cpu rehearses it
with tiny sizes on a CPU server, bf16 only.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import httpx
import xxhash
from gpu_p2p import LiveSource
from workers import Phases, Remote

from weight_sync.config import engine_yaml, family_yaml, quant_yaml
from weight_sync.ids import Deadline
from weight_sync.layout.table import Layout
from weight_sync.plan.schedule import Budget, CostModel
from weight_sync.quant.emission import Quantisation
from weight_sync.quant.published import from_hf
from weight_sync.session.connect import SyncSpec
from weight_sync.session.inputs import Declared, dims_of, layout_of
from weight_sync.session.landing import Landing, To
from weight_sync.session.session import WeightSync
from weight_sync.session.source import SourceAgent

A, B = 1, 2  # seeds of two sets of weights
COSTS = CostModel(seconds_per_write=1e-10, wire=3.7e11, copy=1.5e12)
GPU_ARGUMENTS = (
    "--attention-backend", "triton", "--sampling-backend", "pytorch", "--grammar-backend", "none",
    "--mem-fraction-static", "0.5",
)  # fmt: skip
PROMPTS = [[(7 * i * i + 31 * j + 11) % 250 + 3 for j in range(8 + 8 * i)] for i in range(4)]
NEW_TOKENS = 48


def model_config(layers: int, experts: int, tiny: bool) -> dict[str, Any]:
    sizes = {"hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 32768,
             "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts_per_tok": 4}  # fmt: skip
    if tiny:
        sizes = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 256,
                 "intermediate_size": 256, "moe_intermediate_size": 128, "num_experts_per_tok": 2}  # fmt: skip
    return {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe",
        "num_hidden_layers": layers, "num_experts": experts, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "norm_topk_prob": True, "tie_word_embeddings": False,
        "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 4096, "attention_bias": False,
        "bos_token_id": 1, "eos_token_id": 2, "dtype": "bfloat16", **sizes,
    }  # fmt: skip


def declared(config: Mapping[str, Any], quantization: Mapping[str, Any] | None) -> tuple[Declared, Declared]:
    """Both sides; quantization: as in the config.json of the engine's checkpoint."""
    quant = None if quantization is None else Quantisation(*from_hf(quantization, quant_yaml)).to_json()
    family = family_yaml("qwen3_moe")
    source = Declared(family, config, {"ranks": 1}, None, {"vocab_multiple": 128}, quant=quant)
    return source, Declared(family, config, {"tp": 1}, engine_yaml("sglang"), quant=quant)


def compressed(form: str, weights: dict[str, Any], inputs: dict[str, Any] | None, ignore: list[str]) -> dict[str, Any]:
    """A quantization_config of compressed-tensors."""
    group = {"targets": ["Linear"], "weights": weights | {"symmetric": True, "dynamic": False}, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed",
        "ignore": ["lm_head", "re:.*mlp.gate$", *ignore], "config_groups": {"group_0": group},
    }  # fmt: skip


def quantization_of(scheme: str, config: Mapping[str, Any]) -> dict[str, Any]:
    from weight_sync_integrations.quantised import fp8_config

    fp8 = {"num_bits": 8, "type": "float", "symmetric": True}
    if scheme == "fp8_channel":
        inputs = fp8 | {"strategy": "token", "dynamic": True}
        return compressed("float-quantized", fp8 | {"strategy": "channel"}, inputs, [])
    if scheme == "int4_experts":
        weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
        return compressed("pack-quantized", weights, None, ["re:.*self_attn.*"])
    return fp8_config(config)


class Trainer:
    """One Megatron rank's live parameters on the first device, with an agent for each scheme, and the checkpoints' author."""

    def __init__(self, config: dict[str, Any], schemes: list[str], transport: dict[str, Any], device: str) -> None:
        import torch

        from weight_sync.transport import registry

        self.torch, self.device, self.config = torch, device, config
        source = declared(config, None)[0]
        self.layout: Layout = layout_of(source, "trainer")
        params = self.layout.rank_params(0)
        total = sum(-(-p.numel // 64) * 64 for p in params)
        # One contiguous buffer, as Megatron's distributed optimizer keeps parameters.
        buffer, at = torch.zeros(total, dtype=torch.bfloat16, device=device), 0
        self.params: dict[str, Any] = {}
        for p in params:
            self.params[p.name] = buffer[at : at + p.numel].view(p.shape)
            at += -(-p.numel // 64) * 64
        live = LiveSource(0, self.params, dims_of(source, "trainer").coords(0))
        if device == "cpu":
            live.quiesce = lambda: None  # type: ignore[method-assign] - it waits for a GPU
        self.agents = {name: SourceAgent(live, partial(registry.create, **transport)) for name in schemes}

    def agents_of(self, name: str, method: str, payload: Any) -> Any:
        return self.agents[name].call(method, payload)

    def tensor(self, number: int, seed: int) -> Any:
        """One HF tensor of a set of weights: norms near 1, matrices with std 1.2 / sqrt(columns)."""
        torch, catalog = self.torch, self.layout.catalog
        name, shape = catalog.name(number), catalog.pattern_of(number).shape
        generator = torch.Generator(self.device).manual_seed(xxhash.xxh3_64_intdigest(f"{seed}:{name}".encode()) >> 2)
        noise = torch.randn(shape, generator=generator, device=self.device)
        values = noise * (1.2 / shape[-1] ** 0.5) if len(shape) > 1 else noise * 0.1 + 1.0
        return values.to(torch.bfloat16)

    def load(self, seed: int) -> None:
        """As an optimiser step would: every live parameter gets other values, in place."""
        layout = self.layout
        by_tensor: dict[int, list[int]] = {}
        for row, tensor in enumerate(layout.tensor.tolist()):
            by_tensor.setdefault(tensor, []).append(row)
        for tensor, rows in by_tensor.items():
            full = self.tensor(tensor, seed)
            for row, shard in zip(rows, layout.shards(rows), strict=True):
                box = tuple(slice(o, o + n) for o, n in zip(shard.box.offset, shard.box.shape, strict=True))
                flat = self.params[layout.params[int(layout.param[row])].name].reshape(-1)
                flat.as_strided(shard.box.shape, shard.strides, flat.storage_offset() + shard.start).copy_(full[box])
        if self.device != "cpu":
            self.torch.cuda.synchronize()

    def write(self, folder: str, seed: int, parts: int) -> list[str]:
        """A set of weights as checkpoints of a share of the tensors each, in folders of their own."""
        from safetensors.torch import save_file

        def save(part: int) -> str:
            here = Path(folder) / f"part-{part}"
            here.mkdir(parents=True)
            mine = range(part, len(self.layout.catalog.shapes), parts)
            tensors = {self.layout.catalog.name(number): self.tensor(number, seed).cpu() for number in mine}
            save_file(tensors, here / "model.safetensors", metadata={"format": "pt"})
            (here / "config.json").write_text(json.dumps(self.config))
            return str(here)

        with ThreadPoolExecutor(min(parts, 8)) as pool:
            return list(pool.map(save, range(parts)))


class Trainers:
    """TrainerGroup of the one rank."""

    world = 1

    def __init__(self, side: Remote, name: str) -> None:
        self._side, self._name = side, name

    def call(self, method: str, payloads: Mapping[int, Mapping[str, Any]], deadline: Deadline) -> dict[int, dict[str, Any]]:
        deadline.check(f"trainer {method}")
        return {rank: self._side("agents_of", self._name, method, dict(payload)) for rank, payload in payloads.items()}


def gathered(parts: list[Path], folder: Path) -> Path:
    """One checkpoint of those of its parts."""
    folder.mkdir(parents=True)
    for number, part in enumerate(parts, 1):
        os.link(part / "model.safetensors", folder / f"model-{number:05d}-of-{len(parts):05d}.safetensors")
    (folder / "config.json").write_text((parts[0] / "config.json").read_text())
    return folder


def quantised(parts: list[Path], folder: Path, quantization: Mapping[str, Any]) -> list[Path]:
    """Each part by the float64 reference, in processes of their own: it is slow."""
    from weight_sync_integrations.quantised import quantise_checkpoint

    with ProcessPoolExecutor(min(len(parts), os.cpu_count() or 1), mp_context=get_context("spawn")) as pool:
        jobs = [pool.submit(quantise_checkpoint, part, folder / part.name, quantization) for part in parts]
        return [job.result() for job in jobs]


class Log:
    """What is said, with seconds since the start; and what was not as it must be."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.failures: list[str] = []

    def __call__(self, text: str) -> None:
        print(f"[{time.perf_counter() - self.began:6.1f}] {text}", flush=True)

    def require(self, good: bool, text: str) -> None:
        self(f"{'ok' if good else 'FAILED'}: {text}")
        if not good:
            self.failures.append(text)


def serve(name: str, folder: Path, options: argparse.Namespace, log: Log) -> Any:
    from weight_sync_integrations.sglang.launch import ServerSpec, new_token, start

    token, began = new_token(), time.perf_counter()
    arguments: tuple[str, ...] = ()
    if options.device == "cuda":
        graphs = () if options.graphs else ("--disable-cuda-graph",)
        arguments = (*GPU_ARGUMENTS, *graphs, "--base-gpu-id", str(options.server_gpu))
    spec = ServerSpec(
        model=str(folder), token=token, name=name, device=options.device, max_total_tokens=8192, python=sys.executable,
        log=str(options.logs / f"server-{name}.log"), transport=options.transport, arguments=arguments,
    )  # fmt: skip
    server = start(spec, Deadline.after(options.patience))
    log(f"{name}: server is ready, with our worker announced, after {time.perf_counter() - began:.1f} s")
    return server, token


def timed_calls(engine: Any) -> dict[str, list[float]]:
    """Seconds of every call to this engine from now on, by route of the server or method of our worker."""
    seconds: dict[str, list[float]] = defaultdict(list)

    def watch(owner: Any, method: str) -> None:
        call = getattr(owner, method)

        def timed(first: Any, what: str, *rest: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(first, what, *rest)
            finally:
                seconds[what].append(time.perf_counter() - began)

        setattr(owner, method, timed)

    watch(engine._http, "_send")
    watch(engine._workers, "one")
    return seconds


def checked(name: str, trainer: Remote, server: Any, token: str, folder: Path, options: argparse.Namespace, log: Log) -> Any:
    """Everything of the module's docstring for one server. Returns figures."""
    from weight_sync_integrations.sglang.engine import SglangEngine

    def limit() -> Deadline:
        return Deadline.after(options.patience)

    engine = SglangEngine(server.name, server.url, server.workers, token)
    described = engine.describe(limit())
    log(f"{name}: {described.software}, refused: {list(described.refusals)}")
    routes = httpx.get(f"{server.url}/openapi.json", timeout=60).raise_for_status().json()["paths"]
    offered = sorted(path for path in routes if path.endswith("_weight_update"))
    log(f"{name}: routes of a weight update: {offered or 'none'}")
    unknown = [e for entries in engine.inventory(None, limit()).values() for e in entries if e["keep"] is None]
    if unknown:
        for entry in unknown[:20]:
            log(f"{name}: not in the engine's table, declared constant: {entry}")
        engine.close()
        declare = {entry["name"]: "constant" for entry in unknown}
        engine = SglangEngine(server.name, server.url, server.workers, token, declare=declare)

    def tokens() -> list[list[int]]:
        return [engine.generate(prompt, NEW_TOKENS, limit()) for prompt in PROMPTS]

    def timed(call: Callable[[], Any]) -> float:
        began = time.perf_counter()
        call()
        return time.perf_counter() - began

    quantization = json.loads((folder / "config.json").read_text()).get("quantization_config")
    source, target = declared(options.config, quantization)
    watch = Phases()
    budget = Budget(512 << 20, 512 << 20) if options.device == "cuda" else Budget()
    landing = Landing(options.landing, (256 << 20) if options.device == "cuda" else 300_000)  # several waves
    spec = SyncSpec(source, target, witness=True, costs=COSTS, budget=budget, landing=landing)
    sync = WeightSync(Trainers(trainer, name), [engine], spec, observer=watch)
    disk = tokens()
    # Or the second time finds its prompts in the prefix cache, and a prefill of another length rounds otherwise.
    httpx.post(f"{server.url}/flush_cache", timeout=60).raise_for_status()
    log.require(tokens() == disk, f"{name}: two greedy generations of the same weights are equal")
    trainer("load", B)
    began = time.perf_counter()
    connection = sync.connect()
    moved = int(connection.plan.nbytes.sum())
    log(
        f"{name}: connected in {time.perf_counter() - began:.1f} s, with the engine's loader as second witness: "
        f"{len(connection.plan)} transfers, {moved / 1e9:.3f} GB, digest {connection.digest}"
    )
    figures: dict[str, Any] = {"bytes": moved, "transfers": len(connection.plan), "digest": connection.digest}
    if connection.by_loader:
        log(f"{name}: by SGLang's own loader, in {len(connection.schedule.waves)} waves: {connection.by_loader}")
        figures |= {"waves": len(connection.schedule.waves), "by_loader": connection.by_loader}
    seconds = timed(lambda: sync.check_weight_equal(1))
    log(f"ok: {name}: check_weight_equal: every live byte is what the disk load left ({seconds:.2f} s)")
    log.require(tokens() == disk, f"{name}: the same tokens after it")
    trainer("load", A)
    sync.sync(2)
    other = tokens()
    log.require(other != disk, f"{name}: other weights, other tokens ({_differ(other, disk)} of {len(PROMPTS)} answers differ)")
    trainer("load", B)
    sync.sync(3)
    synced = tokens()
    log.require(synced == disk, f"{name}: after the sync, the tokens of the disk load: {synced[0][:8]}...")
    watch.seconds.clear()
    calls = timed_calls(engine)
    figures["sync"] = []
    for version in range(4, 4 + 2 * options.rounds):
        trainer("load", A if version % 2 == 0 else B)
        figures["sync"].append(timed(partial(sync.sync, version)))
    figures["phases"] = {phase: statistics.median(values) for phase, values in watch.seconds.items()}
    # Of one sync: routes of SGLang's own are what it imposes, the worker's methods are ours.
    figures["calls"] = {what: sum(values) / (2 * options.rounds) for what, values in calls.items()}
    log.require(
        tokens() == disk, f"{name}: {2 * options.rounds} more syncs, A and B in turn; the tokens of the disk load again"
    )
    if not connection.by_loader:
        figures["reload"] = timed(lambda: engine.load_from_disk(str(folder), limit()))
        text = f"{name}: SGLang's own reload from disk ({figures['reload']:.2f} s) gives the same tokens"
        log.require(tokens() == disk, text)
    engine.close()
    middle = statistics.median(figures["sync"])
    log(
        f"{name}: sync {middle:.4f} s ({min(figures['sync']):.4f} to {max(figures['sync']):.4f}), {moved / 1e9:.3f} GB; "
        + ", ".join(f"{phase} {value:.4f}" for phase, value in figures["phases"].items())
    )
    log(f"{name}: of it in calls: " + ", ".join(f"{what} {value:.4f}" for what, value in figures["calls"].items()))
    return figures


def _differ(one: list[list[int]], other: list[list[int]]) -> int:
    return sum(a != b for a, b in zip(one, other, strict=True))


def run(options: argparse.Namespace, work: Path, log: Log) -> dict[str, Any]:
    trainer = Remote(Trainer, options.config, options.schemes, options.transport, options.trainer_device)
    trainer.ready()
    parts = [Path(part) for part in trainer("write", str(work / "parts"), B, options.parts)]
    log(f"{len(parts)} parts of a bf16 checkpoint written")
    figures: dict[str, Any] = {}
    with ThreadPoolExecutor(len(options.schemes)) as pool:
        made: dict[str, Path] = {}
        starting: dict[str, Any] = {}
        mine: list[Path] = []
        for name in sorted(options.schemes, reverse=True):  # the plain one starts while the others' checkpoints are made
            if name != "none":
                mine = quantised(parts, work / "quantised" / name, quantization_of(name, options.config))
                log(f"{name}: checkpoint quantised by the float64 reference")
            made[name] = gathered(parts if name == "none" else mine, work / name)
            starting[name] = pool.submit(serve, name, made[name], options, log)
        servers: dict[str, Any] = {}
        try:
            for name in options.schemes:
                servers[name], token = starting[name].result()
                try:
                    figures[name] = checked(name, trainer, servers[name], token, made[name], options, log)
                except Exception as error:  # noqa: BLE001 - the other scheme is still to be measured
                    notes = "".join(f"\n    {note}" for note in getattr(error, "__notes__", []))
                    log.require(False, f"{name}: {type(error).__name__}: {error}{notes}")
                servers.pop(name).stop()
        finally:
            for job in starting.values():
                if job.done() and job.exception() is None:
                    job.result()[0].stop()
            trainer.process.kill()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    schemes = ("none", "fp8_block", "fp8_channel", "int4_experts")
    parser.add_argument("--schemes", nargs="+", choices=schemes, default=["none", "fp8_block"])
    parser.add_argument("--landing", type=To, choices=tuple(To), default=To.AUTO, help="weight_sync.landing.to")
    parser.add_argument("--graphs", action="store_true", help="servers capture CUDA graphs")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5, help="timed syncs of each set of weights")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--patience", type=float, default=200.0, help="seconds for a server to start, and for any one call")
    parser.add_argument("--logs", type=Path, default=Path("outputs/gpu_server"))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.config = model_config(options.layers, options.experts, options.device == "cpu")
    if options.device == "cpu":
        if options.schemes != ["none"]:
            raise SystemExit("--device cpu: only --schemes none; SGLang has no fp8 kernels for a CPU")
        options.transport, options.trainer_device, options.parts = {"name": "cma"}, "cpu", 2
    else:
        import torch

        options.transport, options.trainer_device = {"name": "cuda_ipc"}, "cuda:0"
        options.server_gpu, options.parts = torch.cuda.device_count() - 1, min(24, os.cpu_count() or 1)
    log = Log()
    with tempfile.TemporaryDirectory(prefix="gpu-server-") as work:
        figures = run(options, Path(work), log)
    if options.json:
        options.json.write_text(json.dumps({"config": options.config, "figures": figures, "failures": log.failures}))
    if log.failures:
        raise SystemExit(f"{len(log.failures)} checks failed: {'; '.join(log.failures)}")


if __name__ == "__main__":
    main()
