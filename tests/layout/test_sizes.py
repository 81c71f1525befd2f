"""Parallel sizes that do not divide a model: the error names the tensor, the number and the legal ones."""

from __future__ import annotations

import pytest
from layout_cases import rollout_layout, trainer_layout
from layout_naive import Engine, Mcore, Sizes

from weight_sync.errors import ParallelError

DENSE = Sizes(hidden=8, heads=4, kv_heads=2, head_dim=2, ffn=12, vocab=10)
MOE = Sizes(hidden=8, heads=4, kv_heads=2, head_dim=2, ffn=12, experts=6, expert_ffn=4)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: trainer_layout(DENSE, Mcore(8, tp=8), 8), ["mlp.gate_proj", "12 elements", "tp=8", "1, 2, 3, 4, 6, 12"]),
        (lambda: trainer_layout(DENSE, Mcore(3, tp=3), 3), ["q_proj", "16 elements", "tp=3", "1, 2, 4, 8, 16"]),
        (
            lambda: trainer_layout(DENSE, Mcore(4, tp=4), 5),
            ["rule embedding", "embed_tokens", "padded to a multiple of 5", "tp=4", "1, 2, 5, 10"],
        ),
        (lambda: trainer_layout(MOE, Mcore(4, ep=4), 1), ["rule experts_in", "6 experts", "ep=4", "[1, 2, 3, 6]"]),
        (lambda: trainer_layout(MOE, Mcore(3, etp=3), 1), ["experts", "4 elements", "etp=3", "1, 2, 4"]),
        (lambda: trainer_layout(DENSE, Mcore(3, pp=3), 1), ["2 layers", "pp * vpp = 3 * 1 = 3"]),
        (lambda: rollout_layout(DENSE, Engine(tp=3)), ["q_proj", "4 units", "attn_tp=3", "1, 2, 4"]),
        (lambda: rollout_layout(DENSE, Engine(tp=8)), ["rule gate_up", "gate_proj", "12 elements", "tp=8"]),
        (
            lambda: rollout_layout(Sizes(heads=6, kv_heads=4, ffn=6), Engine(tp=6)),
            ["k_proj", "4 units over 6 ranks", "or a multiple of 4"],
        ),
        (lambda: rollout_layout(MOE, Engine(tp=4, moe_ep=4)), ["6 experts", "moe_ep=4", "[1, 2, 3, 6]"]),
        (lambda: rollout_layout(DENSE, Engine(pp=3)), ["2 layers", "pp=3"]),
    ],
)
def test_sizes_that_do_not_divide_are_refused_with_the_legal_ones(make, words):
    with pytest.raises(ParallelError) as caught:
        make()
    for word in words:
        assert word in str(caught.value), f"{word!r} is not in: {caught.value}"
