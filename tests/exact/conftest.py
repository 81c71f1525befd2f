"""Runs the trainers and engines of the exactness tests in their own environments and hands out what they found.

The tests themselves run in the core environment. Each side is one process for all its cases, because importing a framework
takes longer than syncing; only the cases of the selected tests are run (pytest tests/exact -k "vllm and tp2ep2").
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.exact.exact_cases import KINDS, TRAINERS, why_not

ROOT = Path(__file__).parents[2]
SECONDS = 900
"""For one side with all its cases; many times what two idle cores need."""

_FOUND = pytest.StashKey[list[dict[str, Any]]]()

Answers = Callable[[dict[str, str]], dict[str, Any]]


@pytest.fixture(scope="session")
def answers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """answers(case) -> what its side reported. Fails with the side's own words where it reported nothing or an error."""
    wanted: dict[str, dict[str, str]] = {}
    for item in request.session.items:
        case = item.callspec.params.get("case") if isinstance(item, pytest.Function) and hasattr(item, "callspec") else None
        if case is not None and not why_not(case["kind"], case["trainer"], case["engine"]):
            wanted[case["id"]] = case
    root = tmp_path_factory.mktemp("exact")
    found: dict[str, dict[str, Any]] = {}
    good: dict[str, bool] = {}
    ended: dict[str, str] = {}

    def of(case: dict[str, str]) -> dict[str, Any]:
        if not ended:
            needed = [name for name in TRAINERS if any(c["trainer"] == name for c in wanted.values())]
            good["trainer"], ended["trainer"] = _run(root, "trainer", "exact_trainer", [str(root), *needed])
        if not good["trainer"]:
            pytest.fail(ended["trainer"], pytrace=False)
        if case["kind"] not in ended:
            ended[case["kind"]] = _engine_side(root, case["kind"], list(wanted.values()), found)
            request.config.stash[_FOUND] = list(found.values())
        answer = found.get(case["id"])
        if answer is None:
            pytest.fail(f"no answer for this case\n{ended[case['kind']]}", pytrace=False)
        if "error" in answer:
            pytest.fail(answer["error"], pytrace=False)
        return answer

    return of


def _engine_side(root: Path, kind: str, cases: Sequence[dict[str, str]], found: dict[str, dict[str, Any]]) -> str:
    assert kind in KINDS
    own = [case for case in cases if case["kind"] == kind]
    asked, file = root / f"{kind}.json", root / f"{kind}.answers"
    asked.write_text(json.dumps(own))
    file.touch()
    _, text = _run(root, kind, f"exact_{kind}", [str(root), str(file), str(asked)])
    found |= {answer["id"]: answer for answer in map(json.loads, file.read_text().splitlines())}
    return text


def _run(root: Path, environment: str, module: str, arguments: list[str]) -> tuple[bool, str]:
    """Run one side to its end. Returns whether it ended well, and for tests that got no answer how and its last words."""
    python = ROOT / ".venvs" / environment / "bin" / "python"
    if not python.exists():
        pytest.fail(f"{python} is missing: envs/build.sh {environment} makes it", pytrace=False)
    log = root / f"{environment}.log"
    variables = {**os.environ, "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with log.open("w") as stream:
        command = [str(python), "-m", f"tests.exact.{module}", *arguments]
        process = subprocess.Popen(command, cwd=ROOT, stdout=stream, stderr=stream, env=variables, start_new_session=True)
        try:
            ending = f"ended with code {process.wait(SECONDS)}"
        except subprocess.TimeoutExpired:
            ending = f"was stopped after {SECONDS} s"
        finally:
            _stop(process)
    last = "\n".join(log.read_text(errors="replace").splitlines()[-40:])
    return process.returncode == 0, f"-- the {environment} side {ending}; {log} ends with:\n{last}"


def _stop(process: subprocess.Popen[bytes]) -> None:
    """SIGINT first: a side then stops the processes it forked into groups of their own."""
    for number in (signal.SIGINT, signal.SIGKILL):
        if process.poll() is None:
            os.killpg(process.pid, number)
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                continue


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """A table of what was compared."""
    found = [answer for answer in config.stash.get(_FOUND, []) if "way" in answer and "error" not in answer]
    if not found:
        return
    terminalreporter.section("byte for byte what the engine's own load_weights makes of the trainer's export")
    head = f"{'engine':7} {'layout':13} {'trainer':24} {'way':8} {'equal':>5} {'tensors':>7} {'bytes':>9} {'rounds':>6}"
    terminalreporter.write_line(f"{head}  transfers")
    for a in found:
        methods = ", ".join(f"{count} {name}" for name, count in a["methods"].items() if count)
        methods += f"; {a['quant']}" if "quant" in a else ""
        terminalreporter.write_line(
            f"{a['kind']:7} {a['engine']:13} {a['trainer']:24} {a['way']:8} {'NO' if a['differing'] else 'yes':>5} "
            f"{a['tensors']:7} {a['bytes']:9} {a['rounds']:6}  {methods}"
        )
