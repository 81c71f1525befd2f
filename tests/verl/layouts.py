"""Layouts beside those of test_update_weights.py, each a job of its own: three calls of verl's manager, the second failing.

Chosen by name only, since every job takes about a minute: tests/run.sh verl-layouts. Expected weights are verl's own export of
whole tensors (of FSDP1 torch's, for verl's needs a GPU), cut as the engine cuts them by hand (benchmarks/verl_inside.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import ray

from benchmarks.verl_inside import break_next_write
from benchmarks.verl_rig import cpu_overrides, make_model, rollouts, started

KIND = rollouts()[0]
pytestmark = pytest.mark.timeout(900)


@dataclass(frozen=True)
class Case:
    """kind: of the model. actor: strategy of two ranks. sizes: of Megatron's parallelism, by verl's keys without
    _parallel_size. more: other keys of actor.megatron. tp: of the engine."""

    name: str
    actor: str
    kind: str = "qwen3"
    sizes: dict[str, int] = field(default_factory=dict)
    more: dict[str, Any] = field(default_factory=dict)
    tp: int = 1
    layers: int = 2


UNEVEN = {"+override_transformer_config.num_layers_in_first_pipeline_stage": 1}
CASES = {
    "vllm": [
        Case("fsdp1", "fsdp"),
        Case("fsdp2-tp2", "fsdp2", tp=2),
        Case("megatron-pp2-tp2", "megatron", sizes={"pipeline_model": 2}, more=UNEVEN, layers=3, tp=2),
        Case("megatron-vpp2", "megatron", sizes={"pipeline_model": 2, "virtual_pipeline_model": 2}, layers=4),
        Case("megatron-cp2", "megatron", sizes={"context": 2}),
    ],
    "sglang": [
        Case("fsdp2", "fsdp2"),
        Case("fsdp1-tp2", "fsdp", tp=2),
        Case("megatron-pp2-tp2", "megatron", sizes={"pipeline_model": 2}, more=UNEVEN, layers=3, tp=2),
    ],
}[KIND]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.name}-to-{KIND}")
def test_three_syncs_are_bit_equal_and_the_second_that_fails_changes_no_version(case: Case, tmp_path: Path) -> None:
    model = make_model(tmp_path, kind=case.kind, num_hidden_layers=case.layers)
    overrides = ["+weight_sync=p2p_tcp", *cpu_overrides(model, dtype="bfloat16", actor=case.actor, kind=KIND, tp=case.tp)]
    keys = {f"{name}_parallel_size": size for name, size in case.sizes.items()} | case.more
    for key, value in keys.items():
        overrides.append(f"{'+' * key.startswith('+')}actor_rollout_ref.actor.megatron.{key.lstrip('+')}={value}")
    with started(overrides) as rig:
        rig.change(1)
        metrics = rig.manager.update_weights(1)
        assert rig.differing() == []
        assert (metrics["weight_sync/version"], metrics["weight_sync/gathered_bytes"]) == (1, 0)
        ray.get(rig.actors.workers[0].__ray_call__.remote(break_next_write), timeout=120)
        rig.change(2)
        with pytest.raises(ray.exceptions.RayTaskError, match="cable pulled"):
            rig.manager.update_weights(2)
        assert rig.paused()
        assert rig.version() == "1"
        rig.change(3)
        assert rig.manager.update_weights(3)["weight_sync/version"] == 3
        assert rig.differing() == []
        assert not rig.paused()
        assert rig.generate(range(3, 60), 2).extra_fields["global_steps"] == 3
