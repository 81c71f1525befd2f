"""Saved plans: a whole schedule as one JSON file (gzip when its name ends in .gz), made by `plan save=FILE`."""

from __future__ import annotations

import gzip
import json
from dataclasses import asdict
from pathlib import Path

from weight_sync.errors import ConfigError, PlanError
from weight_sync.plan.plan import Plan
from weight_sync.plan.schedule import Budget, CostModel, Schedule, make_schedule

FORMAT = "weight_sync.schedule/1"


def save(schedule: Schedule, file: str | Path) -> None:
    """Write the plan, its cost model and its budget. Methods and pieces follow from them and are not written."""
    data = {
        "format": FORMAT,
        "digest": schedule.digest,
        "plan": schedule.plan.to_json(),
        "costs": asdict(schedule.costs),
        "budget": asdict(schedule.budget),
    }
    text = json.dumps(data).encode()
    path = Path(file)
    path.write_bytes(gzip.compress(text, 6) if path.suffix == ".gz" else text)


def load(file: str | Path) -> Schedule:
    """The schedule that save() wrote. Raises ConfigError for a file that is none, PlanError for one whose content changed."""
    path = Path(file)
    try:
        raw = path.read_bytes()
        data = json.loads(gzip.decompress(raw) if path.suffix == ".gz" else raw)
    except (OSError, EOFError, ValueError) as error:
        raise ConfigError(f"{file}: no saved plan: {error}") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ConfigError(f"{file}: no saved plan of this version; `plan ... save=FILE` makes one")
    try:
        costs, budget = CostModel(**data["costs"]), Budget(**data["budget"])
        schedule = make_schedule(Plan.from_json(data["plan"]), costs, budget)
    except (KeyError, TypeError) as error:
        raise PlanError(f"{file}: damaged: {type(error).__name__}: {error}") from None
    if schedule.digest != data.get("digest"):
        raise PlanError(f"{file}: damaged, or made by another version: it says {data.get('digest')}, holds {schedule.digest}")
    return schedule
