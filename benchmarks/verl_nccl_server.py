"""The rollout's side of verl_nccl.py: live parameters as vLLM has them, the oracle, and what stands in for a server.

Their layout is written out by hand here (layout_of): verl's side loads and the oracle reads through it. Ours has it from
conf/weight_sync/engine/vllm.yaml. A mistake in either shows as wrong bytes of one side.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from verl.utils.device import get_device_name

from benchmarks.verl_nccl_weights import machine, synchronize, values
from weight_sync.layout.parallel import EngineDims
from weight_sync.session.inprocess import InProcessEngine
from weight_sync.session.target import TargetAgent
from weight_sync.transport import registry
from weight_sync_integrations.ray.trainer import gather

_FILL = -21846


def layout_of(c: Mapping[str, Any]) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[str, Any, tuple[int, ...]]]]:
    """(shape of every live parameter, HF tensor -> (parameter, index into it, shape)) of Qwen3-MoE in vLLM, one worker."""
    hidden, ffn, head = c["hidden_size"], c["moe_intermediate_size"], c["head_dim"]
    q, kv = c["num_attention_heads"] * head, c["num_key_value_heads"] * head
    params: dict[str, tuple[int, ...]] = {}
    places: dict[str, tuple[str, Any, tuple[int, ...]]] = {}

    def whole(name: str, *shape: int) -> None:
        params[name] = shape
        places[name] = name, ..., shape

    whole("model.embed_tokens.weight", c["vocab_size"], hidden)
    whole("lm_head.weight", c["vocab_size"], hidden)
    whole("model.norm.weight", hidden)
    for layer in range(c["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        whole(f"{at}.input_layernorm.weight", hidden)
        whole(f"{at}.post_attention_layernorm.weight", hidden)
        whole(f"{at}.self_attn.q_norm.weight", head)
        whole(f"{at}.self_attn.k_norm.weight", head)
        whole(f"{at}.self_attn.o_proj.weight", hidden, q)
        whole(f"{at}.mlp.gate.weight", c["num_experts"], hidden)
        qkv, rows = f"{at}.self_attn.qkv_proj.weight", 0
        params[qkv] = q + 2 * kv, hidden
        for part, count in ("q", q), ("k", kv), ("v", kv):
            places[f"{at}.self_attn.{part}_proj.weight"] = qkv, slice(rows, rows + count), (count, hidden)
            rows += count
        experts = f"{at}.mlp.experts.routed_experts"
        params[f"{experts}.w13_weight"] = c["num_experts"], 2 * ffn, hidden
        params[f"{experts}.w2_weight"] = c["num_experts"], hidden, ffn
        for e in range(c["num_experts"]):
            own = f"{at}.mlp.experts.{e}"
            places[f"{own}.gate_proj.weight"] = f"{experts}.w13_weight", (e, slice(0, ffn)), (ffn, hidden)
            places[f"{own}.up_proj.weight"] = f"{experts}.w13_weight", (e, slice(ffn, 2 * ffn)), (ffn, hidden)
            places[f"{own}.down_proj.weight"] = f"{experts}.w2_weight", e, (hidden, ffn)
    return params, places


class LiveServer:
    """STAND-IN for a rollout server and verl's adapter to it: live parameters as vLLM has them, and nothing that serves.

    As the server_adapter of verl's CheckpointEngineWorker it puts every tensor that arrives into place by one copy. Real ones
    hand tensors on to the engine's own process through another bucket, whose loader looks each name up: more work than here.
    """

    replica_rank, is_leader_rank = 0, True

    def __init__(self, model: Mapping[str, Any]) -> None:
        self._model = dict(model)
        self.last: dict[str, float] = {}

    def build(self, transport: Mapping[str, Any]) -> dict[str, Any]:
        """transport: for our side, {"name": ..., options}. Returns what it came to."""
        device = get_device_name()
        params, self._places = layout_of(self._model)
        # A tensor for each parameter, as an engine has them.
        self.params = {name: torch.zeros(shape, dtype=torch.bfloat16, device=device) for name, shape in params.items()}
        self._views = {name: self.params[param][at] for name, (param, at, _) in self._places.items()}
        wrong = [name for name, (_, _, shape) in self._places.items() if tuple(self._views[name].shape) != shape]
        held, placed = (sum(t.numel() for t in group.values()) for group in (self.params, self._views))
        if wrong or held != placed:
            raise RuntimeError(f"the layout by hand: {wrong[:4]} of other shapes; {placed} of {held} elements placed")
        options = dict(transport)
        kind = options.pop("name")
        self.agent = TargetAgent(
            rank=0,
            host="localhost",
            coords=EngineDims().coords(0),
            tensors=lambda: self.params,
            transport=lambda: registry.create(kind, **options),
        )
        return {"tensors": len(params), "bytes": 2 * held, "hf_tensors": len(self._places), **machine()}

    async def update_weights(self, weights: Any, global_steps: int | None = None, wire_format: str = "named_tensors") -> None:
        began, loading, names = time.perf_counter(), 0.0, set[str]()
        async for name, tensor in weights:
            start = time.perf_counter()
            self._views[name].copy_(tensor)
            names.add(name)
            loading += time.perf_counter() - start
        synchronize()
        if missing := sorted(self._views.keys() - names):
            raise RuntimeError(f"{len(missing)} of {len(self._views)} tensors did not arrive: {', '.join(missing[:4])}")
        self.last = {"receive": time.perf_counter() - began, "copies (host)": loading}

    def load_all(self) -> None:
        """The copies of update_weights alone, from one bucket."""
        bucket = torch.zeros(max(view.numel() for view in self._views.values()), dtype=torch.bfloat16, device=get_device_name())
        for view in self._views.values():
            view.copy_(bucket[: view.numel()].view(view.shape))
        synchronize()

    def scramble(self) -> None:
        for parameter in self.params.values():
            parameter.view(torch.int16).fill_(_FILL)
        synchronize()

    def wrong(self, version: int) -> list[str]:
        """HF tensors of which any byte in the live parameters is not this version's, "name (elements)"."""
        device = get_device_name()
        counts = torch.zeros(len(self._views), dtype=torch.int64, device=device)
        for number, (name, view) in enumerate(self._views.items()):
            counts[number] = (view.view(torch.int16) != values(name, view.numel(), version, device).view(view.shape)).sum()
        return [f"{name} ({bad})" for name, bad in zip(self._views, counts.tolist(), strict=True) if bad]


class StandInEngine(InProcessEngine):
    """STAND-IN for our adapter to a vLLM server: the double that tests use, which refuses what a server refuses, with its
    agent in the rollout's process. It has no requests to stop, no cache to empty and no HTTP in between."""

    def __init__(self, name: str, model: Mapping[str, Any]) -> None:
        import ray

        super().__init__(name, [SimpleNamespace(rank=0)], model=model, sizes=dict(EngineDims().sizes))  # type: ignore[list-item]
        self._worker = ray.get_actor(ray.get(ray.get_actor("vllm_server_0_0").worker.remote()))

    def _each(self, method: str, payloads: Mapping[int, Mapping[str, Any]], deadline: Any) -> dict[int, dict[str, Any]]:
        deadline.check(f"engine {self.name}: {method}")
        return gather({0: self._worker.__ray_call__.remote(_ask, method, dict(payloads[0]))}, deadline, method)

    def close(self) -> None:
        return


def _ask(worker: Any, method: str, payload: Mapping[str, Any]) -> dict[str, Any]:
    return worker.server_adapter.agent.call(method, payload)


def stand_in(kind: str, started: Mapping[str, Any], token: str, **beside: Any) -> StandInEngine:
    """In place of connect_engine in actor rank 0's process: there is no server to speak to."""
    from weight_sync_integrations.verl.actor import side
    from weight_sync_integrations.verl.job import served_config

    return StandInEngine(started["name"], served_config(side().engine.model_config.hf_config.to_dict(), "bfloat16"))
