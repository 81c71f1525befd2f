"""python -m weight_sync diff A.json B.json [output=table|json]
python -m weight_sync diff [common overrides] -- [overrides of A] -- [overrides of B] [output=table|json]

What changes between two plans of one model (another cut, strategy, quantisation, budget): totals, which bytes get another
sender, which tensors travel another way, bytes for each rank.
A.json and B.json are made by `plan save=FILE`. Exit code 0 whether they are equal or not.
"""

from __future__ import annotations

import json

from weight_sync.commands.common import inputs_of, output_of
from weight_sync.commands.saved import load
from weight_sync.errors import ConfigError
from weight_sync.observe.units import bytes_text
from weight_sync.plan.difference import Difference, difference
from weight_sync.plan.picture import bars
from weight_sync.plan.schedule import Schedule


def run(words: list[str]) -> int:
    output, rest = output_of(words)
    found = difference(*_both(rest))
    print(json.dumps(found.to_json()) if output == "json" else "\n".join(said(found)))
    return 0


def _both(words: list[str]) -> tuple[Schedule, Schedule]:
    if "--" not in words:
        if len(words) != 2 or any("=" in word for word in words):
            raise ConfigError("diff needs two saved plans, or overrides in three groups: common -- of A -- of B")
        return load(words[0]), load(words[1])
    groups: list[list[str]] = [[]]
    for word in words:
        if word == "--":
            groups.append([])
        else:
            groups[-1].append(word)
    if len(groups) != 3:
        raise ConfigError(f"diff needs overrides in three groups, common -- of A -- of B; got {len(groups)}")
    common, first, second = groups
    return inputs_of([*common, *first]).schedule(), inputs_of([*common, *second]).schedule()


def said(found: Difference, limit: int = 12) -> list[str]:
    """The difference in words, with bars for ranks."""
    if found.same:
        return [f"the two plans are the same: {found.a}"]
    lines = [f"plan {found.a} -> {found.b}"]
    for name, (old, new) in found.numbers.items():
        lines.append(f"  {name}: {_number(name, old)} -> {_number(name, new)}")
    lines.append(
        f"in both plans: {bytes_text(found.common)} to the same place; of these {bytes_text(found.moved)} have another sender"
    )
    for title, only in (
        ("in both plans, but in other boxes, to other places or in another dtype", found.recut),
        ("only in the first", found.only_a),
        ("only in the second", found.only_b),
    ):
        if only:
            lines.append(f"{title}: {bytes_text(sum(only.values()))}")
            lines += bars([(name, n, bytes_text(n)) for name, n in only.items()], limit=limit)
    if found.remethod:
        lines.append("travel another way:")
        for template, ways in list(found.remethod.items())[:limit]:
            old, new = (", ".join(f"{method} {bytes_text(n)}" for method, n in way.items()) for way in ways)
            lines.append(f"  {template}: {old} -> {new}")
        if len(found.remethod) > limit:
            lines.append(f"  ... and {len(found.remethod) - limit} more")
    for side, verb, change in (("trainer", "send", found.trainer), ("rollout", "receive", found.rollout)):
        if change:
            order = sorted(change, key=lambda rank: (-abs(change[rank]), rank))
            lines.append(f"{len(change)} {side} ranks {verb} another amount:")
            rows = [
                (f"{side} {r}", abs(change[r]), ("+" if change[r] > 0 else "-") + bytes_text(abs(change[r]))) for r in order
            ]
            lines += bars(rows, limit=limit)
    return lines


def _number(name: str, value: float) -> str:
    if "bytes" in name:
        return bytes_text(value)
    return f"{value:.3f}" if isinstance(value, float) else f"{value:,}"
