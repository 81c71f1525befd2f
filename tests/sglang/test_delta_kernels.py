"""The Triton kernels of deltas, interpreted on the CPU, in processes of their own: TRITON_INTERPRET must stand before triton is
imported. The same code runs on GPUs in tests/gpu."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("case", ["device", "host", "chunks", "filled", "refused"])
def test_what_the_kernels_find_encode_check_and_write_is_what_numpy_says(case: str) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("delta_program.py")), case],
        env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.endswith("equal\n")
