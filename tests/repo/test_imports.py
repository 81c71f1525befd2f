"""The dependency direction, and what importing the library loads."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

HEAVY = (
    "torch", "ray", "mooncake", "sglang", "vllm", "megatron", "transformers", "nixl", "wandb", "hydra", "omegaconf",
    "yaml", "httpx", "rich", "triton", "pandas",
)  # fmt: skip


def loaded_by(code: str) -> set[str]:
    """Top-level names in sys.modules after some code ran in a fresh interpreter."""
    script = f"{code}\nimport sys, json\nprint(json.dumps(sorted({{name.partition('.')[0] for name in sys.modules}})))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_the_import_contracts_of_pyproject_hold():
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as c; c()", "--no-cache"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "0 broken" in done.stdout


def test_importing_the_package_loads_nothing_outside_the_standard_library():
    before = loaded_by("pass")
    new = loaded_by("import weight_sync") - before
    assert new <= {"weight_sync"} | set(sys.stdlib_module_names)


@pytest.mark.parametrize("package", ["layout", "plan"])
def test_the_pure_packages_load_nothing_heavy(package):
    modules = sorted(p.stem for p in (ROOT / "weight_sync" / package).glob("*.py") if p.stem != "__init__")
    assert modules
    loaded = loaded_by("\n".join(f"import weight_sync.{package}.{name}" for name in modules))
    assert not loaded & set(HEAVY)
    assert not {name for name in loaded if name.startswith("weight_sync") and name != "weight_sync"}


@pytest.mark.parametrize("package", ["transport", "session", "observe"])
def test_the_other_packages_load_no_framework_when_imported(package):
    modules = sorted(p.stem for p in (ROOT / "weight_sync" / package).glob("*.py") if p.stem != "__init__")
    loaded = loaded_by("\n".join(f"import weight_sync.{package}.{name}" for name in modules))
    assert not loaded & {"torch", "ray", "mooncake", "sglang", "vllm", "megatron", "transformers", "nixl", "wandb"}
