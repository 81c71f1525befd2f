"""Whole sessions with deltas as between GPUs, whose kernels are interpreted on the CPU: in processes of their own, as
TRITON_INTERPRET must stand before triton is imported. The same sessions run on GPUs in tests/gpu."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).with_name("delta_session_program.py")


def run(*cases: str) -> None:
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(__file__).parents[1] / "session"),
    }
    done = subprocess.run(
        [sys.executable, str(PROGRAM), *cases], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines() == list(cases)


def test_deltas_between_gpus_leave_every_byte_of_every_engine_as_a_complete_session_would() -> None:
    run("by the host", "as it lies", "tp1 to tp4", "tp4 to tp1", "two engines")


def test_values_that_a_gpu_makes_in_its_staging_buffer_are_compared_there_and_arrive_as_the_reference_makes_them() -> None:
    run("quantised")


def test_more_changes_than_are_allowed_make_a_complete_session_after_which_the_next_is_a_delta_again() -> None:
    run("too much")


def test_a_damaged_message_and_a_word_that_changed_in_an_engine_are_found_and_no_gpu_serves_them() -> None:
    run("damaged")
