"""What planning costs as both worlds grow: python benchmarks/plan_scale.py [--config NAME] [--to RANKS]

For each size, in a process of its own: seconds of one core for resolving both layouts, planning, proving and scheduling, most
memory, seconds for one trainer rank's part, and seconds for each million transfers, which stay level when the cost is linear.
The trainer is TP8 PP8 (DP grows with the world), the rollout has engines of 32 (TP32 EP32): from 64 + 64 ranks to --to of each.
--layers shortens the model, for machines with little memory: 4,096 + 4,096 ranks of all of Kimi-K2 are 12 million transfers.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from weight_sync.commands.common import hosts_of
from weight_sync.config import engine_yaml, family_for, family_yaml, hf_config
from weight_sync.plan.planner import make_plan
from weight_sync.plan.proof import prove_exact_once
from weight_sync.plan.schedule import make_schedule
from weight_sync.schema import JobConf, ModelConf
from weight_sync.session.inputs import Declared, PlanInputs, dropped_names, layout_of
from weight_sync.session.part import rank_part

STEPS = ("layouts", "plan", "proof", "schedule")


def inputs(config: str, layers: int | None, ranks: int) -> PlanInputs:
    """`ranks` trainer ranks and as many rollout ranks."""
    hf = hf_config(JobConf(model=ModelConf(config=config)))
    if layers is not None:
        hf["num_hidden_layers"] = layers
    count = hf["num_hidden_layers"]
    pipeline = [count // 8 + (i < count % 8) for i in range(8)]
    family, engine = family_yaml(family_for(hf)), engine_yaml("sglang")
    trainer = {"ranks": ranks, "tp": 8, "pp": 8, "ep": min(32, ranks // 8), "pipeline": pipeline}
    source = Declared(family, hf, trainer, None, {"vocab_multiple": 128 * 8})
    rollout = {"tp": 32, "moe_ep": 32, "engines": ranks // 32, "remainder": engine["remainder"]}
    target = Declared(family, hf, rollout, engine)
    return PlanInputs(source, target, *hosts_of(8, ranks, ranks), sorted(dropped_names(target, "rollout")))


def measure(config: str, layers: int | None, ranks: int) -> dict[str, Any]:
    """CPU seconds of every step (other work on the machine does not count), and the process's peak memory."""
    given = inputs(config, layers, ranks)
    began = time.process_time()
    rank_part(given, ranks // 2)
    part = time.process_time() - began
    marks = [time.process_time()]
    source, target = layout_of(given.source, "trainer"), layout_of(given.target, "rollout")
    marks.append(time.process_time())
    plan = make_plan(source, target, given.source_hosts, given.target_hosts)
    marks.append(time.process_time())
    prove_exact_once(plan, given.dropped, source=source, target=target)
    marks.append(time.process_time())
    make_schedule(plan)
    marks.append(time.process_time())
    steps = dict(zip(STEPS, (b - a for a, b in pairwise(marks)), strict=True))
    total = marks[-1] - marks[0]
    return {
        "ranks": ranks,
        "transfers": len(plan),
        **steps,
        "total": total,
        "part": part,
        "per_million": total / len(plan) * 1e6,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", default="kimi_k2", help="a shipped HF config with at least 32 experts")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--to", type=int, default=4096)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--one", type=int, help="measure this size in this process and print JSON")
    options = parser.parse_args()
    if options.one is not None:
        print(json.dumps(measure(options.config, options.layers, options.one)))
        return 0
    rows: list[dict[str, Any]] = []
    heads = " ".join(f"{key:>8}" for key in (*STEPS, "total", "per 1e6", "a part"))
    print(f"{'ranks':>13} {'transfers':>11} {heads} {'memory':>9}")
    ranks = 64
    while ranks <= options.to:
        command = [sys.executable, __file__, "--config", options.config, "--one", str(ranks)]
        command += ["--layers", str(options.layers)] if options.layers else []
        done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        row = json.loads(done.stdout)
        rows.append(row)
        steps = " ".join(f"{row[key]:8.2f}" for key in STEPS)
        rest = " ".join(f"{row[key]:8.2f}" for key in ("total", "per_million", "part"))
        memory = f"{row['peak_rss_bytes'] / 1e6:6.0f} MB"
        print(f"{ranks:>5} + {ranks:>5} {row['transfers']:>11,} {steps} {rest} {memory}", flush=True)
        ranks *= 2
    if options.output:
        options.output.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
