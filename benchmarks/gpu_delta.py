"""Complete sessions against deltas that a GPU encodes, on two GPUs, in one run.

    python benchmarks/gpu_delta.py [--layers 48] [--rounds 5] [--shares 0.001 0.01 0.03] [--staging 512] [--snapshot device]

Needs what gpu_p2p.py needs (no Mooncake). Qwen3-30B-A3B shapes in bf16, the trainer's rank on GPU 0, the engine's on GPU 1; the
snapshot lies beside the weights on GPU 0. For each share of changed elements, several times:

    limit      one copy of all bytes by the copy engine
    complete   our sync over cuda_ipc: pause, write, verify every digest on both GPUs, commit, resume (an in-process double)
    delta      a sync that sends what changed, of which: encode (engines serve on), pause to resume

Elements change at random places: nothing is more spread out than that. A delta is followed by a complete session over scrambled
parameters; after both the digest of every engine parameter must be the same. Medians and ratios are printed, and what both
would take where each GPU's link carries 50 GB/s (400 Gb/s): computed (bytes / rate in place of the measured write, all else as
measured), not run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gpu_p2p
from gpu_p2p import Side, SideEngine, SideTrainers
from workers import Phases, Remote, all_of, free_port, median, timed

from weight_sync.delta.spec import DeltaSpec
from weight_sync.session.connect import SyncSpec
from weight_sync.session.inputs import dims_of
from weight_sync.session.session import WeightSync

gpu_p2p.TRANSPORTS = {"complete": {"name": "cuda_ipc"}, "delta": {"name": "cuda_ipc"}}
"""Two pairs of agents over the same memory, neither of which knows of the other: they write the same bytes."""
LINK = 50e9
_AT_A_TIME = 1 << 30


class Changing(Side):
    """A side whose optimiser steps change a share of its elements."""

    def __init__(self, trainer: bool, layers: int, port: int) -> None:
        super().__init__(trainer, layers, "same", port, list(gpu_p2p.TRANSPORTS))

    def change(self, share: float) -> None:
        torch = self.torch
        for buffer in self.buffers:
            words = buffer.view(torch.int16)
            for low in range(0, len(words), _AT_A_TIME):
                part = words[low : low + _AT_A_TIME]
                at = torch.randint(0, len(part), (int(share * len(part)),), device="cuda")
                part[at] = torch.randint(-(2**15), 2**15, at.shape, dtype=torch.int16, device="cuda")
        torch.cuda.synchronize()


def session(sides: list[Remote], name: str, layers: int, watch: Phases, delta: DeltaSpec | None) -> WeightSync:
    source, target = gpu_p2p.specs(layers, "same")
    engine = SideEngine(sides[1], name, 1, model=target.config, sizes=dict(dims_of(target, "rollout").sizes))
    spec = SyncSpec(source, target, witness=False, costs=gpu_p2p.COSTS["ours"], delta=delta)
    return WeightSync(SideTrainers(sides[0], name, 1), [engine], spec, observer=watch)


def run(layers: int, rounds: int, shares: Sequence[float], staging: int, snapshot: Any) -> dict[str, Any]:
    port = free_port()
    sides = [Remote(Changing, trainer, layers, port) for trainer in (True, False)]
    for side in sides:
        side.ready()
    watches = {name: Phases() for name in gpu_p2p.TRANSPORTS}
    syncs = {
        "complete": session(sides, "complete", layers, watches["complete"], None),
        "delta": session(sides, "delta", layers, watches["delta"], DeltaSpec(snapshot, 1.0, staging)),
    }
    found: dict[str, Any] = {"shares": {}, "connect": {}}
    for name, sync in syncs.items():
        began = time.perf_counter()
        found["bytes"] = int(sync.connect().plan.nbytes.sum())
        found["connect"][name] = time.perf_counter() - began
    sides[0]("map_peer", sides[1]("export"))
    versions = dict.fromkeys(syncs, 0)

    def one(name: str) -> tuple[Any, dict[str, float]]:
        versions[name] += 1
        return timed(syncs[name], watches[name], versions[name])

    one("complete")
    _, found["first"] = one("delta")
    for share in shares:
        rows: list[dict[str, Any]] = []
        for _ in range(rounds + 1):  # one to warm up
            sides[0]("change", share)
            all_of(sides, "reset_peak")
            outcome, delta = one("delta")
            extra = all_of(sides, "peak")
            after = sides[1]("digest")
            sides[1]("scramble")
            began = time.perf_counter()
            sides[0]("limit", found["bytes"])
            limit = time.perf_counter() - began
            sides[1]("scramble")
            whole, complete = one("complete")
            if not outcome.delta.used:
                raise SystemExit(f"no delta: {outcome.delta.text}")
            if outcome.digest != whole.digest or after != sides[1]("digest"):
                raise SystemExit("a delta left other bytes than a complete session")
            rows.append(
                {
                    "limit": limit, "complete": complete, "delta": delta, "encoded": outcome.bytes, "extra": extra,
                    "apply": outcome.delta.apply_seconds, "rounds": outcome.delta.rounds,
                }
            )  # fmt: skip
        found["shares"][str(share)] = rows[1:]
    for side in sides:
        side.process.kill()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.001, 0.01, 0.03])
    parser.add_argument("--staging", type=int, default=512, help="MB for encoded changes, on each side")
    parser.add_argument("--snapshot", choices=("device", "host"), default="device")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    result = run(options.layers, options.rounds, options.shares, options.staging << 20, options.snapshot)
    nbytes, connect = result["bytes"], result["connect"]
    print(
        f"{nbytes / 1e9:.2f} GB, {options.rounds} rounds after one to warm up, medians; connecting took "
        f"{connect['complete']:.1f} s, with deltas {connect['delta']:.1f} s; the first snapshot {result['first']['keep']:.3f} s"
    )
    for share, rows in result["shares"].items():
        encoded, apply = median(rows, "encoded"), median(rows, "apply")
        print(f"{float(share):.1%} changed: {encoded / 1e6:.0f} MB, 1/{nbytes / encoded:.0f} of all bytes")
        for what in ("sync", "stalled"):
            ratio = statistics.median(row["delta"][what] / row["complete"][what] for row in rows)
            whole, delta = median(rows, "complete", what), median(rows, "delta", what)
            # What is not moving bytes stays as measured.
            moved = median(rows, "complete", "write on ranks"), median(rows, "delta", "write on ranks")
            link = whole - moved[0] + nbytes / LINK, delta - moved[1] + encoded / LINK
            print(
                f"  {what:8} complete {whole:.4f}, delta {delta:.4f} s: {ratio:.2f} (limit {median(rows, 'limit'):.4f}); "
                f"computed for {LINK / 1e9:.0f} GB/s: {link[0]:.3f}, {link[1]:.3f} s: {link[1] / link[0]:.2f}"
            )
        names = [name for name in rows[0]["delta"] if name not in ("sync", "stalled")]
        print("  delta by phase: " + ", ".join(f"{name} {median(rows, 'delta', name):.4f}" for name in names))
        extra = ", ".join(f"{n / 1e6:.0f}" for n in rows[-1]["extra"])
        print(f"  apply {apply:.4f} s in {median(rows, 'rounds'):.0f} rounds; extra MB (trainer, engine) {extra}")
    if options.json:
        options.json.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
