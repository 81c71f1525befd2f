"""What Megatron-Core and SGLang hold, the slow and obvious way: reshape, concatenate and slice whole tensors in numpy.

Independent of weight_sync on purpose: no rule, no box and no rank arithmetic is shared. Tensors hold element ids instead of
weights, so two arrays are equal only if every element is the right one; -1 marks padding.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[np.int64]]
Params = list[dict[str, Array]]
"""For each rank: parameter name -> element ids."""


@dataclass(frozen=True)
class Sizes:
    """A Qwen3 (experts == 0) or Qwen3-MoE model."""

    hidden: int = 8
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 2
    ffn: int = 8
    vocab: int = 10
    experts: int = 0
    expert_ffn: int = 0
    step: int = 1
    mlp_only: tuple[int, ...] = ()
    tied: bool = False

    @property
    def family(self) -> str:
        return "qwen3_moe" if self.experts else "qwen3"

    def config(self) -> dict[str, Any]:
        """As config.json would say it."""
        return {
            "architectures": ["Qwen3MoeForCausalLM" if self.experts else "Qwen3ForCausalLM"],
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.ffn,
            "vocab_size": self.vocab,
            "num_experts": self.experts,
            "moe_intermediate_size": self.expert_ffn,
            "decoder_sparse_step": self.step,
            "mlp_only_layers": list(self.mlp_only),
            "tie_word_embeddings": self.tied,
            "dtype": "bfloat16",
        }

    def sparse(self, layer: int) -> bool:
        return self.experts > 0 and layer not in self.mlp_only and (layer + 1) % self.step == 0


@dataclass
class Ids:
    """Hands out tensors of fresh element ids."""

    used: int = 0
    tensors: dict[str, Array] = field(default_factory=dict)

    def add(self, name: str, *shape: int) -> None:
        count = int(np.prod(shape))
        self.tensors[name] = np.arange(self.used, self.used + count, dtype=np.int64).reshape(shape)
        self.used += count


def hf_model(s: Sizes) -> dict[str, Array]:
    """All HF tensors of a model, in id space."""
    ids = Ids()
    ids.add("model.embed_tokens.weight", s.vocab, s.hidden)
    for layer in range(s.layers):
        at = f"model.layers.{layer}."
        ids.add(at + "input_layernorm.weight", s.hidden)
        ids.add(at + "self_attn.q_proj.weight", s.heads * s.head_dim, s.hidden)
        ids.add(at + "self_attn.k_proj.weight", s.kv_heads * s.head_dim, s.hidden)
        ids.add(at + "self_attn.v_proj.weight", s.kv_heads * s.head_dim, s.hidden)
        ids.add(at + "self_attn.q_norm.weight", s.head_dim)
        ids.add(at + "self_attn.k_norm.weight", s.head_dim)
        ids.add(at + "self_attn.o_proj.weight", s.hidden, s.heads * s.head_dim)
        ids.add(at + "post_attention_layernorm.weight", s.hidden)
        if s.sparse(layer):
            ids.add(at + "mlp.gate.weight", s.experts, s.hidden)
            for e in range(s.experts):
                ids.add(at + f"mlp.experts.{e}.gate_proj.weight", s.expert_ffn, s.hidden)
                ids.add(at + f"mlp.experts.{e}.up_proj.weight", s.expert_ffn, s.hidden)
                ids.add(at + f"mlp.experts.{e}.down_proj.weight", s.hidden, s.expert_ffn)
        else:
            ids.add(at + "mlp.gate_proj.weight", s.ffn, s.hidden)
            ids.add(at + "mlp.up_proj.weight", s.ffn, s.hidden)
            ids.add(at + "mlp.down_proj.weight", s.hidden, s.ffn)
    ids.add("model.norm.weight", s.hidden)
    if not s.tied:
        ids.add("lm_head.weight", s.vocab, s.hidden)
    return ids.tensors


def part(array: Array, axis: int, count: int, index: int) -> Array:
    return np.split(array, count, axis=axis)[index]


def padded(array: Array, multiple: int) -> Array:
    missing = -len(array) % multiple
    return np.concatenate([array, np.full((missing, *array.shape[1:]), -1, np.int64)])


@dataclass(frozen=True)
class Mcore:
    """A Megatron-Core job. virtual: layers of each virtual stage, in model order."""

    ranks: int = 1
    tp: int = 1
    cp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    etp: int = 1
    virtual: tuple[int, ...] | None = None
    pp_fastest_last: bool = True

    def coords(self, rank: int) -> dict[str, int]:
        """Megatron draws the ranks up as a grid, once for dense and once for expert parameters."""
        dp, edp = self.ranks // (self.tp * self.cp * self.pp), self.ranks // (self.etp * self.ep * self.pp)
        every = np.arange(self.ranks)
        if self.pp_fastest_last:
            pp, _, _, tp = np.argwhere(every.reshape(self.pp, dp, self.cp, self.tp) == rank)[0]
            _, _, ep, etp = np.argwhere(every.reshape(self.pp, edp, self.ep, self.etp) == rank)[0]
        else:
            _, pp, _, tp = np.argwhere(every.reshape(dp, self.pp, self.cp, self.tp) == rank)[0]
            _, _, ep, etp = np.argwhere(every.reshape(edp, self.pp, self.ep, self.etp) == rank)[0]
        return {"pp": int(pp), "tp": int(tp), "ep": int(ep), "etp": int(etp)}


def mcore_params(s: Sizes, job: Mcore, hf: dict[str, Array], vocab_multiple: int) -> Params:
    """Every trainer rank's parameters. Model chunk c of several is prefixed vp{c}."""
    counts = job.virtual or (s.layers // (job.pp * job.vpp),) * (job.pp * job.vpp)
    stages = np.split(np.arange(s.layers), np.cumsum(counts)[:-1])
    result: Params = []
    for rank in range(job.ranks):
        at = job.coords(rank)
        mine: dict[str, Array] = {}
        first, last = at["pp"] == 0, at["pp"] == job.pp - 1
        for chunk in range(job.vpp):
            prefix = f"vp{chunk}." if job.vpp > 1 else ""
            vocab = [
                ("embedding.word_embeddings.weight", "model.embed_tokens.weight", first and chunk == 0),
                ("output_layer.weight", "lm_head.weight", last and chunk == job.vpp - 1 and not s.tied),
                ("output_layer.weight", "model.embed_tokens.weight", last and chunk == job.vpp - 1 and s.tied and job.pp > 1),
            ]
            for name, source, here in vocab:
                if here:
                    mine[prefix + name] = part(padded(hf[source], vocab_multiple), 0, job.tp, at["tp"])
            if last and chunk == job.vpp - 1:
                mine[prefix + "decoder.final_layernorm.weight"] = hf["model.norm.weight"]
            for n, layer in enumerate(stages[chunk * job.pp + at["pp"]].tolist()):
                for name, array in mcore_layer(s, job, at, hf, layer).items():
                    mine[f"{prefix}decoder.layers.{n}.{name}"] = array
        result.append(mine)
    return result


def mcore_layer(s: Sizes, job: Mcore, at: dict[str, int], hf: dict[str, Array], layer: int) -> dict[str, Array]:
    def get(name: str) -> Array:
        return hf[f"model.layers.{layer}.{name}.weight"]

    tp, etp = (job.tp, at["tp"]), (job.etp, at["etp"])
    groups = [get(f"self_attn.{x}_proj").reshape(s.kv_heads, -1, s.hidden) for x in "qkv"]
    result = {
        "self_attention.linear_qkv.layer_norm_weight": get("input_layernorm"),
        "self_attention.linear_qkv.weight": part(np.concatenate(groups, axis=1).reshape(-1, s.hidden), 0, *tp),
        "self_attention.q_layernorm.weight": get("self_attn.q_norm"),
        "self_attention.k_layernorm.weight": get("self_attn.k_norm"),
        "self_attention.linear_proj.weight": part(get("self_attn.o_proj"), 1, *tp),
    }
    if not s.sparse(layer):
        halves = [part(get(f"mlp.{x}_proj"), 0, *tp) for x in ("gate", "up")]
        result["mlp.linear_fc1.layer_norm_weight"] = get("post_attention_layernorm")
        result["mlp.linear_fc1.weight"] = np.concatenate(halves)
        result["mlp.linear_fc2.weight"] = part(get("mlp.down_proj"), 1, *tp)
        return result
    result["pre_mlp_layernorm.weight"] = get("post_attention_layernorm")
    result["mlp.router.weight"] = get("mlp.gate")
    for i, e in enumerate(np.split(np.arange(s.experts), job.ep)[at["ep"]]):
        halves = [part(get(f"mlp.experts.{e}.{x}_proj"), 0, *etp) for x in ("gate", "up")]
        result[f"mlp.experts.linear_fc1.weight{i}"] = np.concatenate(halves)
        result[f"mlp.experts.linear_fc2.weight{i}"] = part(get(f"mlp.experts.{e}.down_proj"), 1, *etp)
    return result


@dataclass(frozen=True)
class Engine:
    """Engines of SGLang's kind. extra: where layers go that do not divide, as get_pp_indices of SGLang or vLLM has it."""

    tp: int = 1
    pp: int = 1
    attn_dp: int = 1
    moe_ep: int = 1
    engines: int = 1
    extra: str = "last"

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.engines

    def layers(self, count: int, stage: int) -> list[int]:
        sizes = [count // self.pp] * self.pp
        for i in range(count % self.pp):
            sizes[-i - 1 if self.extra == "last" else -i - 2] += 1
        return np.split(np.arange(count), np.cumsum(sizes)[:-1])[stage].tolist()


def engine_params(s: Sizes, e: Engine, hf: dict[str, Array]) -> Params:
    """Every rollout rank's parameters, under SGLang's names."""
    result: Params = []
    attn_tp, moe_tp = e.tp // e.attn_dp, e.tp // e.moe_ep
    for _ in range(e.engines):
        for stage in range(e.pp):
            for rank in range(e.tp):
                result.append(_worker(s, e, hf, stage, (e.tp, rank), (attn_tp, rank % attn_tp), (moe_tp, rank % moe_tp)))
    return result


Cut = tuple[int, int]


def _vocab(hf: Array, ranks: int, rank: int) -> Array:
    whole = padded(hf, 64)
    return part(whole if len(whole) % ranks == 0 else padded(hf, 64 * ranks), 0, ranks, rank)


def _worker(s: Sizes, e: Engine, hf: dict[str, Array], stage: int, tp: Cut, attn: Cut, moe: Cut) -> dict[str, Array]:
    mine: dict[str, Array] = {}
    last = stage == e.pp - 1
    if stage == 0:
        mine["model.embed_tokens.weight"] = _vocab(hf["model.embed_tokens.weight"], *attn)
    if last:
        mine["model.norm.weight"] = hf["model.norm.weight"]
    if not s.tied and (last or s.experts):
        mine["lm_head.weight"] = _vocab(hf["lm_head.weight"], *tp)
    if s.tied and last and e.pp > 1:
        mine["lm_head.weight"] = _vocab(hf["model.embed_tokens.weight"], *tp)
    local = s.experts // e.moe_ep if s.experts else 0
    for layer in e.layers(s.layers, stage):
        at = f"model.layers.{layer}."

        def get(name: str, at: str = at) -> Array:
            return hf[f"{at}{name}.weight"]

        for name in ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm"):
            mine[f"{at}{name}.weight"] = get(name)
        kv = []
        for x in "kv":
            heads = get(f"self_attn.{x}_proj").reshape(s.kv_heads, s.head_dim, s.hidden)
            if attn[0] > s.kv_heads:  # each head is held by neighbouring ranks
                heads = np.repeat(heads, attn[0] // s.kv_heads, axis=0)
            kv.append(part(heads, 0, *attn).reshape(-1, s.hidden))
        mine[at + "self_attn.qkv_proj.weight"] = np.concatenate([part(get("self_attn.q_proj"), 0, *attn), *kv])
        mine[at + "self_attn.o_proj.weight"] = part(get("self_attn.o_proj"), 1, *attn)
        if not s.sparse(layer):
            halves = [part(get(f"mlp.{x}_proj"), 0, *tp) for x in ("gate", "up")]
            mine[at + "mlp.gate_up_proj.weight"] = np.concatenate(halves)
            mine[at + "mlp.down_proj.weight"] = part(get("mlp.down_proj"), 1, *tp)
            continue
        mine[at + "mlp.gate.weight"] = get("mlp.gate")
        first = tp[1] // moe[0] * local
        w13, w2 = [], []
        for x in range(first, first + local):
            w13.append(np.concatenate([part(get(f"mlp.experts.{x}.{y}_proj"), 0, *moe) for y in ("gate", "up")]))
            w2.append(part(get(f"mlp.experts.{x}.down_proj"), 1, *moe))
        mine[at + "mlp.experts.w13_weight"] = np.stack(w13)
        mine[at + "mlp.experts.w2_weight"] = np.stack(w2)
    return mine
