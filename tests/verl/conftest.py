"""These tests need the environment that verl is installed in; they import it with the CPU platform."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return True if importlib.util.find_spec("verl") is None else None


def pytest_configure(config: pytest.Config) -> None:
    from benchmarks.verl_rig import environment

    os.environ.update(environment())
