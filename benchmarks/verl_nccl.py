"""verl's own `nccl` checkpoint engine against ours: the same verl, the same Ray actors, the same bytes, in one run on two GPUs.

    python benchmarks/verl_nccl.py [--layers 8] [--rounds 5] [--bucket 2048] [--json FILE]
    python benchmarks/verl_nccl.py --device cpu [--transport tcp]       # tiny; stand-ins for NCCL and cupy (verl_nccl_cpu.py)

Needs verl 0.9.1 with ray, two CUDA devices of one host with peer access, cupy with NCCL, transformers 5, triton, cuda-bindings;
no vLLM and no SGLang. Qwen3-30B-A3B in bf16 (48 layers are 61 GB).

Both are driven by verl: its CheckpointEngineManager.update_weights is what is timed, around verl's own worker classes on Ray.

    trainer, GPU 0   ActorRolloutRefWorker.update_weights; one FSDP2 rank: transformers' model under fully_shard. Not run are
                     its constructor and FSDPEngine's, which would read a checkpoint and hold three more copies of it
    rollout, GPU 1   CheckpointEngineWorker, as it is, with an adapter that holds the engine's live parameters as vLLM has them
                     (w13, w2, qkv fused) and serves nothing

    verl    backend nccl: FSDPEngine.get_per_tensor_param() (with one rank nothing is gathered and experts are views, the best
            case), buckets filled by cupy and broadcast through ray.util.collective, each tensor copied into place by one copy_
    ours    backend weight_sync, transport cuda_ipc: our engine, patch, controller and session; pause, write, digests of every
            transfer on both GPUs compared, commit, resume
    limit   as many bytes by the copy engine, GPU 0 to GPU 1

STAND-INS, in favour of neither: no rollout server, so nothing to abort, pause or resume (a real one costs both the same calls);
for ours Ray calls instead of HTTP. In verl's favour: its adapters hand each tensor on to the engine's process through a second
bucket, and vLLM's loader looks up each name; here a prepared view is copied into.

Every sync gets new weights and finds the live parameters scrambled, and after it every byte of them is compared with an oracle
that knows the weights without having been sent any. Syncs alternate; the first round is not counted: NCCL connects, kernels are
compiled, memory is watched (all of the GPU's that is taken, by anybody). At the end the parts of verl's path are run alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.verl_nccl_rig import STRATEGIES, Rig, started  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--bucket", type=int, default=2048, help="MiB of verl's bucket (it has two); 2048 is its default")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--transport", choices=tuple(STRATEGIES), help="default: cuda_ipc, on CPUs cma")
    parser.add_argument("--json", type=Path)
    words = parser.parse_args()
    words.transport = words.transport or ("cma" if words.device == "cpu" else "cuda_ipc")
    result = run(words.device, words.transport, words.layers, words.rounds, words.bucket)
    report(result)
    if words.json:
        words.json.write_text(json.dumps(result, indent=1))
    return 0


def run(device: str, transport: str, layers: int, rounds: int, bucket: int) -> dict[str, Any]:
    with (
        tempfile.TemporaryDirectory(prefix="verl-nccl-") as name,
        started(device, transport, layers, bucket, Path(name)) as rig,
    ):
        return compare(rig, rounds)


# -- rounds ------------------------------------------------------------------------------------------------------------------


def compare(rig: Rig, rounds: int) -> dict[str, Any]:
    from benchmarks import verl_nccl_measured as measured
    from benchmarks import verl_nccl_sides as sides

    cpu = rig.facts["cpu"]
    seconds: dict[str, list[float]] = {kind: [] for kind in ("limit", *rig.managers)}
    first: dict[str, float] = {}
    memory: dict[str, list[dict[str, int]]] = {}
    inside: dict[str, list[dict[str, float]]] = {kind: [] for kind in rig.managers}
    if not cpu:
        rig.on(rig.trainer, measured.map_peer, rig.on(rig.rollout, measured.export))
        rig.on(rig.trainer, measured.limit)
    step = 0
    for number in range(rounds + 1):
        if not cpu and number:
            seconds["limit"].append(rig.on(rig.trainer, measured.limit))
        for kind, manager in rig.managers.items():
            step += 1
            rig.both(sides.use, kind)
            rig.on(rig.trainer, sides.change, step)
            rig.on(rig.rollout, sides.scramble)
            if not cpu and not number:
                rig.both(measured.watch)
            began = time.perf_counter()
            metrics = manager.update_weights(step)
            took = time.perf_counter() - began
            if not cpu and not number:
                memory[kind] = rig.both(measured.watched)
            if wrong := rig.on(rig.rollout, sides.wrong, step):
                whole = rig.facts["rollout"]["hf_tensors"]
                raise SystemExit(
                    f"after a sync of {kind} (step {step}) {len(wrong)} of {whole} tensors are not what the trainer holds "
                    f"(elements that differ): {', '.join(wrong[:4])}"
                )
            print(f"step {step}: {kind} {took:.4f} s, every byte as it should be", flush=True)
            if not number:
                first[kind] = took
                continue
            seconds[kind].append(took)
            inside[kind].append(_inside(rig, kind, metrics, took))
    alone = _alone(rig)
    return {"facts": rig.facts, "seconds": seconds, "first": first, "memory": memory, "inside": inside, "alone": alone}


def _inside(rig: Rig, kind: str, metrics: Mapping[str, Any], took: float) -> dict[str, float]:
    """Where one sync's time went, in seconds. Raises SystemExit for a sync of ours that did not compare digests."""
    from benchmarks import verl_nccl_sides as sides

    if kind == "verl":
        parts = rig.on(rig.rollout, sides.last)
        return {**parts, "prepare, topology, finalize": took - parts["receive"]}
    if not metrics["weight_sync/verified"]:
        raise SystemExit("ours compared no digests")
    prefix = "weight_sync/seconds/"
    phases = {key.removeprefix(prefix): value for key, value in metrics.items() if key.startswith(prefix)}
    return {**phases, "prepare, topology, finalize": took - metrics["weight_sync/seconds"]}


def _alone(rig: Rig) -> dict[str, float]:
    """The parts of verl's path, each by itself: the least of three."""
    from benchmarks import verl_nccl_measured as measured
    from benchmarks import verl_nccl_sides as sides

    rig.both(sides.use, "verl")
    nbytes = rig.facts["rollout"]["bytes"]
    return {
        "fill": min(rig.on(rig.trainer, measured.fill) for _ in range(3)),
        "broadcast": min(max(rig.both(measured.broadcast, nbytes)) for _ in range(3)),
        "load": min(rig.on(rig.rollout, measured.load) for _ in range(3)),
    }


# -- report ------------------------------------------------------------------------------------------------------------------


def report(result: Mapping[str, Any]) -> None:
    facts, seconds, alone = result["facts"], result["seconds"], result["alone"]
    rollout, nbytes = facts["rollout"], facts["rollout"]["bytes"]
    if facts["cpu"]:
        print("STAND-INS for NCCL and cupy, on CPUs: this shows that both paths work, the seconds say nothing about GPUs")
    for side in ("trainer", "rollout"):
        print(f"{side}: {', '.join(f'{key} {value}' for key, value in facts[side].items())}")
    print(
        f"{facts['layers']} layers, {nbytes / 1e9:.2f} GB in {rollout['hf_tensors']} HF tensors, {rollout['tensors']} live "
        f"parameters; {len(seconds['ours'])} rounds after one to warm up, every byte compared after each of "
        f"{2 * len(seconds['ours']) + 2} syncs; verl's bucket {facts['bucket'] >> 20} MiB"
    )
    middle = {kind: statistics.median(values) for kind, values in seconds.items() if values}
    heads = f"{'median s':>9} {'min':>8} {'max':>8} {'GB/s':>7} {'first s':>8}"
    print(f"{'':6} {heads}   extra memory in MB, trainer; rollout: peak (kept)")
    for kind, value in middle.items():
        extra = "; ".join(f"{m['peak'] / 1e6:.0f} ({m['kept'] / 1e6:.0f})" for m in result["memory"].get(kind, ()))
        low, high, first = min(seconds[kind]), max(seconds[kind]), result["first"].get(kind)
        figures = (
            f"{value:9.4f} {low:8.4f} {high:8.4f} {nbytes / value / 1e9:7.1f} {'' if first is None else f'{first:.2f}':>8}"
        )
        print(f"{kind:6} {figures}   {extra or 'not measured'}")
    ratios = [a / b for a, b in zip(seconds["verl"], seconds["ours"], strict=True)]
    print(f"verl / ours = {middle['verl'] / middle['ours']:.2f} (round by round {min(ratios):.2f} to {max(ratios):.2f})")
    if "limit" in middle:
        print(f"limit / ours = {middle['limit'] / middle['ours']:.3f}, limit / verl = {middle['limit'] / middle['verl']:.3f}")
    for kind, records in result["inside"].items():
        parts = {key: statistics.median(record.get(key, 0.0) for record in records) for key in records[0]}
        shown = sorted(parts.items(), key=lambda item: -item[1])
        print(f"{kind}, medians in s: " + ", ".join(f"{name} {value:.4f}" for name, value in shown if value >= 0.0005))
    longest = max(alone, key=lambda name: alone[name])
    print(
        "verl's parts alone, which overlap when it runs: "
        + ", ".join(f"{name} {value:.4f} s ({nbytes / value / 1e9:.0f} GB/s)" for name, value in alone.items())
        + f"; its limit is {longest}, {alone[longest] / middle['verl']:.0%} of its time"
    )


if __name__ == "__main__":
    sys.exit(main())
