"""A tiny model in a few parallel layouts, and what every byte of it must be on every rank: plain numpy, no layout, no plan.

The session plans from FAMILY and ENGINE as it does from shipped YAML. What must arrive is computed here a second time, by hand.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weight_sync.delta.spec import DeltaSpec
from weight_sync.plan.schedule import Budget, CostModel
from weight_sync.session.connect import SyncSpec
from weight_sync.session.inputs import Declared

Words = NDArray[np.uint16]
Values = dict[str, Words]
"""HF name -> bfloat16 values as 16-bit words: nothing here calculates with them."""

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB = 4, 4, 2, 2, 16, 10
CONFIG = {
    "architectures": ["DrillForCausalLM"], "hidden_size": HIDDEN, "num_hidden_layers": 1, "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "intermediate_size": FFN, "vocab_size": VOCAB, "dtype": "bfloat16",
}  # fmt: skip
EMBED, Q, K, V = "embed.weight", "layers.0.q.weight", "layers.0.k.weight", "layers.0.v.weight"
GATE, UP, DOWN, NORM = "layers.0.gate.weight", "layers.0.up.weight", "layers.0.down.weight", "norm.weight"
SHAPES: dict[str, tuple[int, ...]] = {
    EMBED: (VOCAB, HIDDEN), Q: (HEADS * HEAD_DIM, HIDDEN), K: (KV_HEADS * HEAD_DIM, HIDDEN), V: (KV_HEADS * HEAD_DIM, HIDDEN),
    GATE: (FFN, HIDDEN), UP: (FFN, HIDDEN), DOWN: (HIDDEN, FFN), NORM: (HIDDEN,),
}  # fmt: skip
FAMILY: dict[str, Any] = {
    "name": "drill",
    "architectures": ["DrillForCausalLM"],
    "config": {
        "hidden": "hidden_size", "layers": "num_hidden_layers", "heads": "num_attention_heads",
        "kv_heads": "num_key_value_heads", "head_dim": "head_dim", "ffn": "intermediate_size", "vocab": "vocab_size",
    },
    "tensors": {
        "embed.weight": {"shape": ["vocab", "hidden"]},
        "layers.{l}.q.weight": {"shape": ["heads * head_dim", "hidden"]},
        "layers.{l}.k.weight": {"shape": ["kv_heads * head_dim", "hidden"]},
        "layers.{l}.v.weight": {"shape": ["kv_heads * head_dim", "hidden"]},
        "layers.{l}.gate.weight": {"shape": ["ffn", "hidden"]},
        "layers.{l}.up.weight": {"shape": ["ffn", "hidden"]},
        "layers.{l}.down.weight": {"shape": ["hidden", "ffn"]},
        "norm.weight": {"shape": ["hidden"]},
    },
    "mcore": {
        "embedding": {
            "rule": "pad", "hf": "embed.weight", "param": "embedding", "multiple": "vocab_multiple", "place": {"tp": "split 0"},
        },
        "qkv": {
            "rule": "qkv", "q": "layers.{l}.q.weight", "k": "layers.{l}.k.weight", "v": "layers.{l}.v.weight",
            "param": "layers.{n}.linear_qkv", "groups": "kv_heads", "head_dim": "head_dim", "place": {"tp": "split 0"},
        },
        "mlp_in": {
            "rule": "concat", "parts": ["layers.{l}.gate.weight", "layers.{l}.up.weight"], "param": "layers.{n}.fc1",
            "place": {"tp": "split 0"},
        },
        "mlp_out": {"rule": "rename", "hf": "layers.{l}.down.weight", "param": "layers.{n}.fc2", "place": {"tp": "split 1"}},
        "norm": {"rule": "rename", "hf": "norm.weight", "param": "final_norm"},
    },
}  # fmt: skip
ENGINE: dict[str, Any] = {
    "name": "drill",
    "rules": {
        "embedding": {
            "rule": "pad", "hf": "embed.weight", "param": "embed.weight", "multiple": "8", "place": {"attn_tp": "split 0"},
        },
        "qkv": {
            "rule": "concat", "param": "layers.{l}.qkv.weight", "place": {"attn_tp": "split 0"},
            "parts": [
                {"hf": "layers.{l}.q.weight", "units": "heads"}, {"hf": "layers.{l}.k.weight", "units": "kv_heads"},
                {"hf": "layers.{l}.v.weight", "units": "kv_heads"},
            ],
        },
        "mlp_in": {
            "rule": "concat", "param": "layers.{l}.gate_up.weight", "place": {"tp": "split 0"},
            "parts": ["layers.{l}.gate.weight", "layers.{l}.up.weight"],
        },
        "mlp_out": {
            "rule": "rename", "hf": "layers.{l}.down.weight", "param": "layers.{l}.down.weight", "place": {"tp": "split 1"},
        },
        "norm": {"rule": "rename", "hf": "norm.weight", "param": "norm.weight"},
    },
}  # fmt: skip
TRAINER_ROWS = 16
"""Rows of the trainer's padded embedding."""
ENGINE_ROWS = 16


@dataclass(frozen=True, slots=True)
class Case:
    """trainer: tp and dp. engines of tp workers each. costs, budget: decide what is written directly, packed and unpacked."""

    name: str
    tp: int
    dp: int
    engines: int
    engine_tp: int
    costs: CostModel
    budget: Budget

    @property
    def ranks(self) -> int:
        return self.tp * self.dp

    def spec(self, engines: int | None = None, deltas: bool = False) -> SyncSpec:
        """engines: how many there are now, if not those that the case begins with. deltas: syncs send what changed."""
        trainer = Declared(FAMILY, CONFIG, {"ranks": self.ranks, "tp": self.tp}, None, {"vocab_multiple": TRAINER_ROWS})
        rollout = Declared(FAMILY, CONFIG, {"tp": self.engine_tp, "engines": engines or self.engines}, ENGINE)
        delta = DeltaSpec(max_share=1.0, staging=1024) if deltas else None  # several messages, and rounds
        return SyncSpec(trainer, rollout, witness=False, costs=self.costs, budget=self.budget, delta=delta)


_DIRECT, _STAGED = CostModel(seconds_per_write=0.0), CostModel(seconds_per_write=1.0)
_ROOMY, _TIGHT = Budget(1 << 16, 1 << 16), Budget(64, 64)
CASES = (
    Case("direct", 2, 1, 2, 1, _DIRECT, _ROOMY),
    Case("packed", 1, 2, 1, 2, _STAGED, _TIGHT),
    Case("unpacked", 2, 1, 2, 1, _STAGED, _TIGHT),
    Case("pairs", 2, 1, 2, 2, _STAGED, _ROOMY),
)
"""direct: tp2 into two engines of one worker. packed: two data-parallel copies into one engine of two workers, through a small
buffer at the source that is used again and again. unpacked: like direct, in rounds through a small buffer at the destination.
pairs: tp2 into two engines of two workers."""


def new_values(draw: np.random.Generator) -> Values:
    """What an optimiser step leaves: other bytes everywhere."""
    return {name: draw.integers(0, 1 << 16, shape, np.uint16) for name, shape in SHAPES.items()}


def few_new_values(draw: np.random.Generator, before: Values) -> Values:
    """What an optimiser step leaves that changes little: one element in some of the tensors, which are tiny."""
    result = {name: words.copy() for name, words in before.items()}
    for words in result.values():
        if draw.random() < 0.4:
            words.reshape(-1)[draw.integers(words.size)] ^= draw.integers(1, 1 << 16, dtype=np.uint16)
    return result


def _rows(array: Words, part: int, parts: int) -> Words:
    each = len(array) // parts
    return array[part * each : (part + 1) * each]


def _padded(array: Words, rows: int, part: int, parts: int, blank: Words) -> Words:
    """This rank's rows of a padded embedding; padding stays what it was (`blank`)."""
    each = rows // parts
    result = blank.copy()
    mine = array[part * each : (part + 1) * each]
    result[: len(mine)] = mine
    return result


def trainer_params(values: Values, tp: int, tp_rank: int, blank: Mapping[str, Words]) -> Values:
    """A trainer rank's parameters: query heads, key and value heads interleaved by group, gate over up."""
    groups = [
        np.concatenate([_rows(values[Q], g, KV_HEADS), _rows(values[K], g, KV_HEADS), _rows(values[V], g, KV_HEADS)])
        for g in range(tp_rank * KV_HEADS // tp, (tp_rank + 1) * KV_HEADS // tp)
    ]
    columns = FFN // tp
    return {
        "embedding": _padded(values[EMBED], TRAINER_ROWS, tp_rank, tp, blank["embedding"]),
        "layers.0.linear_qkv": np.concatenate(groups),
        "layers.0.fc1": np.concatenate([_rows(values[GATE], tp_rank, tp), _rows(values[UP], tp_rank, tp)]),
        "layers.0.fc2": values[DOWN][:, tp_rank * columns : (tp_rank + 1) * columns],
        "final_norm": values[NORM],
    }


def trainer_shapes(tp: int) -> dict[str, tuple[int, ...]]:
    return {
        "embedding": (TRAINER_ROWS // tp, HIDDEN),
        "layers.0.linear_qkv": ((HEADS + 2 * KV_HEADS) * HEAD_DIM // tp, HIDDEN),
        "layers.0.fc1": (2 * FFN // tp, HIDDEN),
        "layers.0.fc2": (HIDDEN, FFN // tp),
        "final_norm": (HIDDEN,),
    }


def engine_params(values: Values, tp: int, tp_rank: int, blank: Mapping[str, Words]) -> Values:
    """An engine worker's live parameters: all query heads, then keys, then values."""
    columns = FFN // tp
    return {
        "embed.weight": _padded(values[EMBED], ENGINE_ROWS, tp_rank, tp, blank["embed.weight"]),
        "layers.0.qkv.weight": np.concatenate([_rows(values[n], tp_rank, tp) for n in (Q, K, V)]),
        "layers.0.gate_up.weight": np.concatenate([_rows(values[n], tp_rank, tp) for n in (GATE, UP)]),
        "layers.0.down.weight": values[DOWN][:, tp_rank * columns : (tp_rank + 1) * columns],
        "norm.weight": values[NORM],
    }


def engine_shapes(tp: int) -> dict[str, tuple[int, ...]]:
    return {
        "embed.weight": (ENGINE_ROWS // tp, HIDDEN),
        "layers.0.qkv.weight": ((HEADS + 2 * KV_HEADS) * HEAD_DIM // tp, HIDDEN),
        "layers.0.gate_up.weight": (2 * FFN // tp, HIDDEN),
        "layers.0.down.weight": (HIDDEN, FFN // tp),
        "norm.weight": (HIDDEN,),
    }


def derived(live: Mapping[str, Words]) -> dict[str, Words]:
    """What an engine makes of its live parameters after loading, and computes with: permuted, quantised, padded, fused.

    The rest (embed.weight) it computes with as it is.
    """
    gate_up, down = live["layers.0.gate_up.weight"], live["layers.0.down.weight"]
    padded = np.zeros((len(gate_up) + 3, gate_up.shape[1] + 2), np.uint16)
    padded[: len(gate_up), : gate_up.shape[1]] = gate_up
    return {
        "qkv, permuted": np.ascontiguousarray(live["layers.0.qkv.weight"].T[::-1]),
        "gate_up, padded": padded,
        "down, quantised": (down >> 8).astype(np.uint16),
        "down, scale": down.max(axis=1),
        "norm and gate, fused": gate_up ^ live["norm.weight"],
    }
