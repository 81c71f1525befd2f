"""python -m weight_sync doctor [environments=DIR] [output=table|json]

What this host really offers for moving weights, which strategies would work on it, and the fix for what is missing: GPUs,
NVLink, RDMA devices, GPUDirect, limits, ports, Mooncake, NIXL, and the frameworks in this interpreter and in the environments
below DIR (.venvs), with whether they would find weight_sync. Changes nothing and needs no root. Exit code 0 when some strategy
works here.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from weight_sync.commands.common import output_of, words_of
from weight_sync.commands.host import Check, Environment, checks, environments
from weight_sync.errors import ConfigError
from weight_sync.transport import preflight


def run(words: list[str]) -> int:
    output, rest = output_of(words)
    found, rest = words_of(rest, "environments")
    if rest:
        raise ConfigError(f"doctor takes environments=DIR and output=, got {' '.join(rest)}")
    facts = examined(Path(found.get("environments", ".venvs")))
    if output == "json":
        print(json.dumps(facts))
    else:
        show(facts)
    return 0 if any(verdict["works"] for verdict in facts["strategies"].values()) else 1


def examined(folder: Path) -> dict[str, Any]:
    """Everything that is looked at, as plain data."""
    found = preflight.facts()
    looked = checks(found)
    return {
        "strategies": strategies(found, looked),
        "checks": [asdict(check) for check in looked],
        "environments": [asdict(item) | {"missing_hooks": missing_hooks(item)} for item in environments(folder)],
        "exposure": list(preflight.EXPOSURE),
    }


def strategies(found: preflight.Facts, looked: list[Check]) -> dict[str, dict[str, Any]]:
    """Name -> {"works", "reason", "fixes", "better"}: the verdict is preflight's own, which train.py refuses by."""
    result: dict[str, dict[str, Any]] = {}
    for name, reason in preflight.reachable(found).items():
        wrong = [check for check in looked if check.ok is False]
        result[name] = {
            "works": reason is None,
            "reason": reason,
            "fixes": [f"{c.name}: {c.fix}" for c in wrong if name in c.needed_by] if reason is not None else [],
            "better": [f"{c.name}: {c.fix}" for c in wrong if name in c.helps],
        }
    return result


def missing_hooks(item: Environment) -> list[str]:
    """What to do for frameworks that are installed but would not find this library."""
    return [
        f"{framework} would not find weight_sync: install it into {item.name} (pip install weight_sync)"
        for framework, there in item.hooks.items()
        if not there
    ]


def show(facts: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    def _table(*heads: str) -> Table:
        table = Table(show_lines=True)
        for head in heads:
            table.add_column(head, overflow="fold")
        return table

    console = Console(highlight=False)
    table = _table("strategy", "works here", "why not, and what to do")
    for name, verdict in facts["strategies"].items():
        said = [verdict["reason"], *(f"fix: {fix}" for fix in verdict["fixes"])]
        if verdict["works"]:
            said = [f"better: {fix}" for fix in verdict["better"]]
        table.add_row(name, "yes" if verdict["works"] else "no", escape("\n".join(filter(None, said))))
    console.print(table)
    table = _table("looked for", "", "found", "fix")
    for check in facts["checks"]:
        state = {True: "ok", False: "missing" if check["needed_by"] else "low", None: "unknown"}[check["ok"]]
        table.add_row(check["name"], state, escape(check["found"]), escape(check["fix"]) if check["ok"] is False else "")
    console.print(table)
    table = _table("environment", "python", "packages", "hooks")
    for item in facts["environments"]:
        hooks = [f"{name}: {'found' if there else 'MISSING'}" for name, there in item["hooks"].items()]
        packages = ", ".join(f"{name} {version}" for name, version in item["packages"].items()) or "none of ours"
        table.add_row(escape(item["name"]), item["python"], packages, "\n".join([*hooks, *item["missing_hooks"]]))
    console.print(table)
    for line in facts["exposure"]:
        console.print(escape(line))
