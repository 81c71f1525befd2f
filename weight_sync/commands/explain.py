"""python -m weight_sync explain TENSOR model.path=DIR [overrides]

Which box of a tensor goes from which trainer rank to which rollout rank, and why from that one.
"""

from __future__ import annotations

from weight_sync.commands.common import inputs_of
from weight_sync.errors import ConfigError
from weight_sync.plan.explain import explain_tensor
from weight_sync.session.inputs import layout_of


def run(words: list[str]) -> int:
    if not words or "=" in words[0]:
        raise ConfigError("explain needs the HF name of a tensor, e.g. model.layers.0.self_attn.q_proj.weight")
    tensor, inputs = words[0], inputs_of(words[1:])
    schedule = inputs.schedule()
    print(explain_tensor(schedule.plan, tensor, layout_of(inputs.source, "trainer")))
    for row in (schedule.plan.tensor == schedule.plan.catalog.ids[tensor]).nonzero()[0].tolist():
        ranks = int(schedule.plan.source_rank[row]), int(schedule.plan.target_rank[row])
        print(f"  trainer rank {ranks[0]} -> rollout rank {ranks[1]} travels {schedule.reason(row)}")
    return 0
