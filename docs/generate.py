"""Regenerate the pages of docs/ that are made from code and config: python docs/generate.py [--check].

config.md: every key of every config group, from the schemas' own docstrings and defaults. With --check nothing is written and
the exit code says whether the pages are current.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from enum import Enum
from pathlib import Path
from typing import Any, get_args, get_type_hints

from weight_sync import config, schema

DOCS = Path(__file__).parent
GROUPS: list[tuple[str, type]] = [
    ("(top level of train.yaml)", schema.JobConf),
    ("trainer", schema.TrainerConf),
    ("rollout", schema.RolloutConf),
    ("model", schema.ModelConf),
    ("ray", schema.RayConf),
    ("plan", schema.PlanConf),
    ("miles", schema.MilesConf),
    ("trainer.placement, rollout.placement", schema.PlacementConf),
    ("weight_sync", schema.SyncConf),
    ("weight_sync.quant", schema.QuantConf),
    ("weight_sync.transport", schema.TransportConf),
    ("weight_sync.verify", schema.VerifyConf),
    ("weight_sync.recorded", schema.RecordedConf),
    ("weight_sync.timeouts", schema.TimeoutsConf),
    ("weight_sync.failure", schema.FailureConf),
    ("weight_sync.costs", schema.CostsConf),
    ("weight_sync.budget", schema.BudgetConf),
    ("weight_sync.landing", schema.LandingConf),
    ("weight_sync.delta", schema.DeltaConf),
    ("weight_sync.observe", schema.ObserveConf),
]


def type_text(kind: Any) -> str:
    if isinstance(kind, type) and issubclass(kind, Enum):
        return " \\| ".join(item.name for item in kind)
    names = [item.__name__ if isinstance(item, type) else str(item) for item in get_args(kind)]
    if type(None) in get_args(kind):
        return " \\| ".join("null" if name == "NoneType" else name for name in names)
    return str(kind).replace("typing.", "") if get_args(kind) else getattr(kind, "__name__", str(kind))


def default_text(item: dataclasses.Field[Any]) -> str:
    if item.default is not dataclasses.MISSING:
        value = item.default.name if isinstance(item.default, Enum) else item.default
        return "required" if value == schema.MISSING else "null" if value is None else f"`{value}`"
    assert item.default_factory is not dataclasses.MISSING
    value = item.default_factory()
    return "see its group" if dataclasses.is_dataclass(value) else f"`{value}`"


def config_page() -> str:
    lines = [
        "# Configuration",
        "",
        "Made by `make docs` from the schemas in `weight_sync/schema.py`; do not edit. A strategy file fills `weight_sync`,",
        "the files in `conf/trainer`, `conf/rollout` and `conf/model` the groups of those names.",
        "",
        f"Strategies (`+weight_sync=`): {', '.join(config.strategies())}.",
        "",
    ]
    for name, group in GROUPS:
        hints = get_type_hints(group)
        lines += [f"## {name}", "", " ".join((group.__doc__ or "").split()), "", "| key | type | default |", "|---|---|---|"]
        lines += [
            f"| `{item.name}` | {type_text(hints[item.name])} | {default_text(item)} |" for item in dataclasses.fields(group)
        ]
        lines.append("")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    pages = {DOCS / "config.md": config_page()}
    stale = [path for path, text in pages.items() if not path.is_file() or path.read_text() != text]
    if options.check:
        for path in stale:
            print(f"{path.name} is not current: run make docs", file=sys.stderr)
        return 1 if stale else 0
    for path in stale:
        path.write_text(pages[path])
        print(f"wrote {path.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
