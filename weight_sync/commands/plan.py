"""python -m weight_sync plan +recipes=NAME [overrides] [cluster=NAME] [cluster.KEY=VALUE] [output=table|json] [save=FILE]

What a sync would move and how long it would take, from configs alone: no weights, no GPU, no engine. The model is
model.config=NAME (shipped), the path of a config.json, or model.path=DIR. Everything a session checks before its first pause
is checked here, and the exact-once proof is run. cluster= adds predicted seconds, their lower bound and what limits them;
cluster.KEY=VALUE replaces one of its numbers (cluster.fabric.oversubscription=4).
plan.step_seconds=S, or plan.microbatches=K plan.microbatch_seconds=T, put them in relation to a step. save= keeps the whole
plan for `explain` and `diff`. Exit code 0: it would work.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from typing import Any

from weight_sync.commands.common import Job, job_of, output_of, words_of
from weight_sync.commands.described import cluster_words, described, remark, transport_of
from weight_sync.commands.saved import save
from weight_sync.config import delta_spec
from weight_sync.delta.regions import snapshot_bytes
from weight_sync.delta.spec import DeltaSpec
from weight_sync.observe.units import bytes_text, seconds_text
from weight_sync.plan.figures import figures
from weight_sync.plan.schedule import Schedule


def run(words: list[str]) -> int:
    output, rest = output_of(words)
    found, overrides = words_of(rest, "save")
    changes, overrides = cluster_words(overrides)
    began = time.monotonic()
    job = job_of(overrides)
    schedule = job.inputs.schedule()
    seconds = time.monotonic() - began
    facts = facts_of(job, schedule, seconds, changes)
    if "save" in found:
        save(schedule, found["save"])
    if output == "json":
        print(json.dumps(facts))
    else:
        show(facts)
    return 0


def facts_of(job: Job, schedule: Schedule, plan_seconds: float, changes: dict[str, Any] | None = None) -> dict[str, Any]:
    """Everything the command prints. plan_seconds: of composing, resolving, planning, proving and scheduling. changes: values
    of the cluster that are replaced.

    predicted_seconds, bound_seconds and limit are null without a cluster.
    """
    facts: dict[str, Any] = {
        **figures(schedule),
        "plan_seconds": plan_seconds,
        "peak_rss_bytes": peak_rss(),
        "cluster": job.conf.cluster,
        "predicted_seconds": None,
        "bound_seconds": None,
        "limit": None,
    }
    if (delta := delta_spec(job.conf.weight_sync)) is not None:
        facts |= delta_memory(delta, schedule, facts)
    if job.conf.cluster is not None or changes:
        facts |= predicted(job, schedule, facts, changes or {})
        facts |= in_a_step(facts["predicted_seconds"], job)
    return facts


def delta_memory(spec: DeltaSpec, schedule: Schedule, facts: dict[str, Any]) -> dict[str, Any]:
    """What deltas need of the rank that needs most: the snapshot, in host memory or beside the weights, and staging."""
    snapshot = int(snapshot_bytes(schedule.plan).max(initial=0))
    beside = snapshot if spec.snapshot == "device" else 0
    return {
        "delta_snapshot_bytes_max": snapshot,
        "delta_snapshot": spec.snapshot,
        "extra_bytes_source": facts["extra_bytes_source"] + 2 * spec.message + beside,
        "extra_bytes_destination": max(facts["extra_bytes_destination"], spec.staging),
    }


def predicted(job: Job, schedule: Schedule, facts: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """What the simulator says of this schedule on the job's cluster. ConfigError for an unknown cluster or one too small.

    over_memory: in words, which side's weights and staging alone are more than a GPU of this cluster has. remark: in words,
    whether the cluster's numbers are of the job's transport.
    """
    from weight_sync.simulate import Options, predict

    cluster = described(job, changes, "a prediction")
    transport = transport_of(job)
    said = predict(schedule, cluster, Options(steps=40, transport=transport))
    memory = cluster.gpu_memory
    over = [
        f"a {who} rank's {bytes_text(need)} of weights and staging are more than the {bytes_text(memory)} of a GPU"
        for who, side in (("trainer", "source"), ("rollout", "destination"))
        if (need := facts[f"weight_bytes_max_{side}"] + facts[f"extra_bytes_{side}"]) > memory
    ]
    return {
        "over_memory": over,
        "remark": remark(cluster, transport),
        "predicted_seconds": said.seconds,
        "bound_seconds": said.bound_seconds,
        "limit": said.limit,
        "bound_limit": said.bound_limit,
        "critical_link": said.critical,
        "phases": said.phases,
        "writes": said.writes,
    }


def in_a_step(sync: float, job: Job) -> dict[str, float]:
    """share_of_step and async_bubble, as far as the config says how long a step is."""
    conf, result = job.conf.plan, dict[str, float]()
    if conf.step_seconds is not None:
        result["share_of_step"] = sync / (conf.step_seconds + sync)
    if conf.microbatches is not None and conf.microbatch_seconds is not None:
        result["async_bubble"] = sync / (conf.microbatches * conf.microbatch_seconds + sync)
    return result


def peak_rss() -> int:
    """The most memory this process has held so far, in bytes (Linux counts in KiB, macOS in bytes)."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def show(facts: dict[str, Any]) -> None:
    """The facts as a table for people."""
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False, title=f"plan {facts['digest']}, proven exact-once", title_justify="left")
    table.add_column(no_wrap=True)
    table.add_column()
    for name, text in lines(facts):
        table.add_row(name, text)
    Console(highlight=False).print(table)


def lines(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """(name, text) of every line of the table."""
    methods = ", ".join(
        f"{name} {count['transfers']:,} ({bytes_text(count['bytes'])})"
        for name, count in facts["methods"].items()
        if count["transfers"]
    )
    rows = [
        ("ranks", f"{facts['trainer_ranks']} trainer -> {facts['rollout_ranks']} rollout"),
        ("transfers", f"{facts['transfers']:,} of {bytes_text(facts['bytes_total'])} in all; {methods}"),
    ]
    for side, verb in (("source", "sends"), ("destination", "receives")):
        rows.append(
            (
                f"a {'trainer' if side == 'source' else 'rollout'} rank",
                f"{verb} at most {bytes_text(facts[f'bytes_max_{side}'])}, {bytes_text(facts[f'bytes_mean_{side}'])} in the "
                f"mean (skew {facts[f'skew_{side}']:.2f}); holds {bytes_text(facts[f'weight_bytes_max_{side}'])} of weights "
                f"and {bytes_text(facts[f'extra_bytes_{side}'])} of staging",
            )
        )
    rows += [
        ("same host", f"{bytes_text(facts['same_host_bytes'])} stay on one host"),
        ("runs", f"{facts['runs']:,}: {runs_text(facts['run_sizes'])}"),
        ("staging rounds", f"{facts['rounds']}"),
        *_quantised(facts),
        *_deltas(facts),
        ("planning", f"{seconds_text(facts['plan_seconds'])}, {bytes_text(facts['peak_rss_bytes'])} of memory"),
    ]
    if facts["predicted_seconds"] is None:
        return [*rows, ("time", "cluster=NAME predicts it")]
    phases = ", ".join(f"{name} {seconds_text(value)}" for name, value in facts["phases"].items() if value)
    rows += [
        ("predicted", f"{seconds_text(facts['predicted_seconds'])} on {facts['cluster']}: {phases}"),
        ("lower bound", f"{seconds_text(facts['bound_seconds'])}, {facts['bound_limit']}"),
        ("limit", f"{facts['limit']}"),
        ("critical link", f"{facts['critical_link']}"),
        *(("too large", text) for text in facts["over_memory"]),
        *(("remark", text) for text in (facts["remark"],) if text),
    ]
    for key, name in (("share_of_step", "share of a step"), ("async_bubble", "bubble when asynchronous")):
        if key in facts:
            rows.append((name, f"{100 * facts[key]:.1f}%"))
    return rows


def runs_text(classes: list[dict[str, Any]]) -> str:
    """The histogram of run sizes in words, with the share of the bytes in each class."""
    total = sum(item["bytes"] for item in classes) or 1
    words: list[str] = []
    for item in classes:
        below = item["below"]
        size = "64 MiB and more" if below is None else f"less than {_binary(below)}"
        words.append(f"{item['runs']:,} of {size} ({100 * item['bytes'] / total:.1f}% of bytes)")
    return "; ".join(words)


def _binary(number: int) -> str:
    return f"{number >> 20} MiB" if number >= 1 << 20 else f"{number >> 10} KiB"


def _deltas(facts: dict[str, Any]) -> list[tuple[str, str]]:
    if "delta_snapshot" not in facts:
        return []
    most, where = bytes_text(facts["delta_snapshot_bytes_max"]), facts["delta_snapshot"]
    return [("deltas", f"a trainer rank keeps at most {most} of what it last sent, in {where} memory")]


def _quantised(facts: dict[str, Any]) -> list[tuple[str, str]]:
    if not facts["quantised_transfers"]:
        return []
    groups, said = facts["straddling_groups"], bytes_text(facts["straddle_bytes"])
    cut = f"{groups:,} groups lie on several trainer ranks, which tell {said} before each sync" if groups else "no group is cut"
    return [("quantised", f"{facts['quantised_transfers']:,} transfers of values and scales; {cut}")]
