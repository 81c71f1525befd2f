"""A family file against SGLang's own loader, on every rank of a few engines built in this process.

Runs in SGLang's environment: python -m weight_sync_integrations.sglang.check_family CHECKPOINT FAMILY.yaml REPORT.json. The
report is a list of {"layout", "parameters": compared, "differing": what the second witness says, empty where it agrees}.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from weight_sync.config import engine_yaml, family_yaml
from weight_sync.errors import WeightSyncError
from weight_sync.layout.family import apply, engine_convention, parse_convention, parse_family
from weight_sync.layout.parallel import EngineDims
from weight_sync.layout.resolve import computed_names, resolve
from weight_sync.layout.witness import agree
from weight_sync_integrations.recorder import record
from weight_sync_integrations.sglang.replica import EngineSizes, build_replica, prepare_cpu, read_checkpoint

_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 128,
}
LAYOUTS = (EngineSizes(), EngineSizes(tp=2), EngineSizes(tp=2, ep=2), EngineSizes(pp=2))


def check(checkpoint: Path, family: Mapping[str, Any], sizes: EngineSizes) -> int:
    """Number of parameters in which every rank agrees. Raises WeightSyncError naming the first that does not."""
    import torch

    data = engine_yaml("sglang")
    convention = engine_convention(parse_convention(data))
    model = apply(parse_family(family), json.loads((checkpoint / "config.json").read_text()))
    dims = EngineDims(tp=sizes.tp, pp=sizes.pp, attn_dp=sizes.attn_dp, moe_ep=sizes.ep, remainder=data["remainder"])
    # SGLang fuses the indexer's projections on CUDA only.
    symbols = {} if torch.cuda.is_available() or "indexer_fused" not in convention.defaults else {"indexer_fused": 0}
    layout = resolve(model, convention, dims, "rollout", **symbols)
    computed = computed_names(model, convention, dims, "rollout", **symbols)
    tensors, count = read_checkpoint(checkpoint), 0
    for rank in range(sizes.world):
        replica = build_replica(checkpoint, rank, sizes)
        with replica.scope():
            seen = record(replica.model, tensors, replica.model.load_weights)
        unexplained = {entry["tensor"] or entry["param"]: entry["operation"] for entry in seen.inexpressible}
        agree(layout, rank, seen.shards, unexplained, computed)
        count += len(layout.rank_params(rank))
    return count


def _plain_rope(config: Mapping[str, Any]) -> bool:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return rope.get("rope_type", "default") == "default"


def main(words: Sequence[str]) -> int:
    checkpoint, family = Path(words[0]), family_yaml(words[1])
    prepare_cpu()
    import torch

    torch.set_num_threads(1)
    config = json.loads((checkpoint / "config.json").read_text())
    if not torch.cuda.is_available() and config.get("kv_lora_rank") and _plain_rope(config):
        # SGLang's CPU kernels know no other rope with latent attention. Rotary tables are no weights: nothing moves elsewhere.
        (checkpoint / "config.json").write_text(json.dumps(config | {"rope_parameters": _YARN}))
    sparse = any(config.get(key) for key in ("num_experts", "num_local_experts", "n_routed_experts"))
    report: list[dict[str, Any]] = []
    for sizes in LAYOUTS:
        if sizes.ep > 1 and not sparse:
            continue
        name = " ".join(f"{axis}{getattr(sizes, axis)}" for axis in ("tp", "pp", "ep") if getattr(sizes, axis) > 1) or "tp1"
        try:
            report.append({"layout": name, "parameters": check(checkpoint, family, sizes), "differing": []})
        except (
            WeightSyncError,
            ValueError,
            AttributeError,
            RuntimeError,
            AssertionError,
        ) as error:  # SGLang's own words are part of the report
            said = f"{type(error).__name__}: {error}"
            if key := re.search(r"Config' object has no attribute '(\w+)'", str(error)):
                said = f"the HF config has no key {key[1]!r}, which SGLang reads; add it, as the published config.json has it"
            report.append({"layout": name, "parameters": 0, "differing": [said]})
    Path(words[2]).write_text(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
