"""These tests need an environment that verl is installed in, beside Megatron and vLLM or SGLang; they import it with the CPU
platform."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    # verl's configs and code are the same in both environments
    wanted = {
        "test_compose.py": "vllm",
        "test_megatron.py": "sglang",
        "test_nccl_benchmark.py": "vllm",
        "test_seams.py": "vllm",
    }
    missing = [name for name in ("verl", wanted.get(collection_path.name)) if name and importlib.util.find_spec(name) is None]
    return True if missing else None


def pytest_configure(config: pytest.Config) -> None:
    from benchmarks.verl_rig import prepare

    prepare()
