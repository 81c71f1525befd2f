"""What a command does when nobody reads what it prints any more: `python -m weight_sync explain ... | head`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

LIKE_OTHERS = 128 + signal.SIGPIPE


def unread(*words: str, errors: int = subprocess.PIPE, **environment: str) -> tuple[int, str]:
    """Exit code and stderr of a command whose reader is gone before it prints."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, *words], stdout=writer, stderr=writer if errors == subprocess.STDOUT else errors, text=True,
            env={**os.environ, **environment}, timeout=120, check=False,
        )  # fmt: skip
    finally:
        os.close(writer)
    return done.returncode, done.stderr or ""


@pytest.mark.parametrize("buffered", ["", "1"], ids=["buffered", "unbuffered"])
@pytest.mark.parametrize("words", [("--help",), ("plan", "--help"), ("doctor",)], ids=" ".join)
def test_a_command_whose_output_nobody_reads_ends_quietly_like_other_tools(words: tuple[str, ...], buffered: str) -> None:
    assert unread("-m", "weight_sync", *words, PYTHONUNBUFFERED=buffered) == (LIKE_OTHERS, "")


def test_nobody_reads_errors_either() -> None:
    assert unread("-m", "weight_sync", "nosuch", errors=subprocess.STDOUT) == (LIKE_OTHERS, "")


def test_an_error_of_ours_is_said_whether_or_not_output_is_read() -> None:
    code, said = unread("-m", "weight_sync", "nosuch")
    assert code == 1
    assert "unknown command 'nosuch'" in said
    assert "Traceback" not in said


def test_a_pipe_that_breaks_elsewhere_is_not_hidden() -> None:
    program = """
import sys
from weight_sync import cli
from weight_sync.commands import doctor
def broken(words):
    raise BrokenPipeError("a peer of ours")
doctor.run = broken
sys.exit(cli.main(["doctor"]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "BrokenPipeError: a peer of ours" in done.stderr
