"""Shared by the SGLang tests. They run in the sglang environment; SGLang is imported once, on the CPU."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from weight_sync_integrations.checkpoints import make_checkpoint
from weight_sync_integrations.sglang.replica import prepare_cpu

sys.path.insert(0, str(Path(__file__).parent))
prepare_cpu()
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """checkpoint(kind, seed=..., **sizes) -> folder, made once for each set of arguments."""
    made: dict[str, Path] = {}

    def make(kind: str, *, seed: int = 0, **sizes: Any) -> Path:
        key = repr((kind, seed, sorted(sizes.items())))
        if key not in made:
            made[key] = make_checkpoint(tmp_path_factory.mktemp("checkpoint") / kind, kind, seed=seed, **sizes)
        return made[key]

    return make
