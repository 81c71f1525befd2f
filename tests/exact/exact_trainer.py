"""Runs in the trainer's environment: python -m tests.exact.exact_trainer FOLDER TRAINER...

For each named trainer: a real one of four gloo ranks is built from a tiny random checkpoint and takes an optimiser step; then
every rank's live bytes and the export of the same state are written to FOLDER/trainers/<name> (see exact_dump.py). The
checkpoint it started from is in FOLDER/models/<model>.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from pathlib import Path
from typing import Any

from tests.exact.exact_cases import MODELS, TRAINER_WORLD, TRAINERS, Trainer
from tests.exact.exact_dump import write_rank
from tests.trainer.conftest import run_ranks


def train_and_dump(rank: int, case: Trainer, model: Path, folder: Path) -> None:
    """The work of one rank."""
    if case.fsdp:
        from weight_sync_integrations.fsdp.model import build as build_fsdp
        from weight_sync_integrations.fsdp.source import FsdpSource

        trainer: Any = build_fsdp(model, **case.options)
        live: Any = FsdpSource(trainer.model, trainer.optimizer)
    else:
        from weight_sync_integrations.megatron.model import build
        from weight_sync_integrations.megatron.source import MegatronSource

        trainer = build(model, case.parallel, **case.options)
        live = MegatronSource(trainer.chunks, trainer.optimizer)
    trainer.train_step()
    live.quiesce()
    try:
        write_rank(folder, live.describe())
    finally:
        live.release()
    trainer.export_hf(folder / "export")


def prepare() -> None:
    """Import everything heavy once; ranks are forked."""
    import torch

    torch.set_num_threads(1)
    from weight_sync_integrations.megatron import cpu

    assert cpu.install()
    for module in (
        "torch.distributed.fsdp",
        "torch._dynamo",
        "transformers.models.qwen3.modeling_qwen3",
        "transformers.models.qwen3_moe.modeling_qwen3_moe",
        "megatron.core.optimizer",
        "weight_sync_integrations.fsdp.model",
        "weight_sync_integrations.fsdp.source",
        "weight_sync_integrations.megatron.model",
        "weight_sync_integrations.megatron.source",
    ):
        importlib.import_module(module)


def _must_differ(before: Path, after: Path, still: tuple[str, ...]) -> None:
    """An optimiser step changes every tensor; an export that shows none of it would be a useless oracle."""
    from safetensors.torch import load_file

    old, new = (load_file(folder / "model.safetensors") for folder in (before, after))
    same = [name for name in old if old[name].float().equal(new[name].float()) and not name.endswith(still)]
    assert not same, f"{after} holds the values from before the step in {same}"


def main(root: Path, names: list[str]) -> None:
    os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TORCHDYNAMO_DISABLE="1")
    prepare()
    from weight_sync_integrations.checkpoints import make_checkpoint

    for name in names:
        began = time.monotonic()
        case = TRAINERS[name]
        folder = root / "models" / case.model
        if not folder.exists():
            made = MODELS[case.model]
            make_checkpoint(folder, made.kind, **made.sizes)
        out = root / "trainers" / name
        run_ranks(TRAINER_WORLD, train_and_dump, case, folder, out, seconds=300)
        _must_differ(folder, out / "export", MODELS[case.model].still)
        print(f"{name}: {time.monotonic() - began:.1f} s", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
