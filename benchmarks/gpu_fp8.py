"""bf16 against fp8 quantised at the source: the same weights, two GPUs, one run.

    python benchmarks/gpu_fp8.py [--layers 48] [--rounds 5] [--block 128] [--budget 512] [--no-report]

Needs what gpu_p2p.py needs. Qwen3-30B-A3B shapes; the trainer's bf16 weights lie on GPU 0, and on GPU 1 lie two engines'
parameters, one set bf16 and one fp8 with a float32 scale for each block. In turn, several times:

    limit   one copy of the bf16 bytes by the copy engine
    bf16    our sync over cuda_ipc: pause, write, verify every digest on both GPUs, commit, resume (an in-process double)
    fp8     the same; values and scales are made on GPU 0, in a staging buffer of --budget MB

The fp8 engine's parameters are compared with what plain torch operations make of the trainer's weights, by digests of every
parameter. --no-report: the numbers of what quantising cost (weight_sync.quant.report) are not computed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import gpu_p2p
import numpy as np
from gpu_p2p import LiveSource, Side, SideEngine, SideTrainers
from workers import Phases, Remote, all_of, free_port

from weight_sync.config import quant_yaml
from weight_sync.plan.schedule import Budget, CostModel
from weight_sync.quant.emission import Quantisation
from weight_sync.quant.published import Excludes
from weight_sync.quant.scheme import load_scheme
from weight_sync.session.connect import SyncSpec
from weight_sync.session.inputs import Declared, layout_of
from weight_sync.session.session import WeightSync
from weight_sync.session.source import SourceAgent
from weight_sync.session.target import TargetAgent

gpu_p2p.TRANSPORTS = {"ours": {"name": "cuda_ipc"}, "fp8": {"name": "cuda_ipc"}}
COSTS = CostModel(seconds_per_write=1e-10, wire=3.7e11, copy=1.5e12)


def quantised(sides: tuple[Declared, Declared], block: int) -> tuple[Declared, Declared]:
    quant = Quantisation(load_scheme("fp8_block", quant_yaml, {"group": [block, block]}), Excludes("fp8")).to_json()
    source, target = sides
    return replace(source, quant=quant), replace(target, quant=quant)


class QuantSide(Side):
    """A Side with a second engine, whose weights are fp8."""

    def __init__(self, trainer: bool, layers: int, port: int, block: int) -> None:
        super().__init__(trainer, layers, "same", port, ["ours"])
        torch = self.torch
        self._block = block
        self.made = layout_of(quantised(gpu_p2p.specs(layers, "same"), block)[1], "rollout")
        coords = next(iter(self.agents.values()))
        if trainer:
            torch.manual_seed(1)
            for buffer in self.buffers:
                buffer.normal_(0, 0.02)
            source = LiveSource(0, self.params[0], coords._source._coords)
            self.agents["fp8", 0] = SourceAgent(source, self._open)
        else:
            self.fp8 = self._second()
            self.agents["fp8", 0] = TargetAgent(
                rank=0, host="localhost", coords=coords.coords, tensors=lambda: self.fp8, transport=self._open
            )

    def _open(self) -> Any:
        from weight_sync.transport import registry

        return registry.create("cuda_ipc")

    def _second(self) -> dict[str, Any]:
        torch = self.torch
        return {p.name: torch.zeros(p.shape, dtype=getattr(torch, p.dtype), device="cuda") for p in self.made.params}

    def scramble_fp8(self) -> None:
        for tensor in self.fp8.values():
            tensor.view(self.torch.uint8).fill_(0x55)

    def digest_fp8(self) -> list[str]:
        return self._digests(self.fp8)

    def expected_fp8(self) -> list[str]:
        """Digests of the fp8 engine's parameters as plain torch makes them of this side's weights."""
        torch, made = self.torch, self.made
        there = self._second()
        words = {name: t.view(torch.uint8).view(-1).view(_words(torch, t)) for name, t in there.items()}
        cache: dict[int, dict[str, Any]] = {}
        for row in np.argsort(made.catalog.base[made.tensor], kind="stable").tolist():
            tensor, param = int(made.tensor[row]), made.params[int(made.param[row])]
            base = int(made.catalog.base[tensor])
            if base not in cache:
                cache = {base: self._made_of(base, bool(made.catalog.is_made[tensor]))}
            whole = cache[base][param.part]
            offset, shape = made.offset[row], made.shape[row]
            box = tuple(slice(int(o), int(o + n)) for o, n in zip(offset[: whole.ndim], shape, strict=False))
            flat = words[param.name]
            size = [int(n) for n in shape[: whole.ndim]]
            steps = [int(s) for s in made.strides[row][: whole.ndim]]
            flat.as_strided(size, steps, int(made.start[row])).copy_(whole[box])
        return self._digests(there)

    def _made_of(self, base: int, quantise: bool) -> dict[str, Any]:
        """Words of what a weight becomes: by the part's name, "" for the weight itself."""
        torch, source = self.torch, self.source
        shape = source.catalog.pattern_of(base).shape
        full = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
        for row in self._rows(source, range(base, base + 1)).tolist():
            n = len(shape)
            offset, size, steps = source.offset[row][:n], source.shape[row][:n], source.strides[row][:n]
            flat = self.params[0][source.params[int(source.param[row])].name].reshape(-1)
            view = flat.as_strided(
                [int(x) for x in size], [int(x) for x in steps], flat.storage_offset() + int(source.start[row])
            )
            full[tuple(slice(int(o), int(o + k)) for o, k in zip(offset, size, strict=True))] = view
        if not quantise:
            return {"": full.view(torch.int16)}
        b = self._block
        rows, columns = -(-shape[0] // b), -(-shape[1] // b)
        padded = torch.zeros(rows * b, columns * b, device="cuda")
        padded[: shape[0], : shape[1]] = full.float()
        tiles = padded.view(rows, b, columns, b)
        # By a tensor: torch turns a division by a number into a multiplication by its inverse.
        scale = tiles.abs().amax((1, 3)).clamp_min(1e-10) / torch.full((), 448.0, device="cuda")
        inverse = torch.ones((), device="cuda") / scale
        codes = (tiles * inverse[:, None, :, None]).clamp(-448, 448).to(torch.float8_e4m3fn)
        values = codes.view(rows * b, columns * b)[: shape[0], : shape[1]]
        return {"values": values.view(torch.uint8), "scales": scale.view(torch.int32)}

    def _digests(self, tensors: dict[str, Any]) -> list[str]:
        from weight_sync.session.digests import LANES
        from weight_sync.session.memory import memory_of

        digests = memory_of(tensors, "engine").digests(LANES)
        digests.whole("all", list(tensors), lambda: [t.view(_words(self.torch, t)) for t in tensors.values()])
        return digests.hex(list(tensors))


def _words(torch: Any, tensor: Any) -> Any:
    return {1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()]


def session(
    sides: list[Remote], name: str, declared: tuple[Declared, Declared], budget: Budget, report: bool, watch: Phases
) -> WeightSync:
    from weight_sync.session.inputs import dims_of

    source, target = declared
    engine = SideEngine(sides[1], name, 1, model=target.config, sizes=dict(dims_of(target, "rollout").sizes))
    spec = SyncSpec(source, target, witness=False, costs=COSTS, budget=budget, report=report)
    return WeightSync(SideTrainers(sides[0], name, 1), [engine], spec, observer=watch)


def run(layers: int, rounds: int, block: int, budget: int, report: bool) -> dict[str, Any]:
    port = free_port()
    sides = [Remote(QuantSide, trainer, layers, port, block) for trainer in (True, False)]
    for side in sides:
        side.ready()
    plain = gpu_p2p.specs(layers, "same")
    declared = {"ours": plain, "fp8": quantised(plain, block)}
    phases = {name: Phases() for name in declared}
    syncs = {n: session(sides, n, declared[n], Budget(budget << 20, budget << 20), report, phases[n]) for n in declared}
    nbytes: dict[str, int] = {}
    for name, sync in syncs.items():
        began = time.perf_counter()
        nbytes[name] = int(sync.connect().plan.nbytes.sum())
        print(f"connecting {name} took {time.perf_counter() - began:.1f} s", flush=True)
    sides[0]("map_peer", sides[1]("export"))
    seconds: dict[str, list[float]] = {name: [] for name in ("limit", *syncs)}
    extra: dict[str, int] = {}
    for version in range(1, rounds + 2):
        for name in seconds:
            sides[1]("scramble_fp8" if name == "fp8" else "scramble")
            all_of(sides, "reset_peak")
            began = time.perf_counter()
            if name == "limit":
                sides[0]("limit", nbytes["ours"])
            else:
                syncs[name].sync(version)
            seconds[name].append(time.perf_counter() - began)
            extra[name] = all_of(sides, "peak")[0]
        if version == 1:
            found, wanted = sides[1]("digest_fp8"), sides[0]("expected_fp8")
            wrong = sum(a != b for a, b in zip(found, wanted, strict=True))
            if wrong:
                raise SystemExit(f"{wrong} of {len(found)} fp8 parameters are not what plain torch makes of the weights")
            print(f"{len(found)} fp8 parameters are byte for byte what plain torch makes of the weights", flush=True)
            seconds = {name: [] for name in seconds}  # the first round opens handles and compiles kernels
            for watch in phases.values():
                watch.seconds.clear()
    for side in sides:
        side.process.kill()
    shares = {name: {k: statistics.median(v) for k, v in watch.seconds.items()} for name, watch in phases.items()}
    return {"bytes": nbytes, "seconds": seconds, "extra": extra, "phases": shares}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--block", type=int, default=128)
    parser.add_argument("--budget", type=int, default=512, help="MB of staging")
    parser.add_argument("--no-report", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    result = run(options.layers, options.rounds, options.block, options.budget, not options.no_report)
    seconds, nbytes = result["seconds"], result["bytes"]
    for name, values in seconds.items():
        moved = nbytes.get(name, nbytes["ours"])
        middle = statistics.median(values)
        print(
            f"{name:6} {middle:.4f} s (from {min(values):.4f} to {max(values):.4f}), {moved / 1e9:.2f} GB, "
            f"{moved / middle / 1e9:.1f} GB/s; extra memory on the trainer's GPU {result['extra'].get(name, 0) / 1e6:.0f} MB"
        )
    ratio = statistics.median(a / b for a, b in zip(seconds["fp8"], seconds["ours"], strict=True))
    print(f"fp8 takes {ratio:.3f} of bf16's time (medians of {len(seconds['fp8'])} rounds in turn)")
    for name, parts in result["phases"].items():
        print(f"{name} by phase: {', '.join(f'{phase} {value:.4f}' for phase, value in parts.items())}")
    if options.json:
        options.json.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
