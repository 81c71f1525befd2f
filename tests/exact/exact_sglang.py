"""Runs in SGLang's environment: python -m tests.exact.exact_sglang FOLDER ANSWERS CASES

Engines are replicas (exact_replicas.py): SGLang's own model classes, every rank of an engine in this process.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from tests.exact.exact_cases import ENGINES, Engine
from tests.exact.exact_replicas import Replicas, transport
from tests.exact.exact_session import answer, read_cases, served


def build(model: Path, case: Engine, rank: int) -> Any:
    from weight_sync_integrations.sglang.replica import EngineSizes, build_replica

    sizes = EngineSizes(tp=case.tp, pp=case.pp, ep=case.moe_ep, attn_dp=case.attn_dp)
    return build_replica(model, rank, sizes)


def main(root: Path, answers: Path, cases: Path) -> None:
    from weight_sync_integrations.sglang.replica import prepare_cpu

    prepare_cpu()
    import torch

    torch.set_num_threads(1)
    for (model, engine, quant), group in read_cases(cases).items():
        rollout = Replicas(served(root, model, quant), ENGINES[engine], build, "last")
        for case in group:
            answer(answers, case, root, rollout, transport)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
