"""Where miles's tests find their interpreters, and its parser in a process of its own."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
VENV = ROOT / ".venvs" / "miles"
CPU_SITE = ROOT / "integrations" / "sglang" / "cpu_site"
SETTINGS = {"OMP_NUM_THREADS": "1", "SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1", "TORCHDYNAMO_DISABLE": "1"}
SETTINGS |= {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "PYTHONWARNINGS": "ignore"}
RAY = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
"""A token of this run's own, for whatever Ray finds on the machine would do for the driver and not for the ranks."""
os.environ.update(RAY)  # Ray reads them once, when it is imported


def environment(*paths: Path) -> dict[str, str]:
    """Variables of a process that imports miles; paths go first."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("WEIGHT_SYNC")}
    return clean | SETTINGS | RAY | {"PYTHONPATH": os.pathsep.join(map(str, (CPU_SITE, *paths)))}


def parse(asked: dict[str, Any], out: Path) -> dict[str, Any]:
    """parse.py with everything of miles-rl 0.0.2 on the path."""
    done = subprocess.run(
        [VENV / "bin" / "python", HERE / "parse.py", "ask", out], cwd=ROOT, env=environment(VENV / "miles-rl"),
        input=json.dumps(asked), capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(out.read_text())
