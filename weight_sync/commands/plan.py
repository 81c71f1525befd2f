"""python -m weight_sync plan model.path=DIR [overrides] [output=table|json]

What a sync would move, from configs alone: DIR needs a config.json only. No weights, no GPU, no engine.
"""

from __future__ import annotations

import json

from weight_sync.commands.common import inputs_of, output_of
from weight_sync.plan.explain import summary


def run(words: list[str]) -> int:
    output, overrides = output_of(words)
    schedule = inputs_of(overrides).schedule()
    facts = {"digest": schedule.digest, **summary(schedule.plan), "methods": schedule.summary(), "rounds": schedule.rounds}
    if output == "json":
        print(json.dumps(facts))
        return 0
    from rich.console import Console
    from rich.table import Table

    table = Table("plan", "", show_header=False)
    for key, value in facts.items():
        table.add_row(key, json.dumps(value) if isinstance(value, dict) else f"{value}")
    Console().print(table)
    return 0
