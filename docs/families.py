"""Make docs/families.md from what tests recorded: python docs/families.py [--add FOLDER] [--check].

The family tests write a line for every comparison that succeeded into the folder WEIGHT_SYNC_FAMILY_RECORDS. --add merges such
a folder into families.jsonl, which is kept beside the page; without it the page is rendered from that file alone. With --check
nothing is written and the exit code says whether the page is current.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from weight_sync.config import _files, engine_yaml, family_yaml
from weight_sync.layout.values import FUNCTIONS, REFUSED, legal_casts

DOCS = Path(__file__).parent
RECORDS = DOCS / "families.jsonl"
PAGE = DOCS / "families.md"
Record = dict[str, Any]
SIDES = ("trainer", "sglang", "vllm")
INTRO = """# Model families

<!-- Made by docs/families.py from docs/families.jsonl, which the family tests record. Do not edit. -->

A family is a YAML file in `conf/weight_sync/family`; how an engine fuses and stacks is one in `conf/weight_sync/engine`. Each
cell below counts layouts in which the declaration was compared, element for element, with somebody else's code on a tiny model:

- **trainer**: Megatron-Bridge's own load mappings, run on arrays of element numbers, for every local parameter of every rank
  of a live Megatron-Core model (tests/trainer/test_families.py). Names, shapes and the place of every element are equal. CI
  runs a pairwise choice of layouts and compares dtypes as well; the rest of a row's product was run once, during development,
  without comparing dtypes (again: WEIGHT_SYNC_ALL_LAYOUTS=1). Without CUDA the leaves that Transformer Engine would provide
  are stand-ins of the same names and shapes.
- **sglang**, **vllm**: the engine's own `load_weights`, recorded on a model built as each rank (tests/sglang/test_families.py,
  tests/vllm/test_families.py). Names, shapes, dtypes and the place of every element agree. The models are not run.

*parameters* counts what was compared, over all ranks of all layouts. *byte-equal* says whether syncs from a real trainer into
the engine's live parameters were compared, byte for byte, with the engine's own load of the trainer's own export (next table);
where it says no, the oracles above are all there is.
"""
BYTES = """
## Byte for byte

A real trainer takes an optimiser step and is synced into live engine parameters that were filled with garbage; afterwards every
tensor of every rank equals what the engine's own `load_weights` makes of the trainer's own export (tests/exact). Trainers are
named by model and layout, four ranks each; *float32* ones hold all parameters in float32 and are cast (`trainer.casts`).
"six heads" are models whose sizes tp 3 divides, "tied" ones share embedding and head. *tensors* counts live tensors over all
ranks of these engines.

| model | engine | trainer -> engine layouts | byte-equal | tensors |
|---|---|---|---|---|
"""
CASTS = """
## Values that are computed

Bytes are placed, not computed, with one exception that a rule has to declare: `value: cast` with a `dtype`. The trainer then
converts the values while it packs them, writes the result, and both sides digest the converted bytes, so verification stays
exact to the byte. The recording of the engine's own loader must show the same cast into the same place, and no other. To
float32 a cast keeps every value; to bfloat16 it rounds to nearest, ties to even, as torch does.

A trainer that holds a whole model in another dtype than the one served (float32 masters, as FSDP2 under mixed precision or
Megatron-Core with `trainer.dtype: float32` have them) declares that once, with `trainer.casts: [float32]`; nothing is cast by
default. What an engine keeps in float32 then arrives unrounded.

A dtype that differs without a declaration is an error that names tensor, both dtypes and what to declare.

Declared casts:

{declared}

Value functions, all of them:

{functions}

The router bias `e_score_correction_bias` is float32 on all sides (a buffer in Megatron-Core) and is moved like any other.
Padded vocabulary rows are no values of the model: no sync writes them.
SGLang on CUDA may fuse shared experts into the routed ones (`w13_weight` then has one expert more): start it with
`--disable-shared-experts-fusion`; otherwise the live shapes disagree with the declaration and the session refuses to bind.
"""


def read(lines: Iterable[str]) -> dict[tuple[str, str, str], Record]:
    records = (json.loads(line) for line in lines if line.strip())
    return {(record["side"], record["model"], record["layout"]): record for record in records}


def natural(text: str) -> list[Any]:
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", text)]


def _cell(records: list[Record]) -> tuple[str, str]:
    if not records:
        return "-", "-"
    layouts = sorted((record["layout"] for record in records), key=natural)
    shown = ", ".join(layouts) if len(layouts) <= 8 else f"{len(layouts)} layouts, {axes(layouts)}"
    return shown, str(sum(record["tensors"] for record in records))


def byte_rows(records: dict[tuple[str, str, str], Record]) -> Iterable[str]:
    """One row for each model and engine: every trainer with the engine layouts it was synced to."""
    found: dict[tuple[str, str], list[Record]] = {}
    for (side, model, _), record in records.items():
        if side.endswith(" bytes"):
            found.setdefault((model, side.removesuffix(" bytes")), []).append(record)
    for (model, engine), mine in sorted(found.items()):
        pairs: dict[str, list[str]] = {}
        for record in mine:
            trainer, _, layout = record["layout"].partition(" -> ")
            pairs.setdefault(trainer, []).append(layout)
        text = "; ".join(f"{trainer} -> {' / '.join(sorted(pairs[trainer], key=natural))}" for trainer in sorted(pairs))
        assert {record["result"] for record in mine} == {"byte-equal"}
        yield f"| {model} | {engine} | {text} | yes | {sum(record['tensors'] for record in mine)} |"


def axes(layouts: list[str]) -> str:
    """The values each axis takes: tp{1,2,4} pp{1,2}."""
    found: dict[str, set[int]] = {}
    for layout in layouts:
        for axis, size in re.findall(r"([a-z]+)(\d+)", layout):
            found.setdefault(axis, set()).add(int(size))
    return " ".join(f"{axis}{{{','.join(map(str, sorted(sizes)))}}}" for axis, sizes in found.items())


def render(records: dict[tuple[str, str, str], Record]) -> str:
    lines = [INTRO, "| model | side | layouts | all equal | byte-equal | parameters |", "|---|---|---|---|---|---|"]
    models = sorted({model for side, model, _ in records if side in SIDES})
    for model in models:
        for side in SIDES:
            mine = [record for (s, m, _), record in records.items() if s == side and m == model]
            layouts, count = _cell(mine)
            result = "; ".join(sorted({record["result"] for record in mine})) or "not compared"
            synced = [record for (s, m, _), record in records.items() if s == f"{side} bytes" and m == model]
            exact = "-" if side == "trainer" else f"yes, {len(synced)} of trainer -> engine" if synced else "no: oracles only"
            lines.append(f"| {model} | {side} | {layouts} | {result} | {exact} | {count} |")
    lines += [
        BYTES + "\n".join(byte_rows(records)),
        "",
        "## Published sizes",
        "",
        "Layouts of both sides, plan and proof, without weights (tests/layout/test_families_full_size.py).",
        "",
        "| model | layouts | result | HF tensors |",
        "|---|---|---|---|",
    ]
    full = sorted((r for (side, _, _), r in records.items() if side == "full size"), key=lambda r: (r["model"], r["layout"]))
    lines += [f"| {r['model']} | {r['layout']} | {r['result']} | {r['tensors']} |" for r in full]
    values = CASTS.format(declared="\n".join(declared_casts()), functions="\n".join(value_functions()))
    lines += [values, "## What is refused by name", ""]
    lines += sorted(set(refusals()))
    return "\n".join(lines) + "\n"


def declared_casts() -> Iterable[str]:
    """Every cast that a family or engine file declares; what several engines have in common is said once."""
    found: dict[str, list[str]] = {}
    for kind, load in (("family", family_yaml), ("engine", engine_yaml)):
        names = sorted(item.name.removesuffix(".yaml") for item in _files("weight_sync", kind) if item.name.endswith(".yaml"))
        for name in (name for name in names if not name.startswith("_")):
            for rule in load(name).get("mcore" if kind == "family" else "rules", {}).values():
                if rule.get("value") == "cast":
                    only = f", for {', '.join(rule['only_for'])}" if rule.get("only_for") else ""
                    found.setdefault(f"`{rule['hf']}` to {rule['dtype']}{only}", []).append(name)
    return [f"- {', '.join(names)}: {text}" for text, names in found.items()]


def value_functions() -> Iterable[str]:
    yield from (f"- `{name}`: {what} ({legal_casts()})" for name, what in FUNCTIONS.items())
    yield from (f"- `{name}`: refused by name. {what[0].upper()}{what[1:]}" for name, what in REFUSED.items())


def refusals() -> Iterable[str]:
    """Every refusal that a family or engine file declares. What a family inherits is said once, where it is declared."""
    for kind, load in (("family", family_yaml), ("engine", engine_yaml)):
        names = sorted(item.name.removesuffix(".yaml") for item in _files("weight_sync", kind) if item.name.endswith(".yaml"))
        for name in (name for name in names if not name.startswith("_")):
            data = load(name)
            for when, reason in data.get("refuse", {}).items():
                if kind == "family":
                    yield f"- {name}{'' if when == '1' else f', where `{when}`'}: {reason}"
                else:
                    only = f", for {', '.join(reason['only_for'])}" if reason.get("only_for") else ""
                    yield f"- {name}, where `{reason['when']}`{only}: {reason['reason']}"
            for key, item in data.get("demand", {}).items():
                legal = f"anything but {', '.join(map(str, item['entries']))}" if item.get("entries") else "anything"
                yield f"- {name}, where `{key}` holds {legal}: {item['reason']}"
            for item in data.get("mcore_refuse", {}).values():
                yield f"- {name} on a Megatron trainer, where `{item['when']}`: {item['reason']}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--add", type=Path, help="folder of records to merge into families.jsonl")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    records = read(RECORDS.read_text().splitlines()) if RECORDS.exists() else {}
    if options.add:
        for file in sorted(options.add.glob("*.jsonl")):
            records |= read(file.read_text().splitlines())
    page = render(records)
    if options.check:
        return int(not PAGE.exists() or PAGE.read_text() != page)
    RECORDS.write_text(
        "".join(json.dumps(records[key]) + "\n" for key in sorted(records, key=lambda k: [natural(x) for x in k]))
    )
    PAGE.write_text(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
