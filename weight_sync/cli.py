"""python -m weight_sync COMMAND [words] [key=value ...]: look, plan and check, from the command line.

One command is one function `run(words: list[str]) -> int` (the exit code) in weight_sync/commands/ or, where it needs a real
framework, in weight_sync_integrations/; COMMANDS is the list. Overrides are those of train.py (trainer.tp=2 rollout=vllm ...).
"""

from __future__ import annotations

import io
import os
import select
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import TextIO

from weight_sync.errors import ConfigError, WeightSyncError

COMMANDS: dict[str, tuple[str, str]] = {
    "plan": ("weight_sync.commands.plan:run", "legality, transfers, bytes and time of a sync, from configs alone"),
    "explain": ("weight_sync.commands.explain:run", "one tensor, one rank or one link: what goes where, and why"),
    "diff": ("weight_sync.commands.diff:run", "what changes between two plans: bytes, senders, methods"),
    "new-family": ("weight_sync_integrations.newfamily:run", "a family proposed from Megatron-Bridge's mappings, and proven"),
    "inventory": (
        "weight_sync_integrations.inventory_command:run",
        "every tensor that a live engine generates from, and how a sync keeps each right",
    ),
    "chaos": ("weight_sync.commands.chaos:run", "thousands of syncs with injected faults: none may end in wrong bytes served"),
    "simulate": ("weight_sync.commands.simulate:run", "a plan run on a described cluster: seconds, limit, use of every link"),
    "search": ("weight_sync.commands.search:run", "cuts and strategies tried within limits, ranked by seconds and memory"),
    "bench": ("weight_sync.commands.bench:run", "this machine's links measured, and written as a cluster file"),
    "doctor": ("weight_sync.commands.doctor:run", "what this machine offers, and which strategies would work on it"),
}
"""Name -> (module:function, one line of help). The module is imported only when its command runs."""

UNREAD = 128 + signal.SIGPIPE


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code. Errors of ours are said once, without a trace; where nobody reads what is printed any
    more (`| head`), a command ends quietly, with the code of a process that SIGPIPE ended."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        try:
            code = _run(words)
        except WeightSyncError as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            code = 1
        sys.stdout.flush()  # here, where it can be told what broke; at exit it would be a trace
    except BrokenPipeError:
        unread = [stream for stream in (sys.stdout, sys.stderr) if _unread(stream)]
        if not unread:
            raise  # a pipe of the command's own
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in unread:
            os.dup2(nowhere, stream.fileno())  # the interpreter flushes what is left when it ends
        os.close(nowhere)
        return UNREAD
    except SystemExit as end:
        if not isinstance(end.__context__, BrokenPipeError):
            raise
        return UNREAD  # rich met it first, and has pointed stdout elsewhere
    return code


def _unread(stream: TextIO) -> bool:
    """Whether what is written to is a pipe whose reader is gone."""
    try:
        poll = select.poll()
        poll.register(stream.fileno(), 0)
    except (OSError, ValueError, io.UnsupportedOperation):  # closed, or no file
        return False
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def _run(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print("usage: python -m weight_sync COMMAND [words] [key=value ...]; COMMAND --help says more\n")
        width = max(map(len, COMMANDS))
        for name, (_, line) in COMMANDS.items():
            print(f"  {name:{width}}  {line}")
        return 0
    command, rest = words[0], words[1:]
    if command not in COMMANDS:
        raise ConfigError(f"unknown command {command!r}: there are {', '.join(COMMANDS)}")
    module, _, function = COMMANDS[command][0].partition(":")
    loaded = import_module(module)
    if rest and rest[0] in ("-h", "--help"):
        print((loaded.__doc__ or "").strip())
        return 0
    return int(getattr(loaded, function)(rest))
