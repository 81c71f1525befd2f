"""python -m weight_sync inventory sglang|vllm url=URL|start=FOLDER [words] [output=table|json]

Every tensor that a live engine generates from, and how a sync keeps each of them right.

    WEIGHT_SYNC_TOKEN=... python -m weight_sync inventory vllm url=http://HOST:PORT
    WEIGHT_SYNC_TOKEN=... python -m weight_sync inventory sglang url=http://HOST:PORT workers=HOST:PORT,HOST:PORT
    python -m weight_sync inventory sglang|vllm start=CHECKPOINT_FOLDER python=PATH [tp=N] [pp=N] [ep=N]

url=      a running server that takes part in a job. Its token comes from the environment, never from the command line.
workers=  SGLang only: the endpoints its workers announced, by rank (Server.workers; rank-*.json in its rendezvous folder).
start=    start a CPU server for the purpose, look, and stop it.
draft=    refuse, frozen or sync; family=, declare=PATTERN:CLASS (may be repeated): as weight_sync.draft, .family, .declare.
output=   table or json. seconds=: until it must be done (300).

Names that the plan writes are those of the layout declared for the served model. Nothing is paused and nothing is changed.
Exit code 1 when a tensor is not accounted for, or the engine cannot be synced as it runs.
"""

from __future__ import annotations

import json
import os
import secrets
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from weight_sync.commands.common import output_of
from weight_sync.config import engine_yaml, family_for, family_yaml
from weight_sync.errors import ConfigError
from weight_sync.ids import Deadline
from weight_sync.session.contracts import EngineDescription
from weight_sync.session.inputs import Declared, layout_of

_KEYS = ("url", "workers", "start", "python", "tp", "pp", "ep", "draft", "family", "declare", "seconds")
_TOKEN = "WEIGHT_SYNC_TOKEN"


def run(words: list[str]) -> int:
    output, rest = output_of(words)
    kind, given, declare = _arguments(rest)
    deadline = Deadline.after(float(given.get("seconds", "300")))
    with _engine(kind, given, declare, deadline) as engine:
        description = engine.describe(deadline)
        expected = planned_names(description, given.get("family", "auto"), given.get("draft", "refuse"))
        found = engine.inventory(expected, deadline)
    rows = [{"rank": rank, **entry} for rank, entries in sorted(found.items()) for entry in entries]
    missing = [row for row in rows if row["keep"] is None]
    if output == "json":
        print(json.dumps({"engine": description.name, "refusals": list(description.refusals), "tensors": rows}, indent=1))
    else:
        print(table(rows, description.refusals))
    return 1 if missing or description.refusals else 0


def planned_names(description: EngineDescription, family: str, draft: str) -> dict[int, list[str]]:
    """For each worker the parameters that a plan for the served model writes.

    Raises FamilyError or ParallelError when no layout is declared for this model on this engine and these sizes.
    """
    convention = engine_yaml(description.kind)
    sizes = description.sizes
    dims = {
        "tp": sizes["tp"], "pp": sizes["pp"], "attn_dp": sizes.get("attn_dp", 1), "moe_ep": sizes.get("moe_ep", 1),
        "engines": 1, "remainder": convention.get("remainder", "inner"),
    }  # fmt: skip
    name = family_for(description.model) if family == "auto" else family
    symbols = {"draft": 1} if draft == "sync" else {}
    layout = layout_of(Declared(family_yaml(name), description.model, dims, convention, symbols), "rollout")
    return {rank.rank: [param.name for param in layout.rank_params(rank.rank)] for rank in description.ranks}


def table(rows: Sequence[Mapping[str, Any]], refusals: Sequence[str]) -> str:
    """Tensors of one module class, attribute and class together; what is not accounted for is named in full."""
    groups: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        attribute = row["name"].rpartition(".")[2]
        groups.setdefault((row["keep"] or "NOT KEPT", f"{row['module']}.{attribute}", row["kind"], row["why"]), []).append(row)
    lines = [("class", "tensors", "MB", "module.attribute", "kind", "how")]
    for (keep, where, kind, why), members in sorted(groups.items(), key=lambda item: (item[0][0] != "NOT KEPT", item[0])):
        lines.append((keep, str(len(members)), f"{sum(m['nbytes'] for m in members) / 1e6:.2f}", where, kind, why))
    widths = [max(len(line[i]) for line in lines) for i in range(5)]
    text = ["  ".join([*(f"{cell:{w}}" for cell, w in zip(line, widths, strict=False)), line[5]]) for line in lines]
    counts = Counter(row["keep"] or "NOT KEPT" for row in rows)
    text.append("")
    text.append(f"{len(rows)} tensors on {len({row['rank'] for row in rows})} workers: " + _counts(counts))
    text += [f"NOT KEPT: rank {row['rank']} {row['name']}" for row in rows if row["keep"] is None]
    text += [f"cannot be synced as it runs: {reason}" for reason in refusals]
    return "\n".join(text)


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{number} {keep}" for keep, number in sorted(counts.items()))


def _arguments(words: Sequence[str]) -> tuple[str, dict[str, str], dict[str, str]]:
    """(kind, key -> value, declarations). Raises ConfigError naming the word and what is legal."""
    if not words or words[0] not in ("sglang", "vllm"):
        raise ConfigError(f"inventory: the first word is the engine, sglang or vllm, not {words[0] if words else 'nothing'}")
    given: dict[str, str] = {}
    declare: dict[str, str] = {}
    for word in words[1:]:
        key, equals, value = word.partition("=")
        if not equals or key not in _KEYS:
            raise ConfigError(f"inventory: {word!r}: known are {', '.join(f'{k}=' for k in _KEYS)} and output=")
        if key == "declare":
            pattern, _, keep = value.rpartition(":")
            declare[pattern] = keep
        elif key in given:
            raise ConfigError(f"inventory: {key}= is given twice")
        else:
            given[key] = value
    if ("url" in given) == ("start" in given):
        raise ConfigError("inventory: give url= of a running server, or start= with a checkpoint folder")
    return words[0], given, declare


@contextmanager
def _engine(kind: str, given: Mapping[str, str], declare: Mapping[str, str], deadline: Deadline) -> Iterator[Any]:
    """The adapter of a running server, or of one that ends with the block."""
    beside: dict[str, Any] = {"draft": given.get("draft", "refuse"), "declare": declare}
    if "start" in given:
        with _started(kind, given, beside, deadline) as engine:
            yield engine
        return
    token = os.environ.get(_TOKEN, "")
    if not token:
        raise ConfigError(f"inventory: the environment lacks {_TOKEN}, the token that the server was started with")
    engine = _connected(kind, given["url"], given.get("workers", ""), token, beside)
    try:
        yield engine
    finally:
        engine.close()


def _connected(kind: str, url: str, workers: str, token: str, beside: Mapping[str, Any]) -> Any:
    if kind == "vllm":
        from weight_sync_integrations.vllm.engine import VllmEngine

        return VllmEngine(url, url, token, **beside)
    from weight_sync_integrations.sglang.engine import SglangEngine
    from weight_sync_integrations.sglang.launch import WorkerAddress

    if not workers:
        raise ConfigError("inventory: sglang needs workers=HOST:PORT,... beside url=: one endpoint for each rank, in order")
    places = [place.rpartition(":") for place in workers.split(",")]
    if bad := [place for place in places if not place[0] or not place[2].isdecimal()]:
        raise ConfigError(f"inventory: workers={workers}: {''.join(bad[0])!r} is not HOST:PORT")
    return SglangEngine(
        url, url, [WorkerAddress(i, host, int(port)) for i, (host, _, port) in enumerate(places)], token, **beside
    )


@contextmanager
def _started(kind: str, given: Mapping[str, str], beside: Mapping[str, Any], deadline: Deadline) -> Iterator[Any]:
    token = secrets.token_urlsafe(32)
    with tempfile.TemporaryDirectory(prefix="weight-sync-inventory-") as folder:
        common: dict[str, Any] = {
            "model": str(Path(given["start"]).absolute()),
            "token": token,
            "python": given.get("python", ""),
            "log": f"{folder}/server.log",
            **{axis: int(given[axis]) for axis in ("tp", "pp", "ep") if axis in given},
        }
        if not common["python"]:
            raise ConfigError(f"inventory: start= needs python=, the interpreter of the environment {kind} is installed in")
        if kind == "vllm":
            from weight_sync_integrations.vllm import launch as vllm
            from weight_sync_integrations.vllm.engine import VllmEngine

            spec = vllm.ServerSpec(**common, kv_cache_bytes=32 << 20, max_model_len=256)
            with vllm.start(spec, deadline) as process:
                engine: Any = VllmEngine(process.name, process.url, token, **beside)
                yield engine
                engine.close()
            return
        from weight_sync_integrations.sglang import launch as sglang
        from weight_sync_integrations.sglang.engine import SglangEngine

        with sglang.start(sglang.ServerSpec(**common, max_total_tokens=512), deadline) as server:
            engine = SglangEngine(server.name, server.url, server.workers, token, **beside)
            yield engine
            engine.close()
