"""NVFP4 has one scale for a whole tensor, and vLLM one for a whole layer: what it fuses must share it in the checkpoint.

vLLM takes the largest (linear layers) or the first (experts) of a layer's scales for all of its weights, with a warning.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
from families_support import YARN
from nvfp4_support import fused, global_scales, mixtral, quantised
from replica_support import vllm_rank

from weight_sync.config import quant_yaml
from weight_sync.quant.scheme import load_scheme


@pytest.fixture(scope="module", autouse=True)
def plain_cpu(vllm_imported: None) -> None:
    from weight_sync_integrations.vllm import cpu

    cpu.apply()


@pytest.fixture
def no_kernels(vllm_imported: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU has none for NVFP4. The layers are never run: only their parameters and loaders count here."""
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
        compressed_tensors_moe_w4a4_nvfp4 as experts,
    )
    from vllm.model_executor.layers.quantization.compressed_tensors.schemes import compressed_tensors_w4a4_nvfp4 as linear

    kernel = SimpleNamespace(input_quant_key=lambda: None)
    monkeypatch.setattr(linear, "init_nvfp4_linear_kernel", lambda **options: kernel)
    monkeypatch.setattr(experts, "select_nvfp4_moe_backend", lambda **options: (None, None))


def test_weights_share_a_global_scale_exactly_where_vllm_fuses_them(
    checkpoints: Callable[..., Path], no_kernels: None, tmp_path: Path
) -> None:
    from weight_sync_integrations.recorder import record

    latent = checkpoints("deepseek_v3", dtype="bfloat16", num_hidden_layers=2, vocab_size=250, rope_parameters=YARN)
    found: set[frozenset[str]] = set()
    for path, names in (quantised(latent, tmp_path / "latent"), mixtral(tmp_path / "mixtral")):
        scales = dict.fromkeys(global_scales(names), ((1,), torch.float32))
        with vllm_rank(path, 1, 1, ep=False, rank=0) as replica:
            found |= fused(record(replica, scales, replica.load_weights).shards)
    assert found == {frozenset(group) for group in load_scheme("nvfp4", quant_yaml).fused}
