"""NVFP4 has one scale for a whole tensor, and SGLang one for a whole layer: what it fuses must share it in the checkpoint."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from families_support import YARN
from nvfp4_support import fused, global_scales, mixtral, quantised

from weight_sync.config import quant_yaml
from weight_sync.quant.scheme import load_scheme
from weight_sync_integrations.recorder import record
from weight_sync_integrations.sglang.replica import EngineSizes, as_on_a_gpu, build_replica
from weight_sync_integrations.sglang.tensors import loader

LATENT = "model.layers.0.self_attn.{}_global_scale"


def test_weights_share_a_global_scale_exactly_where_sglang_fuses_them(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    latent = checkpoint("deepseek_v3", num_hidden_layers=2, vocab_size=250, rope_parameters=YARN)
    found: set[frozenset[str]] = set()
    read: set[str] = set()
    for path, names in (quantised(latent, tmp_path / "latent"), mixtral(tmp_path / "mixtral")):
        # Scalars: of the two latent projections SGLang 0.5.23 loads no scales of shape [1] at all (it joins them to [2]).
        scales = dict.fromkeys(global_scales(names), ((), torch.float32))
        replica = build_replica(path, 0, EngineSizes())
        with replica.scope(), as_on_a_gpu():
            shards = record(replica.model, scales, loader(replica.model)).shards
        found |= fused(shards)
        read |= {shard["tensor"] for shard in shards}
    first, second = ("q_a_proj", "kv_a_proj_with_mqa")
    assert LATENT.format(f"{first}.weight") in read
    assert LATENT.format(f"{second}.weight") not in read  # the first one's is taken for both
    assert found | {frozenset((first, second))} == {frozenset(group) for group in load_scheme("nvfp4", quant_yaml).fused}
