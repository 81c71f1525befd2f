"""python -m weight_sync simulate +recipes=NAME [overrides] cluster=NAME|FILE.yaml [words] [output=table|json]

Run a plan on a described cluster, event by event: how long, what is the limit, how full is every link. No weights, no GPU.

    effects=true          also what a choice is worth: bucket sizes, relay, quantisation, source, digests, a row for each
    compare=true          also replica and broadcast, the strategies that gather first
    picture=FILE.png      who is busy when, and the use of links over time (.png or .svg)
    timeline=FILE.json    every bar of that picture and the use of links, as trace events (Perfetto, chrome://tracing)
    top=5                 how many links of each kind output=json lists, busiest first

One choice at a time:

    bucket=BYTES          bytes handed over at a time, and the longest write (default 33554432)
    relay=true            the trainer feeds the first engine only, each engine feeds the next (sessions do not do this yet)
    weight_sync.quant.scheme=fp8_block|none|...    planned anew; what quantising costs is counted (with none, a recipe's own
                          options go too: '~weight_sync.quant.options.group')
    bytes_ratio=0.51      instead: bytes on the wire for each planned byte, at no cost
    source=first          the lowest rank that holds a box sends it, instead of the planner's balanced choice
    verify=false          without digests
    share_nodes=true      rollout ranks follow trainer ranks within a node

What is wrong, or different, with the cluster:

    slow=trainer:3:0.5    a straggler: links and local work of that rank at half their rate; several by commas
    down=2:0              card 0 of node 2 is dead, its rank uses the next card; several by commas
    dead_engine=1:0.3     engine 1 stops answering 0.3 s after writing began
    cluster.KEY=VALUE     another value for a key of the cluster's file, such as
                          cluster.fabric.nodes_per_leaf=8 cluster.fabric.oversubscription=4    oversubscribed switches
                          cluster.writes.seconds=1e-4                                         10,000 messages/s of a rank

Exit code 0: the sync commits; 2: it does not (dead_engine).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from weight_sync.commands.common import Job, job_of, output_of, words_of
from weight_sync.commands.described import cluster_words, described, remark, transport_of
from weight_sync.commands.effects import AS_IT_IS, Choice, effects, from_first_holders, simulated_schedule
from weight_sync.commands.trace import trace_events
from weight_sync.errors import ConfigError
from weight_sync.ids import Side
from weight_sync.layout.parallel import EngineDims, TrainerDims
from weight_sync.plan.schedule import Schedule
from weight_sync.session.inputs import dims_of
from weight_sync.simulate import Cluster, Faults, Options, Simulation, Slow, picture, simulate
from weight_sync.simulate.strategies import broadcast, gathered, replica

KEYS = (
    "bucket", "relay", "bytes_ratio", "verify", "share_nodes", "source", "slow", "down", "dead_engine", "compare", "picture",
    "effects", "timeline", "top",
)  # fmt: skip


def run(words: list[str]) -> int:
    output, rest = output_of(words)
    given, overrides = words_of(rest, *KEYS)
    changes, overrides = cluster_words(overrides)
    options, faults = options_of(given), faults_of(given)
    compare, wants_effects = boolean(given, "compare"), boolean(given, "effects")
    top = int(number(given.get("top", "5"), "top"))
    source = given.get("source", "plan")
    if source not in ("plan", "first"):
        raise ConfigError(f"source={source}: must be plan or first")
    if "picture" in given:
        picture.check(given["picture"])
    if "timeline" in given and not given["timeline"].endswith(".json"):
        raise ConfigError(f"timeline={given['timeline']}: must end in .json")
    job = job_of(overrides)
    cluster = described(job, changes, "simulate")
    options = replace(options, engines=job.conf.rollout.engines, transport=transport_of(job))
    layouts = job.inputs.layouts()
    planned = simulated_schedule(job, layouts)
    schedule = planned if source == "plan" else from_first_holders(planned, layouts[0])
    simulation = simulate(schedule, cluster, options, faults)
    facts = facts_of(simulation, cluster, top) | {"remark": remark(cluster, options.transport)}
    if compare:
        facts["others"] = others(job, schedule, cluster, options.bytes_ratio)
    if wants_effects:
        choice = Choice(overrides, job, layouts, planned, options, source)
        facts["effects"] = [asdict(e) for e in effects(choice, simulation, lambda s, o: simulate(s, cluster, o, faults))]
    title = title_of(overrides, schedule, cluster)
    if "picture" in given:
        facts["picture"] = str(picture.draw(simulation, given["picture"], title))
    if "timeline" in given:
        Path(given["timeline"]).write_text(json.dumps(trace_events(simulation, title)))
        facts["timeline"] = given["timeline"]
    if output == "json":
        print(json.dumps(facts))
    else:
        show(facts)
    return 0 if simulation.failed is None else 2


def title_of(overrides: Sequence[str], schedule: Schedule, cluster: Cluster) -> str:
    """What a picture is of."""
    name = next((o.partition("=")[2] for o in overrides if o.startswith("+recipes=")), "sync")
    return f"{name}: {schedule.plan.source_world} + {schedule.plan.target_world} ranks on {cluster.name}"


def options_of(given: Mapping[str, str]) -> Options:
    """Options from words, but for the number of engines. Raises ConfigError naming the word."""
    options = Options()
    for key in ("relay", "verify", "share_nodes"):
        if key in given:
            options = replace(options, **{key: boolean(given, key)})
    for key in ("bucket", "bytes_ratio"):
        if key in given:
            options = replace(options, **{key: number(given[key], key)})
    return options


def faults_of(given: Mapping[str, str]) -> Faults:
    """Faults from words. Raises ConfigError naming the word."""
    slow, down = [], []
    for item in filter(None, given.get("slow", "").split(",")):
        side, rank, share = _parts(item, "slow", "SIDE:RANK:SHARE", 3)
        if side not in ("trainer", "rollout"):
            raise ConfigError(f"slow={item}: the side must be trainer or rollout")
        slow.append(Slow(Side(side), int(number(rank, "slow")), number(share, "slow")))
    for item in filter(None, given.get("down", "").split(",")):
        node, card = _parts(item, "down", "NODE:CARD", 2)
        down.append((int(number(node, "down")), int(number(card, "down"))))
    dead = None
    if "dead_engine" in given:
        engine, at = _parts(given["dead_engine"], "dead_engine", "ENGINE:SECONDS", 2)
        dead = int(number(engine, "dead_engine")), number(at, "dead_engine")
    return Faults(tuple(slow), tuple(down), dead)


def _parts(text: str, key: str, form: str, count: int) -> list[str]:
    parts = text.split(":")
    if len(parts) != count:
        raise ConfigError(f"{key}={text}: must look like {key}={form}")
    return parts


def number(text: str, key: str) -> float:
    """A word's value as a number. Raises ConfigError."""
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{key}={text}: must be a number") from None


def boolean(given: Mapping[str, str], key: str) -> bool:
    """A word's value, false when it is not given. Raises ConfigError."""
    value = given.get(key, "false")
    if value not in ("true", "false"):
        raise ConfigError(f"{key}={value}: must be true or false")
    return value == "true"


def others(job: Job, schedule: Schedule, cluster: Cluster, bytes_ratio: float) -> dict[str, Any]:
    """Seconds of the gathering strategies, and of what. A quantised sync sends a scale beside every tensor."""
    trainer, rollout = dims_of(job.trainer, "trainer"), dims_of(job.rollout, "rollout")
    assert isinstance(trainer, TrainerDims)
    assert isinstance(rollout, EngineDims)
    g = gathered(schedule.plan, trainer, rollout)
    tensor_ratio = 1.0 if bytes_ratio == 1.0 else 2.0
    return {
        "replica": asdict(replica(g, cluster, bytes_ratio=bytes_ratio)),
        "broadcast": asdict(broadcast(g, cluster, bytes_ratio=bytes_ratio, tensor_ratio=tensor_ratio)),
    }


def facts_of(simulation: Simulation, cluster: Cluster, top: int = 5) -> dict[str, Any]:
    """What the command prints, as plain data: the prediction; for each kind of resource how many are in use, their mean share
    of the time of writing, and the busiest `top`."""
    kinds: dict[str, list[dict[str, Any]]] = {}
    shares: dict[str, list[float]] = {}
    for use in simulation.usage:
        shares.setdefault(use.kind, []).append(use.share)
        if len(kinds.setdefault(use.kind, [])) < top:
            kinds[use.kind].append({"name": use.name, "busy_seconds": use.busy, "share": use.share})
    p = simulation.prediction
    return {
        "cluster": cluster.name,
        "seconds": p.seconds,
        "bound_seconds": p.bound_seconds,
        "limit": p.limit,
        "bound_limit": p.bound_limit,
        "critical_link": p.critical,
        "phases": p.phases,
        "bytes": p.nbytes,
        "writes": p.writes,
        "failed": simulation.failed,
        "usage": kinds,
        "usage_mean": {kind: {"in_use": len(items), "share": sum(items) / len(items)} for kind, items in shares.items()},
    }


def show(facts: Mapping[str, Any]) -> None:
    """The facts as a table for people."""
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False, title=f"one sync on {facts['cluster']}", title_justify="left")
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    if facts["failed"]:
        table.add_row("FAILED", facts["failed"])
    table.add_row("seconds", f"{facts['seconds']:.4g}, lower bound {facts['bound_seconds']:.4g} ({facts['bound_limit']})")
    table.add_row("limit", facts["limit"])
    table.add_row("moved", f"{facts['bytes'] / 1e9:,.2f} GB in {facts['writes']:,.0f} writes")
    table.add_row("phases", ", ".join(f"{name} {value:.3g} s" for name, value in facts["phases"].items() if value))
    for kind, items in facts["usage"].items():
        most, mean = items[0], facts["usage_mean"][kind]
        table.add_row(
            f"busiest {kind}",
            f"{most['name']}: {100 * most['share']:.0f}% of the time of writing; {mean['in_use']} in use, "
            f"{100 * mean['share']:.0f}% in the mean",
        )
    for name, said in facts.get("others", {}).items():
        parts = ", ".join(f"{part} {value:.3g}" for part, value in said["parts"].items() if value)
        table.add_row(f"{name} instead", f"{said['seconds']:.3g} s ({parts})")
    for name in ("picture", "timeline"):
        if name in facts:
            table.add_row(name, facts[name])
    if facts["remark"]:
        table.add_row("remark", facts["remark"])
    console = Console(highlight=False)
    console.print(table)
    if "effects" in facts:
        table = Table("choice", "seconds", "change", "GB", "limit, or why not", title="what a choice is worth")
        for e in facts["effects"]:
            if e["seconds"] is None:
                table.add_row(e["choice"], "-", "", "", e["limit"])
            else:
                change = "" if e["choice"] == AS_IT_IS else f"{100 * (e['seconds'] / facts['seconds'] - 1):+.0f}%"
                table.add_row(e["choice"], f"{e['seconds']:.4g}", change, f"{e['bytes'] / 1e9:,.1f}", e["limit"])
        console.print(table)
