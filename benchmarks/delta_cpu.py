"""Delta sessions against complete ones, on one CPU machine, in one run.

    .venvs/trainer/bin/python benchmarks/delta_cpu.py --rounds 5 --layers 8

The ranks of benchmarks/cpu_p2p.py: two trainer ranks (Megatron tp2 ep2) feed two engine ranks (SGLang tp2 ep2), bf16, every
rank a process, Mooncake tcp on loopback, the engine an in-process double. For each share of changed elements, several times:

    A   a complete session
    B   a delta session, of which: encode (engines serve on), pause to resume, keep (engines serve again)
    A   a complete session

Elements change at random places: nothing is more spread out than that. Medians and ratios are printed, and what the same bytes
would take on a link of 25 Gb/s and of 1 Gb/s: computed (bytes / rate in place of the measured write, all else as measured), not
run.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from cpu_p2p import TRANSPORTS, Rank, specs
from workers import Phases, Remote, RemoteAgent, all_of, free_port, median, timed

from weight_sync.delta.spec import DeltaSpec
from weight_sync.session.connect import SyncSpec
from weight_sync.session.inprocess import InProcessEngine, InProcessTrainers
from weight_sync.session.inputs import dims_of
from weight_sync.session.session import WeightSync

TRANSPORTS["delta"] = TRANSPORTS["tcp"]
"""A second pair of agents over the same memory, which does not know of the complete sessions: they write the same bytes."""
LINKS = {"25 Gb/s": 25e9 / 8, "1 Gb/s": 1e9 / 8}


class Changing(Rank):
    """A rank whose optimiser steps change a share of its elements."""

    def change(self, share: float, seed: int) -> int:
        rng = np.random.default_rng((seed, self.index))
        at = rng.choice(len(self.buffer), int(share * len(self.buffer)), replace=False)
        self.buffer[at] ^= rng.integers(1, 2**15, len(at), dtype=np.uint16)
        return len(at)


def session(ranks: list[Remote], name: str, layers: int, watch: Phases, delta: DeltaSpec | None) -> WeightSync:
    source, target = specs(layers, "ep")
    trainers = InProcessTrainers([RemoteAgent(ranks[r], name, r) for r in range(2)])  # type: ignore[list-item]
    agents = [RemoteAgent(ranks[2 + r], name, r) for r in range(2)]
    sizes = dict(dims_of(target, "rollout").sizes)
    engine = InProcessEngine("engine", agents, model=target.config, sizes=sizes)  # type: ignore[arg-type]
    spec = SyncSpec(source, target, witness=False, delta=delta)
    return WeightSync(trainers, [engine], spec, observer=watch)  # type: ignore[arg-type]


def run(layers: int, rounds: int, shares: Sequence[float]) -> dict[str, Any]:
    port = free_port()
    ranks = [Remote(Changing, i, layers, "ep", port) for i in range(4)]
    for rank in ranks:
        rank.ready()
    watches = {name: Phases() for name in ("tcp", "delta")}
    syncs = {
        "tcp": session(ranks, "tcp", layers, watches["tcp"], None),
        "delta": session(ranks, "delta", layers, watches["delta"], DeltaSpec(max_share=1.0)),
    }
    nbytes = int(syncs["tcp"].connect().plan.nbytes.sum())
    versions = {"tcp": 0, "delta": 0}
    found: dict[str, Any] = {"bytes": nbytes, "shares": {}}

    def one(name: str) -> tuple[Any, dict[str, float]]:
        versions[name] += 1
        return timed(syncs[name], watches[name], versions[name])

    one("tcp")
    first, _ = one("delta")
    found["snapshot"] = max(first.delta.snapshot.values())
    seed = 0
    for share in shares:
        rows: list[dict[str, Any]] = []
        for _ in range(rounds + 1):  # one to warm up
            seed += 1
            all_of(ranks[:2], "change", share, seed)
            before, a = one("tcp")
            outcome, b = one("delta")
            after, again = one("tcp")
            if not outcome.delta.used or not before.digest == outcome.digest == after.digest:
                raise SystemExit(f"not the same bytes, or no delta: {outcome.delta.text}")
            whole = {key: (a[key] + again[key]) / 2 for key in ("sync", "stalled", "write")}
            rows.append({"complete": whole, "delta": b, "encoded": outcome.bytes, "apply": outcome.delta.apply_seconds})
        found["shares"][str(share)] = rows[1:]
    for rank in ranks:
        rank.process.kill()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.001, 0.01, 0.03, 0.10])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    result = run(options.layers, options.rounds, options.shares)
    nbytes = result["bytes"]
    print(
        f"{nbytes / 1e9:.3f} GB, 2 -> 2 ranks, {options.rounds} rounds after one to warm up, medians; snapshot "
        f"{result['snapshot'] / 1e6:.0f} MB on each trainer rank"
    )
    links = " ".join(f"{name + ' complete':>17} {'delta':>7}" for name in LINKS)
    print(f"{'':29} stalled{'':18} | not stalled{'':11} | stalled on a link of (computed)")
    print(f"{'changed':>8} {'MB':>8} {'smaller':>8} {'complete':>9} {'delta':>7} {'ratio':>6} | "
          f"{'encode':>7} {'apply*':>7} {'keep':>6} | {links}")  # fmt: skip
    for share, rows in result["shares"].items():
        encoded = median(rows, "encoded")
        stalled = median(rows, "complete", "stalled"), median(rows, "delta", "stalled")
        ratio = statistics.median(row["complete"]["stalled"] / row["delta"]["stalled"] for row in rows)
        # What is not moving bytes stays as measured; both trainer ranks share the link.
        rest = stalled[0] - median(rows, "complete", "write"), stalled[1] - median(rows, "delta", "write")
        apply = median(rows, "apply")
        on = " ".join(f"{rest[0] + nbytes / r:>17.3f} {rest[1] + apply + encoded / r:>7.3f}" for r in LINKS.values())
        print(
            f"{float(share):>8.1%} {encoded / 1e6:>8.2f} {nbytes / encoded:>7.1f}x {stalled[0]:>9.3f} {stalled[1]:>7.3f} "
            f"{ratio:>5.2f}x | {median(rows, 'delta', 'encode'):>7.3f} {apply:>7.3f} {median(rows, 'delta', 'keep'):>6.3f} | "
            f"{on}"
        )
    print("* part of the delta's stall")
    rows = next(iter(result["shares"].values()))
    names = [name for name in rows[0]["delta"] if name not in ("sync", "stalled")]
    print("delta by phase, first share: " + ", ".join(f"{name} {median(rows, 'delta', name):.3f}" for name in names))
    if options.json:
        options.json.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
