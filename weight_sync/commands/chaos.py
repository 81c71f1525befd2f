"""python -m weight_sync chaos [seeds=N] [first=N] [processes=N] [fault=NAME] [deltas=true] [output=table|json]
python -m weight_sync chaos seed=N [deltas=true] [output=table|json]

Drills: the real session over doubles of the trainer, the wire and the engines, with faults at drawn points, thousands of times.
Every run is a function of its seed; needs no GPU, no network and no engine. seeds: how many, from `first` (1000 from 0).
fault: draw only from this one (as the table names it). processes: runs are spread over so many (1). seed: one run alone, with
its story line by line. deltas=true: syncs send only what changed where they may (docs/delta.md).

runs are counted by outcome, once each:
  silent_wrong  an engine served other bytes than those of the version it claimed, or a version moved without all engines
  hangs         a sync ran past its deadlines, or no sync succeeded after all faults had stopped
  failed        a sync raised; no engine served anything wrong, and a later sync repaired everything
  committed     every sync committed, in spite of the faults
Exit code 1 if any run is one of the first two.
"""

from __future__ import annotations

import json
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial

from weight_sync.chaos.drill import Run, Summary, many
from weight_sync.chaos.drill import run as drill
from weight_sync.chaos.faults import FAULTS
from weight_sync.commands.common import output_of
from weight_sync.errors import ConfigError

_CHUNK = 100
_SAID = 10
"""Runs that went wrong of which the reason is printed; `seed=` tells the story of any."""


def run(words: list[str]) -> int:
    output, rest = output_of(words)
    options = _options(rest)
    faults = tuple(FAULTS) if options.fault is None else (options.fault,)
    if options.seed is not None:
        return _one(options.seed, faults, output, options.deltas)
    begun = time.monotonic()
    summary, bad = _all(range(options.first, options.first + options.seeds), options.processes, faults, options.deltas)
    seconds = time.monotonic() - begun
    for one in bad[:_SAID]:
        print(f"seed {one.seed} ({one.case}; {', '.join(one.faults)}): {(one.wrong + one.hung)[0]}", file=sys.stderr)
    print(f"{summary.runs} runs in {seconds:.1f} s, {summary.runs / seconds:.0f} runs/s", file=sys.stderr)
    if output == "json":
        print(json.dumps(summary.to_json()))
    else:
        _table(summary)
    return 1 if bad else 0


@dataclass(slots=True)
class _Options:
    seeds: int = 1000
    first: int = 0
    processes: int = 1
    seed: int | None = None
    fault: str | None = None
    deltas: bool = False


def _options(words: list[str]) -> _Options:
    options = _Options()
    for word in words:
        key, _, value = word.partition("=")
        if key == "fault":
            if value not in FAULTS:
                raise ConfigError(f"fault={value}: there are {', '.join(FAULTS)}")
            options.fault = value
        elif key == "deltas" and value in ("true", "false"):
            options.deltas = value == "true"
        elif key in ("seeds", "first", "processes", "seed") and value.isdecimal():
            setattr(options, key, int(value))
        else:
            raise ConfigError(
                f"{word}: chaos takes seeds=N, first=N, processes=N, seed=N, fault=NAME, deltas=true and output=table|json"
            )
    if not options.seeds or not options.processes:
        raise ConfigError("seeds and processes must be at least 1")
    return options


def _all(seeds: range, processes: int, faults: tuple[str, ...], deltas: bool) -> tuple[Summary, list[Run]]:
    if processes == 1:
        return many(seeds, faults=faults, deltas=deltas)
    summary, bad = Summary(), []
    chunks = [seeds[i : i + _CHUNK] for i in range(0, len(seeds), _CHUNK)]
    with ProcessPoolExecutor(processes) as pool:
        for part, wrong in pool.map(partial(many, faults=faults, deltas=deltas), chunks):
            summary.merge(part)
            bad += wrong
    return summary, bad


def _one(seed: int, faults: tuple[str, ...], output: str, deltas: bool) -> int:
    """The story of one run, and the same summary of it alone."""
    story: list[str] = []
    result = drill(seed, faults=faults, story=story, deltas=deltas)
    summary = Summary()
    summary.add(result)
    if output == "json":
        print(json.dumps(summary.to_json() | {"case": result.case, "story": story}))
    else:
        print(f"seed {seed}, case {result.case}, faults that struck: {', '.join(result.faults) or 'none'}", *story, sep="\n")
    return 1 if result.wrong or result.hung else 0


def _table(summary: Summary) -> None:
    from rich.console import Console
    from rich.table import Table

    outcomes = ("runs", "silent_wrong", "hangs", "committed", "failed")
    table = Table("fault", *outcomes)
    for fault, counts in sorted(summary.by_fault.items()):
        table.add_row(fault, *(str(counts[outcome]) for outcome in outcomes))
    table.add_section()
    table.add_row("all", *(str(getattr(summary, outcome)) for outcome in outcomes))
    Console().print(table)
