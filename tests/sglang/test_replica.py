"""Replicas of every rank, and what the recorder reads off SGLang's own loaders."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from sglang_support import replay, same_bytes

from weight_sync.errors import ParallelError
from weight_sync_integrations.recorder import record
from weight_sync_integrations.sglang.replica import EngineSizes, Replica, build_replica, read_checkpoint
from weight_sync_integrations.sglang.tensors import live_aliases

Make = Callable[..., Path]

SIZES = {
    "tp1": EngineSizes(),
    "tp2": EngineSizes(tp=2),
    "tp4": EngineSizes(tp=4),  # more ranks than KV heads: they are replicated
    "tp2ep2": EngineSizes(tp=2, ep=2),
    "tp4ep2": EngineSizes(tp=4, ep=2),
    "pp2": EngineSizes(pp=2),
    "tp2pp2": EngineSizes(tp=2, pp=2),
    "attn-dp2": EngineSizes(tp=2, attn_dp=2),
}
MODELS = {
    "dense": ("qwen3", {"num_hidden_layers": 3}),
    "dense, tied, odd vocab": ("qwen3", {"num_hidden_layers": 3, "tie_word_embeddings": True, "vocab_size": 250}),
    "moe": ("qwen3_moe", {"num_hidden_layers": 3}),
}


def loaded(path: Path, rank: int, sizes: EngineSizes, tensors: dict[str, torch.Tensor]) -> Replica:
    replica = build_replica(path, rank, sizes)
    replica.load(tensors)
    return replica


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", SIZES)
def test_a_recording_of_each_rank_covers_every_parameter_once_and_its_replay_equals_load_weights(
    checkpoint: Make, name: str, model: str
) -> None:
    kind, sizes_of_model = MODELS[model]
    path = checkpoint(kind, **sizes_of_model)
    tensors = read_checkpoint(path)
    used: set[str] = set()
    for rank in range(SIZES[name].world):
        replica = loaded(path, rank, SIZES[name], tensors)
        want = {key: tensor.clone() for key, tensor in replica.tensors().items()}

        with replica.scope():
            result = record(replica.model, tensors, replica.model.load_weights)

        live = replica.tensors()
        assert all(same_bytes(live[key], want[key]) for key in want), "the recording changed live bytes"
        assert not result.inexpressible
        assert not result.uncovered
        assert not result.rewritten
        for tensor in live.values():
            tensor.fill_(3.0)
        replay(result.shards, result.constants, tensors, live)
        assert [key for key in want if not same_bytes(live[key], want[key])] == []
        used |= {shard["tensor"] for shard in result.shards}
    assert used == set(tensors)


def test_kv_heads_are_replicated_when_there_are_more_ranks_than_heads(checkpoint: Make) -> None:
    path = checkpoint("qwen3", num_hidden_layers=1)  # 4 heads and 2 KV heads of 32
    tensors = read_checkpoint(path)
    prefix = "model.layers.0.self_attn."
    q, k, v = (tensors[f"{prefix}{x}_proj.weight"] for x in "qkv")
    for rank in range(4):
        fused = loaded(path, rank, EngineSizes(tp=4), tensors).tensors()[f"{prefix}qkv_proj.weight"]
        head = rank // 2 * 32
        expected = torch.cat([q[rank * 32 : rank * 32 + 32], k[head : head + 32], v[head : head + 32]])
        assert same_bytes(fused, expected)


def test_a_remainder_of_layers_goes_to_the_last_stages_and_embeddings_to_the_ends(checkpoint: Make) -> None:
    path = checkpoint("qwen3", num_hidden_layers=3)
    first, last = (set(build_replica(path, rank, EngineSizes(pp=2)).tensors()) for rank in range(2))

    assert {name.split(".")[2] for name in first if ".layers." in name} == {"0"}
    assert {name.split(".")[2] for name in last if ".layers." in name} == {"1", "2"}
    assert {name for name in first if ".layers." not in name} == {"model.embed_tokens.weight"}
    assert {name for name in last if ".layers." not in name} == {"model.norm.weight", "lm_head.weight"}


def test_qwen3_moe_has_its_head_on_every_stage(checkpoint: Make) -> None:
    path = checkpoint("qwen3_moe", num_hidden_layers=2)

    assert all("lm_head.weight" in build_replica(path, rank, EngineSizes(pp=2)).tensors() for rank in range(2))


def test_experts_are_stacked_in_order_of_their_global_index_and_gate_comes_before_up(checkpoint: Make) -> None:
    path = checkpoint("qwen3_moe", num_hidden_layers=1)
    tensors = read_checkpoint(path)
    prefix = "model.layers.0.mlp.experts."
    live = loaded(path, 1, EngineSizes(tp=2, ep=2), tensors).tensors()
    for local, expert in enumerate(range(4, 8)):
        gate, up = (tensors[f"{prefix}{expert}.{part}_proj.weight"] for part in ("gate", "up"))
        assert same_bytes(live[f"{prefix}w13_weight"][local], torch.cat([gate, up]))
        assert same_bytes(live[f"{prefix}w2_weight"][local], tensors[f"{prefix}{expert}.down_proj.weight"])


def test_tied_weights_are_listed_once_with_their_other_name_as_an_alias(checkpoint: Make) -> None:
    replica = build_replica(checkpoint("qwen3", num_hidden_layers=1, tie_word_embeddings=True), 0)

    assert "lm_head.weight" not in replica.tensors()
    assert live_aliases([("target", replica.model)]) == {"model.embed_tokens.weight": ["lm_head.weight"]}


def test_a_draft_model_has_names_of_its_own_and_shares_no_name_with_its_target(checkpoint: Make) -> None:
    from weight_sync_integrations.sglang.tensors import live_tensors

    target, draft = (build_replica(checkpoint("qwen3", num_hidden_layers=1), 0).model for _ in range(2))
    draft.model.embed_tokens = target.model.embed_tokens  # as speculative decoding shares it

    names = live_tensors([("target", target), ("draft", draft)])

    assert "draft.model.norm.weight" in names
    assert "draft.model.embed_tokens.weight" not in names
    assert live_aliases([("target", target), ("draft", draft)]) == {
        "model.embed_tokens.weight": ["draft.model.embed_tokens.weight"]
    }


def test_buffers_that_no_checkpoint_holds_are_not_listed(checkpoint: Make) -> None:
    replica = build_replica(checkpoint("qwen3", num_hidden_layers=1), 0)

    assert any("cos_sin_cache" in name for name, _ in replica.model.named_buffers())
    assert not any("cos_sin_cache" in name for name in replica.tensors())


def test_sizes_that_do_not_divide_and_ranks_that_do_not_exist_are_refused_with_what_would_be_legal(
    checkpoint: Make,
) -> None:
    with pytest.raises(ParallelError, match=r"ep=3 does not divide tp=4; legal: \[1, 2, 4\]"):
        EngineSizes(tp=4, ep=3)
    with pytest.raises(ParallelError, match="rank 2 is not one of the 2 ranks"):
        build_replica(checkpoint("qwen3", num_hidden_layers=1), 2, EngineSizes(tp=2))
