"""Make docs/recipes.md: every recipe planned and proven, with its predicted time: python docs/recipes.py [--check].

The rows are computed by `plan` itself; tests/recipes compares each row of the page with what it gives now. Takes some 20 s.
"""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from weight_sync.commands.common import Job, job_of
from weight_sync.commands.plan import facts_of
from weight_sync.config import recipes
from weight_sync.observe.units import bytes_text, seconds_text

PAGE = Path(__file__).parent / "recipes.md"
INTRO = """# Recipes

<!-- Made by docs/recipes.py from recipes/*.yaml. Do not edit. -->

A recipe is a complete configuration for `train.py` with the parallel layouts of a published run, chosen by `+recipes=NAME`:

    python -m weight_sync plan +recipes=kimi_k2_h100x512
    python train.py +recipes=qwen3_30b_a3b_h100x32 model.path=DIR

The first needs a laptop only. Another strategy is chosen with `weight_sync=NAME` (no plus: the recipe has chosen one already);
any key can be overridden behind it. **None of these has been run at this size by us**: the numbers are plans, proven
exact-once, and predictions of the simulator for the recipe's cluster, not measurements; `train.py` was run on CPUs only.
Trainers hold bf16. So do engines, but for DeepSeek-V3 and Kimi-K2, which serve fp8: values and scales are made at the source,
and what moves is planned, proven and counted as fp8.

`train.py` starts one server process for each engine, on one node. The recipes whose engines span nodes (Qwen3-235B-A22B, GLM-5,
Kimi-K2) are therefore plans until a launcher over several nodes exists.
"""
MOVES = """
## What moves

Bytes on the wire, once for every engine. *rank max* is the most any rank sends or receives, *holds* its weights, *staging* what
it needs beside them (trainer / rollout).

| recipe | layout | transfers | bytes | trainer rank max (skew) | rollout rank max (skew) | holds | staging |
|---|---|---|---|---|---|---|---|"""
TIMES = """
## What it takes

On the recipe's cluster (`conf/weight_sync/cluster`). *bound*: no plan and no transport could be faster over these links.

| recipe | cluster | predicted | bound | what bounds it | where the time goes | remark |
|---|---|---|---|---|---|---|"""


@dataclass(frozen=True, slots=True)
class Row:
    """One recipe's line in both tables, and its note."""

    moves: str
    times: str
    note: str


def row_of(name: str) -> Row:
    """Plan a recipe and prove it. Raises what plan raises."""
    job = job_of([f"+recipes={name}"])
    schedule = job.inputs.schedule()
    facts = facts_of(job, schedule, 0.0)
    wire = f" ({job.conf.weight_sync.quant.scheme})" if facts["quantised_transfers"] else ""
    pairs = [f"{bytes_text(facts[f'bytes_max_{side}'])} ({facts[f'skew_{side}']:.2f})" for side in ("source", "destination")]
    two = {
        key: " / ".join(bytes_text(facts[f"{key}_{side}"]) for side in ("source", "destination"))
        for key in ("weight_bytes_max", "extra_bytes")
    }
    moves = [
        name, layout_of(job), f"{facts['transfers']:,}", bytes_text(facts["bytes_total"]) + wire, *pairs,
        two["weight_bytes_max"], two["extra_bytes"],
    ]  # fmt: skip
    times = [
        name, str(facts["cluster"]), seconds_text(facts["predicted_seconds"]), seconds_text(facts["bound_seconds"]),
        facts["bound_limit"], facts["limit"], "; ".join(facts["over_memory"]) or "-",
    ]  # fmt: skip
    return Row(line(moves), line(times), f"- **{name}**: {note_of(name)}")


def line(cells: list[Any]) -> str:
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def layout_of(job: Job) -> str:
    """TP4 PP4 CP2 EP16 on 64 -> 2 x sglang TP32 EP32."""
    trainer, rollout = job.conf.trainer, job.conf.rollout
    here = " ".join(f"{a.upper()}{n}" for a in ("tp", "pp", "cp", "ep", "etp") if (n := getattr(trainer, a)) > 1)
    there = [("TP", rollout.tp), ("PP", rollout.pp), ("EP", rollout.moe_ep), ("attention DP", rollout.attn_dp)]
    cut = " ".join(f"{axis}{n}" for axis, n in there if n > 1)
    return f"{here} on {trainer.ranks} -> {rollout.engines} x {rollout.kind} {cut}"


def note_of(name: str) -> str:
    """The comment at the head of a recipe: what it is and where its layout was published."""
    text = resources.files("weight_sync_conf").joinpath("recipes", f"{name}.yaml").read_text()
    head = re.match(r"# @package _global_\n((?:# .*\n)+)", text)
    if head is None:
        raise ValueError(
            f"recipes/{name}.yaml: begins with # @package _global_ and a comment that says where its layout is from"
        )
    return " ".join(part.removeprefix("# ") for part in head[1].splitlines())


def page(rows: list[Row]) -> str:
    parts = [INTRO + MOVES, *(row.moves for row in rows), TIMES, *(row.times for row in rows)]
    return "\n".join([*parts, "", "## Where the layouts are from", "", *(row.note for row in rows), ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 when the page is not current")
    options = parser.parse_args()
    text = page([row_of(name) for name in recipes()])
    if options.check:
        return int(not PAGE.is_file() or PAGE.read_text() != text)
    PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
