"""benchmarks/verl_nccl.py on CPUs: verl's nccl engine over stand-ins for NCCL and cupy beside ours, and the oracle of both."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch

from benchmarks.verl_nccl_rig import ROOT, TINY
from benchmarks.verl_nccl_server import LiveServer, layout_of
from benchmarks.verl_nccl_weights import values

SIZES = {**TINY, "num_hidden_layers": 1}


@pytest.fixture
def server() -> LiveServer:
    """With version 1 of the weights in it, put there as verl's side does."""
    made = LiveServer(SIZES)
    made.build({"name": "memory"})
    for name, view in made._views.items():
        view.copy_(values(name, view.numel(), 1, "cpu").view(torch.bfloat16).view(view.shape))
    return made


def test_the_oracle_takes_the_version_that_is_there_and_no_other(server: LiveServer) -> None:
    assert server.wrong(1) == []
    assert len(server.wrong(2)) == len(server._places)
    server.scramble()
    assert len(server.wrong(1)) == len(server._places)


def test_the_oracle_names_a_tensor_with_one_wrong_element(server: LiveServer) -> None:
    ffn = SIZES["moe_intermediate_size"]
    experts = server.params["model.layers.0.mlp.experts.routed_experts.w13_weight"]
    experts.view(torch.int16)[3, ffn, 0] ^= 1  # the first row of the second half: expert 3's up projection
    assert server.wrong(1) == ["model.layers.0.mlp.experts.3.up_proj.weight (1)"]


def test_weights_differ_by_version_name_and_place_and_are_finite() -> None:
    one = values("a", 1 << 16, 1, "cpu")
    assert one.view(torch.bfloat16).isfinite().all()
    assert one.unique().numel() > 1 << 14  # of the 2**15 that there are
    for other in (values("a", 1 << 16, 2, "cpu"), values("b", 1 << 16, 1, "cpu"), one.roll(1)):
        assert (one == other).float().mean() < 0.001


def test_a_tensor_that_did_not_arrive_is_named(server: LiveServer) -> None:
    async def all_but_one() -> AsyncIterator[tuple[str, torch.Tensor]]:
        for name, view in list(server._views.items())[1:]:
            yield name, view.clone()

    with pytest.raises(RuntimeError, match=r"1 of 36 tensors did not arrive: model\.embed_tokens\.weight"):
        asyncio.run(server.update_weights(all_but_one()))


@pytest.mark.timeout(240)
def test_both_backends_bring_every_byte_through_verls_own_manager(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    # A bucket of 1 MiB: several of them, and tensors that are cut. A process of its own: its verl has other stand-ins.
    words = ["--device", "cpu", "--layers", "1", "--rounds", "1", "--bucket", "1", "--json", str(out)]
    # Not what the rigs of this process have set for theirs.
    own = {name: value for name, value in os.environ.items() if not name.startswith(("VERL_", "RAY_", "VLLM_", "SGLANG_"))}
    command = [sys.executable, str(ROOT / "benchmarks/verl_nccl.py"), *words]
    done = subprocess.run(command, env=own, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.partition(":")[2].split()[0] for line in done.stdout.splitlines() if line.endswith("as it should be")]
    assert lines == ["verl", "ours", "verl", "ours"]
    result = json.loads(out.read_text())
    assert {kind: len(seconds) for kind, seconds in result["seconds"].items()} == {"limit": 0, "verl": 1, "ours": 1}
    whole = sum(torch.Size(shape).numel() for shape in layout_of(SIZES)[0].values())
    assert result["facts"]["trainer"]["bytes"] == result["facts"]["rollout"]["bytes"] == 2 * whole
