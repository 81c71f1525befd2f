"""Every wait has an end: contracts whose calls can block take a Deadline, and no code waits for ever without saying why."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from weight_sync.session import contracts
from weight_sync.transport import base

ROOT = Path(__file__).resolve().parents[2]

LOCAL = {
    "TrainerSource.describe": "reads addresses of this process",
    "TrainerSource.tensors": "hands out what it holds",
    "TrainerSource.quiesce": "a collective of the trainer's own framework: ends by its process group's timeout, and the "
    "controller's call of it has a deadline",
    "TrainerSource.release": "opens a guard of this process",
    "Transport.register": "a local call",
    "Transport.describe": "a local call",
    "Transport.write": "returns at once; wait() has the deadline",
    "Transport.read": "returns at once; wait() has the deadline",
    "DeviceOrdered.follow": "queues an order on the device; wait() has the deadline",
    "Transport.close": "joins its own threads, which watch deadlines",
}
"""Methods of contracts that take no deadline, and why they need none."""

ALLOWED = {
    ("integrations/miles/launch.py", "subprocess.run(words, env=_environment(job), check=False)"): "the user's training run",
    (
        "integrations/miles/launch.py",
        "subprocess.run([*ray, '--runtime-env-json', runtime, '--', *words], check=False)",
    ): "the user's training run, followed in Ray",
    ("integrations/spmd.py", "future.exception()"): "each call it waits for has the deadline as its HTTP timeout",
    ("integrations/spmd.py", "future.result()"): "each call it waits for has the deadline as its HTTP timeout",
    ("integrations/ray/trainer.py", "ray.get(ref)"): "after ray.wait(timeout=...) has said that it is done",
    ("integrations/server.py", "self.process.wait()"): "after SIGKILL of the whole process group",
    ("integrations/sglang/client.py", "future.exception()"): "each call it waits for has the deadline as its HTTP timeout",
    ("integrations/sglang/client.py", "future.result()"): "each call it waits for has the deadline as its HTTP timeout",
    ("weight_sync/commands/linkpeer.py", "connection.recv()"): "a benchmark's child: its parent's end closes with the parent",
    ("weight_sync/commands/linkpeer.py", "self._connection.recv()"): "after poll(SECONDS) has said that something is there",
    ("weight_sync/transport/mooncake_pump.py", "self._ready.wait()"): "the pump's own thread, idle: close() wakes it",
}
"""Waits without a limit, and why each of them ends."""

WAITS = {"join", "wait", "result", "get", "acquire", "recv", "accept", "communicate", "exception"}
NEED_TIMEOUT = re.compile(
    r"(subprocess\.(run|call|check_call|check_output)|httpx\.(get|post|put|request)|requests\.\w+|.*urlopen)"
)
TREES = ("weight_sync", "integrations")


def protocols() -> list[type]:
    found = [value for module in (contracts, base) for value in vars(module).values() if getattr(value, "_is_protocol", False)]
    return [p for p in found if p.__module__ in (contracts.__name__, base.__name__) and not p.__name__.endswith("Observer")]


def methods() -> Iterator[tuple[str, inspect.Signature]]:
    for protocol in protocols():
        for name, value in vars(protocol).items():
            if inspect.isfunction(value) and not name.startswith("_"):
                yield f"{protocol.__name__}.{name}", inspect.signature(value)


def test_every_method_of_a_contract_that_can_block_takes_a_deadline() -> None:
    names = dict(methods())
    assert {"RolloutEngine.pause", "TrainerGroup.call", "Transport.wait"} <= names.keys(), "the contracts were not found"
    without = {name for name, signature in names.items() if "deadline" not in signature.parameters}
    assert without == LOCAL.keys(), "a call that can block takes a Deadline; one that cannot is listed here with its reason"
    wrong = [
        n
        for n, s in names.items()
        if n not in LOCAL and s.parameters["deadline"].annotation not in ("Deadline", "base.Deadline")
    ]
    assert not wrong
    assert not [
        n for n, s in names.items() if n not in LOCAL and s.parameters["deadline"].default is not inspect.Parameter.empty
    ]


def endless(tree: ast.AST) -> Iterator[ast.Call]:
    """Calls that may wait for ever: waiting verbs without any argument, and calls to programs or servers without a timeout."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        named = {keyword.arg for keyword in node.keywords}
        if "timeout" in named or None in named:  # None: **options
            continue
        text = ast.unparse(node.func)
        waiting = isinstance(node.func, ast.Attribute) and node.func.attr in WAITS and not node.args and not node.keywords
        if waiting or text == "ray.get" or NEED_TIMEOUT.fullmatch(text):
            yield node


def waits() -> dict[tuple[str, str], list[int]]:
    found: dict[tuple[str, str], list[int]] = {}
    for folder in TREES:
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = str(path.relative_to(ROOT))
            if name.startswith("weight_sync/chaos/"):  # drills: threads that hand each other the turn, under a watchdog
                continue
            for call in endless(ast.parse(path.read_text())):
                found.setdefault((name, ast.unparse(call)), []).append(call.lineno)
    return found


def test_no_code_waits_without_a_limit_unless_it_is_said_here_why_it_ends() -> None:
    found = waits()
    new = [f"{name}:{lines[0]}: {text}" for (name, text), lines in found.items() if (name, text) not in ALLOWED]
    assert not new, "give it a timeout from the caller's deadline"
    assert not ALLOWED.keys() - found.keys(), "no longer there: take it off the list"


@pytest.mark.parametrize(
    "code",
    ["thread.join()", "event.wait()", "future.result()", "queue.get()", "lock.acquire()", "pipe.recv()", "ray.get(x)",
     "subprocess.run(words)", "httpx.get(url)", "urllib.request.urlopen(url)", "process.communicate()"],
)  # fmt: skip
def test_the_search_finds(code: str) -> None:
    assert len(list(endless(ast.parse(code)))) == 1


@pytest.mark.parametrize(
    "code",
    ["', '.join(names)", "thread.join(5)", "event.wait(timeout=left)", "d.get('key')", "transport.wait(ticket, deadline)",
     "ray.get(x, timeout=3)", "subprocess.run(words, timeout=9)", "lock.acquire(blocking=False)"],
)  # fmt: skip
def test_the_search_lets_pass(code: str) -> None:
    assert not list(endless(ast.parse(code)))
