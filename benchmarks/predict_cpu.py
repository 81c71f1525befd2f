"""Our sync over CPU tcp on this machine, predicted from `bench link` and measured, in one run.

    .venvs/trainer/bin/python benchmarks/predict_cpu.py [--rounds 5] [--layers 8] [--engine ep|tp] [--json FILE]

First the machine's link is measured (weight_sync/commands/link.py), then benchmarks/cpu_p2p.py is run and its case b (pause,
write, verify every digest, commit, resume, 2 + 2 processes over Mooncake tcp) is compared with the simulation of the same
schedule; then the link is measured once more. The prediction uses the mean of both: on a shared machine they differ, and the
run says by how much, because no prediction can be better than that. Needs torch, for cpu_p2p's other cases.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import cpu_p2p

from weight_sync.commands.link import Link, cluster_of, measure
from weight_sync.plan.planner import make_plan
from weight_sync.plan.schedule import make_schedule
from weight_sync.session.inputs import dims_of, layout_of
from weight_sync.simulate import Options, simulate


def between(one: Link, other: Link) -> Link:
    """The geometric mean of two measurements."""
    return Link(**{key: (value * getattr(other, key)) ** 0.5 for key, value in asdict(one).items()})


def compared(layers: int, engine: str, rounds: int) -> dict[str, Any]:
    source, target = cpu_p2p.specs(layers, engine)
    worlds = dims_of(source, "trainer").world, dims_of(target, "rollout").world
    hosts = [["localhost"] * n for n in worlds]
    schedule = make_schedule(make_plan(layout_of(source, "trainer"), layout_of(target, "rollout"), *hosts))
    before = measure("tcp", rounds=rounds)
    measured = cpu_p2p.run(layers, engine, rounds)
    after = measure("tcp", rounds=rounds)
    said = simulate(schedule, cluster_of(between(before, after), "this_machine", "tcp"), Options(bucket=float(16 << 20)))
    return {
        "bytes": int(schedule.plan.nbytes.sum()),
        "measured": measured["seconds"]["b"],
        "phases_measured": measured["phases"]["tcp"],
        "predicted": said.prediction.seconds,
        "phases_predicted": said.prediction.phases,
        "bound": said.prediction.bound_seconds,
        "limit": said.prediction.limit,
        "link_before": asdict(before),
        "link_after": asdict(after),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--engine", choices=("ep", "tp"), default="ep")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    result = compared(options.layers, options.engine, options.rounds)
    took, said = result["measured"], result["predicted"]
    median = statistics.median(took)
    print(f"{result['bytes'] / 1e9:.3f} GB, 2 -> 2 processes, engine experts by {options.engine}, {len(took)} syncs")
    print(f"measured  {median:.3f} s (from {min(took):.3f} to {max(took):.3f})")
    print(
        f"predicted {said:.3f} s ({100 * (said / median - 1):+.0f}%), bound {result['bound']:.3f} s, limit: {result['limit']}"
    )
    for side in ("measured", "predicted"):
        print(f"  {side:9} {', '.join(f'{name} {value:.3f}' for name, value in result[f'phases_{side}'].items())}")
    drift = {k: result["link_after"][k] / v for k, v in result["link_before"].items() if v}
    print(f"  the link's own numbers, after / before: {', '.join(f'{k} {v:.2f}' for k, v in drift.items())}")
    if options.json:
        options.json.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
