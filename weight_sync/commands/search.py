"""python -m weight_sync search +recipes=NAME [overrides] cluster=NAME [limits] [output=table|json]

Try cuts of both sides and strategies within limits, and rank them by predicted seconds, then by memory.

    trainer_gpus=N rollout_gpus=N     ranks of each side (default: those of the recipe)
    memory=BYTES                      weights of one GPU at most, on either side (default: the cluster's GPU at trainer_share
                                      and rollout_share)
    trainer_share=0.12                share of a trainer GPU for bf16 weights: gradients, fp32 master copies and moments
                                      (unless sharded or offloaded) take eight times as much again
    rollout_share=0.8                 share of a rollout GPU for weights; the rest is KV cache
    tp=1,2,4,8 pp=.. ep=..            trainer cuts to try (default: powers of two around the recipe's)
    rollout_tp=.. rollout_ep=..       engine cuts to try; engines follow from rollout_gpus
    bytes_ratio=0.51                  as for simulate
    top=10                            lines to print
    limit=200                         cuts to plan at most, those that hold less memory first

Every combination that fits is planned and simulated, with the recipe's transport, budget and nodes; replica and broadcast are
added where the cluster has their constants. Those that cannot be are counted by reason. All engines are copies, so only one is
planned and the others get the same; `plan` spreads what several ranks hold over all of them and may be somewhat faster.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import xxhash

from weight_sync.commands.common import Job, hosts_of, job_of, output_of, words_of
from weight_sync.commands.described import cluster_words, described, transport_of
from weight_sync.commands.simulate import number
from weight_sync.errors import WeightSyncError
from weight_sync.ids import ITEMSIZE
from weight_sync.layout.parallel import EngineDims, TrainerDims
from weight_sync.layout.table import Layout
from weight_sync.plan.schedule import make_schedule
from weight_sync.session.inputs import Declared, layout_of
from weight_sync.simulate import Cluster, Options
from weight_sync.simulate.network import Faults, Network, place
from weight_sync.simulate.strategies import broadcast, gathered, replica
from weight_sync.simulate.sync import run as simulate_work
from weight_sync.simulate.work import repeated, work_of

CUTS = ("tp", "pp", "ep", "rollout_tp", "rollout_ep")
LIMITS = ("trainer_gpus", "rollout_gpus", "memory", "trainer_share", "rollout_share", "bytes_ratio", "top", "limit")


@dataclass(frozen=True, slots=True)
class Found:
    """One way to run: cuts, strategy, predicted seconds, bytes of weights on the fullest rank of each side."""

    trainer: dict[str, int]
    rollout: dict[str, int]
    strategy: str
    seconds: float
    trainer_bytes: int
    rollout_bytes: int


def run(words: list[str]) -> int:
    output, rest = output_of(words)
    given, overrides = words_of(rest, *CUTS, *LIMITS)
    changes, overrides = cluster_words(overrides)
    job = job_of(overrides)
    cluster = described(job, changes, "search")
    found, refused = search(job, cluster, given)
    found = found[: int(number(given.get("top", "10"), "top"))]
    if output == "json":
        keys = ("trainer", "rollout", "strategy", "seconds", "trainer_bytes", "rollout_bytes")
        print(json.dumps({"found": [{k: getattr(f, k) for k in keys} for f in found], "refused": refused}))
    else:
        show(found, refused, cluster)
    return 0 if found else 1


def search(job: Job, cluster: Cluster, given: Mapping[str, str]) -> tuple[list[Found], dict[str, int]]:
    """(what fits, best first; how many combinations were refused, by reason)."""
    t, r = job.conf.trainer, job.conf.rollout
    trainer_gpus = int(number(given.get("trainer_gpus", str(t.ranks)), "trainer_gpus"))
    rollout_gpus = int(number(given.get("rollout_gpus", str(r.engines * r.tp * r.pp)), "rollout_gpus"))
    caps = tuple(
        number(given["memory"], "memory") if "memory" in given
        else cluster.gpu_memory * number(given.get(f"{side}_share", share), f"{side}_share")
        for side, share in (("trainer", "0.12"), ("rollout", "0.8"))
    )  # fmt: skip
    ratio = number(given.get("bytes_ratio", "1"), "bytes_ratio")
    refused: Counter[str] = Counter()
    sides = (
        _fitting(job.trainer, "trainer", caps[0], _trainer_cuts(job, given, trainer_gpus), refused, 1.0),
        _fitting(job.rollout, "rollout", caps[1], _rollout_cuts(job, given, rollout_gpus), refused, ratio),
    )
    pairs = sorted(itertools.product(*sides), key=lambda pair: pair[0][2] + pair[1][2])
    limit = int(number(given.get("limit", "200"), "limit"))
    refused["beyond limit="] += max(0, len(pairs) - limit)
    found: list[Found] = []
    for source, target in pairs[:limit]:
        try:
            found += _tried(job, source, target, cluster, rollout_gpus, ratio)
        except WeightSyncError as error:
            refused[_reason(error)] += 1
    found.sort(key=lambda f: (f.seconds, f.trainer_bytes + f.rollout_bytes))
    return found, {reason: count for reason, count in refused.items() if count}


Side = tuple[dict[str, Any], Layout, int]
"""Constructor arguments of the dims, the layout, bytes of weights on the fullest rank."""


def _fitting(
    declared: Declared, side: str, cap: float, cuts: Iterator[dict[str, Any]], refused: Counter[str], ratio: float
) -> list[Side]:
    result: list[Side] = []
    seen: set[str] = set()
    for dims in cuts:
        try:
            part = dims | ({"engines": 1} if side == "rollout" else {})
            symbols = {**declared.symbols}
            if "vocab_multiple" in symbols:  # is a multiple times tp
                symbols["vocab_multiple"] = symbols["vocab_multiple"] // declared.dims["tp"] * dims["tp"]
            layout = layout_of(replace(declared, dims=part, symbols=symbols), side)
        except WeightSyncError as error:
            refused[f"{side}: {_reason(error)}"] += 1
            continue
        if (same := xxhash.xxh3_128_hexdigest(layout.digest.encode() + str(dims.get("engines")).encode())) in seen:
            refused[f"{side}: the same places as another cut"] += 1  # a dense model has no experts to spread
            continue
        seen.add(same)
        held = int(fullest(layout) * ratio)
        if held > cap:
            refused[f"{side}: more weights than fit a GPU"] += 1
            continue
        result.append((dims, layout, held))
    return result


def _reason(error: WeightSyncError) -> str:
    """The error without its numbers, so that what cannot be for one reason is counted together."""
    text = re.sub(r"\s*=\s*\d[\d *]*(=\s*\d+)?| of \d+ ranks|; .*", "", str(error))
    return text if len(text) <= 160 else text[:159] + "…"


def fullest(layout: Layout) -> int:
    """Bytes of parameters on the rank with most."""
    held = [0] * layout.world
    for p in layout.params:
        held[p.rank] += p.numel * ITEMSIZE[p.dtype]
    return max(held)


def _choices(given: Mapping[str, str], key: str, own: int, most: int) -> list[int]:
    if key in given:
        return [int(number(item, key)) for item in given[key].split(",")]
    return [n for n in (own // 2, own, own * 2) if 1 <= n <= most]


def _trainer_cuts(job: Job, given: Mapping[str, str], gpus: int) -> Iterator[dict[str, Any]]:
    own = dict(job.trainer.dims)
    for tp, pp, ep in itertools.product(*(_choices(given, key, own[key], gpus) for key in ("tp", "pp", "ep"))):
        # A pipeline cut is made for its own number of stages; others are split evenly, first stages fuller.
        pipeline = own.get("pipeline") if pp == own["pp"] else _even(job, pp * own.get("vpp", 1))
        yield own | {"ranks": gpus, "tp": tp, "pp": pp, "ep": ep, "pipeline": pipeline}


def _even(job: Job, stages: int) -> list[int]:
    each, left = divmod(int(job.config["num_hidden_layers"]), stages)
    return [each + (i < left) for i in range(stages)]


def _rollout_cuts(job: Job, given: Mapping[str, str], gpus: int) -> Iterator[dict[str, Any]]:
    own = dict(job.rollout.dims)
    for tp, ep in itertools.product(
        _choices(given, "rollout_tp", own["tp"], gpus), _choices(given, "rollout_ep", own["moe_ep"], gpus)
    ):
        if gpus % (tp * own["pp"]) == 0 and tp % ep == 0:
            yield own | {
                "tp": tp, "moe_ep": ep, "attn_dp": min(own["attn_dp"], tp), "engines": gpus // (tp * own["pp"]),
            }  # fmt: skip


def _tried(job: Job, source: Side, target: Side, cluster: Cluster, rollout_gpus: int, ratio: float) -> list[Found]:
    from weight_sync.plan.planner import make_plan

    trainer = TrainerDims(**_tuples(source[0]))
    rollout = EngineDims(**_tuples(target[0]))
    here, there = hosts_of(job.conf.plan.gpus_per_node, trainer.world, rollout_gpus)
    plan = make_plan(source[1], target[1], here, there[: target[1].world])
    schedule = make_schedule(plan, job.inputs.costs, job.inputs.budget)
    options = Options(engines=rollout.engines, bytes_ratio=ratio, transport=transport_of(job), steps=40)
    work = repeated(work_of(schedule, options.bucket, ratio), rollout.engines)
    network = Network(cluster, place(cluster, trainer.world, rollout_gpus, [*here, *there]), Faults(), options.transport)
    said = {"shard to shard": simulate_work(work, network, options).prediction.seconds}
    if cluster.collective is not None:
        g = gathered(plan, trainer, rollout)
        said["replica"] = replica(g, cluster, bytes_ratio=ratio).seconds
        said["broadcast"] = broadcast(g, cluster, bytes_ratio=ratio, tensor_ratio=1.0 if ratio == 1 else 2.0).seconds
    cuts = {k: source[0][k] for k in ("tp", "pp", "ep")} | {"ranks": trainer.world}
    engine = {k: target[0][k] for k in ("tp", "moe_ep", "engines")}
    return [Found(cuts, engine, name, seconds, source[2], target[2]) for name, seconds in said.items()]


def _tuples(dims: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in dims.items()}


def show(found: list[Found], refused: Mapping[str, int], cluster: Cluster) -> None:
    """A table for people."""
    from rich.console import Console
    from rich.table import Table

    table = Table(
        "seconds", "strategy", "trainer", "rollout", "GB a trainer rank", "GB a rollout rank", title=f"on {cluster.name}"
    )
    for f in found:
        trainer = f"tp{f.trainer['tp']} pp{f.trainer['pp']} ep{f.trainer['ep']}"
        rollout = f"{f.rollout['engines']} x tp{f.rollout['tp']} ep{f.rollout['moe_ep']}"
        held = f"{f.trainer_bytes / 1e9:.1f}", f"{f.rollout_bytes / 1e9:.1f}"
        table.add_row(f"{f.seconds:.3g}", f.strategy, trainer, rollout, *held)
    console = Console(highlight=False)
    console.print(table)
    for reason, count in sorted(refused.items(), key=lambda item: -item[1]):
        console.print(f"{count} not tried: {reason}", markup=False, soft_wrap=True)
