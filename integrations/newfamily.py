"""python -m weight_sync new-family --hf-config config.json [name=NAME] [out=FILE.yaml] [trainer.python=PATH] [rollout=sglang]

Proposes a family for a model that Megatron-Bridge knows, and proves it on a shrunken one: against Megatron-Bridge's own load
mappings, element for element, and against SGLang's own loader. Prints the YAML and a report; writes the YAML to out=. The exit
code is 0 only if everything could be expressed and every comparison agreed.

Needs the trainer's environment (torch, Megatron-Core, Megatron-Bridge, transformers; envs/build.sh trainer), started as a
process of its own; the engine's comparison also needs SGLang's (envs/build.sh sglang) and is left out, and said to be, without
it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from weight_sync.config import compose_job, shipped_families
from weight_sync.errors import ConfigError, FamilyError

_SECONDS = 900.0
"""For each of the two processes; many times what they need."""


def run(words: list[str]) -> int:
    file, name, out, overrides = _arguments(words)
    job = compose_job(overrides)
    trainer = _interpreter(job.trainer.python)
    if not trainer.exists():
        raise ConfigError(
            f"trainer.python={job.trainer.python}: no such interpreter. new-family asks Megatron-Bridge, so it needs the "
            "trainer's environment (torch, megatron-core, megatron-bridge, transformers): envs/build.sh trainer makes it"
        )
    with tempfile.TemporaryDirectory(prefix="weight_sync_family_") as place:
        folder = Path(place)
        _process(trainer, "weight_sync_integrations.megatron.newfamily", [str(file), name, place], folder / "report.json")
        report = json.loads((folder / "report.json").read_text())
        if "error" in report:
            raise FamilyError(report["error"].partition(": ")[2])
        text = (folder / "family.yaml").read_text()
        engine, skipped = _engine(job.rollout.kind, _interpreter(job.rollout.python), folder, report)
    print(text)
    if out is not None:
        out.write_text(text)
        print(f"written to {out}\n")
    lines, good = described(report, engine, skipped)
    print("\n".join(lines))
    return 0 if good else 1


def _arguments(words: Sequence[str]) -> tuple[Path, str, Path | None, list[str]]:
    """(config file, name, out, overrides of train.py). Raises ConfigError for what is missing or not there."""
    file, name, out = None, None, None
    overrides: list[str] = []
    rest = iter(words)
    for word in rest:
        if word == "--hf-config":
            file = next(rest, None)
        elif word.startswith("--hf-config="):
            file = word.partition("=")[2]
        elif word.startswith("name="):
            name = word.partition("=")[2]
        elif word.startswith("out="):
            out = Path(word.partition("=")[2])
        else:
            overrides.append(word)
    if not file:
        raise ConfigError("new-family: give the model's config with --hf-config config.json")
    path = Path(file)
    if not path.is_file():
        raise ConfigError(f"--hf-config {file}: no such file")
    config = json.loads(path.read_text())
    if not isinstance(config, Mapping):
        raise ConfigError(f"--hf-config {file}: must hold one JSON object")
    name = name or re.sub(r"\W+", "_", str(config.get("model_type") or "family"))
    if name in shipped_families():  # a file that extends a family of its own name would extend itself
        name = f"my_{name}"
    return path.absolute(), name, out, overrides


def _interpreter(python: str) -> Path:
    """Not resolve(): a virtual environment's python is a link, and following it leaves the environment."""
    path = Path(python).expanduser()
    return path if path.is_absolute() else Path.cwd() / path


def _process(python: Path, module: str, words: Sequence[str], result: Path) -> None:
    """Run a module to its end. Raises FamilyError with its last words if it left no result."""
    variables = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONWARNINGS": "ignore",
    }
    print(f"{module.rpartition('.')[2]}: running in {python.parent.parent}", file=sys.stderr, flush=True)
    done = subprocess.run(
        [str(python), "-m", module, *words], env=variables, capture_output=True, text=True, timeout=_SECONDS, check=False
    )
    if not result.exists():
        last = "\n".join((done.stdout + done.stderr).splitlines()[-15:])
        raise FamilyError(f"{module} ended with code {done.returncode} and without a result:\n{last}")


def _engine(kind: str, python: Path, folder: Path, report: Mapping[str, Any]) -> tuple[list[dict[str, Any]], str]:
    """(results of the engine's comparison, why there are none)."""
    if report["unmatched"]:
        return [], "the proposal is incomplete"
    if kind != "sglang":
        return [], f"this command compares with SGLang only, not with {kind}"
    if not python.exists():
        return [], f"there is no {python}; envs/build.sh sglang makes it"
    words = [str(folder / "model"), str(folder / "family.yaml"), str(folder / "engine.json")]
    _process(python, "weight_sync_integrations.sglang.check_family", words, folder / "engine.json")
    return json.loads((folder / "engine.json").read_text()), ""


def described(report: Mapping[str, Any], engine: Sequence[Mapping[str, Any]], skipped: str) -> tuple[list[str], bool]:
    """(the report as lines, whether all is well)."""
    lines = ["matched: everything that the model has" if not report["unmatched"] else "could not be matched:"]
    lines += [f"  {line}" for line in report["unmatched"]]
    lines += [f"note: {line}" for line in report["notes"]]
    good = not report["unmatched"]
    for title, results, why in (
        ("Megatron-Bridge (shrunken model, live ranks)", report["trainer"], "the proposal is incomplete"),
        ("SGLang's own loader (shrunken model)", engine, skipped),
    ):
        if not results:
            lines.append(f"{title}: not compared: {why}")
        for result in results:
            if not result["differing"]:
                lines.append(f"{title}, {result['layout']}: all {result['parameters']} parameters agree")
                continue
            good = False
            lines.append(f"{title}, {result['layout']}: DIFFERS")
            lines += [f"  {line}" for line in result["differing"][:10]]
    return lines, good
