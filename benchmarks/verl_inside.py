"""What verl_rig.py runs inside verl's actor and engine processes, and what an engine's workers should hold afterwards.

Nothing here uses code of ours but break_next_write: weights are changed in the training engine's own modules, whole tensors are
verl's own export, live ones are read by a function run in the engine's workers, and how an engine cuts is written out by hand.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

DUMPS = "WEIGHT_SYNC_TEST_DUMPS"
DUMP = f"{__name__}.dump_for_sglang"


def role_of(worker: Any) -> Any:
    """verl's worker in a Ray actor: the actor's own object, or the one role that is fused into it."""
    return next(iter(getattr(worker, "worker_dict", {}).values()), worker)


def join_group(worker: Any) -> None:
    """verl would ask torch for "cpu:gloo,cpu:gloo" here; it takes a group that is there already."""
    import torch

    torch.distributed.init_process_group("cpu:gloo", init_method="env://", rank=worker.rank, world_size=worker.world_size)


def change(worker: Any, seed: int) -> None:
    """Other weights on this actor rank. Ranks that hold the same part of a parameter draw the same values."""
    import torch

    module = role_of(worker).actor.engine.module
    chunks = module if isinstance(module, list) else [module]
    places = _megatron_places() if isinstance(module, list) else {"": (torch.distributed.get_rank(),)}
    draw = {
        kind: torch.Generator().manual_seed(hash((seed, number, *place))) for number, (kind, place) in enumerate(places.items())
    }
    with torch.no_grad():
        for chunk in chunks:
            for name, parameter in chunk.named_parameters():  # DTensors, FSDP1's flat ones, or Megatron's
                local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
                kind = _megatron_kind(name, parameter) if isinstance(module, list) else ""
                local.copy_(torch.randn(local.shape, generator=draw[kind]) * 0.05)


def _megatron_places() -> dict[str, tuple[int, ...]]:
    """By kind of parameter, which part of it this rank holds. Data and context parallel ranks hold the same."""
    from megatron.core import parallel_state as ranks

    stage = ranks.get_pipeline_model_parallel_rank()
    experts = ranks.get_expert_model_parallel_rank(), ranks.get_expert_tensor_parallel_rank()
    return {"all": (stage,), "by tp": (stage, ranks.get_tensor_model_parallel_rank()), "by expert": (stage, *experts)}


def _megatron_kind(name: str, parameter: Any) -> str:
    if ".experts." in name:
        return "by expert"
    return "by tp" if parameter.tensor_model_parallel else "all"


def full(worker: Any) -> bytes:
    """The actors' weights as whole tensors by HF name, as a safetensors file: verl's own export. A collective.

    Of FSDP1, torch's own: verl's loads the model to a GPU first. A file, for where Megatron is imported a pickled tensor names
    a function of Megatron's, which the receiver then imports.
    """
    from safetensors.torch import save
    from torch.distributed.fsdp import FullyShardedDataParallel

    engine = role_of(worker).actor.engine
    if isinstance(engine.module, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(engine.module, writeback=False):
            named = {name: parameter.detach().clone() for name, parameter in engine.module.named_parameters()}
        return save({name.replace("_fsdp_wrapped_module.", ""): tensor for name, tensor in named.items()})
    generator, _ = engine.get_per_tensor_param()
    return save({name: tensor.detach().clone().contiguous() for name, tensor in generator})


def dump_for_vllm(worker: Any, folder: str) -> None:
    _save(worker.model_runner.get_model(), folder, worker.rank)


def dump_for_sglang(model: Any, named_tensors: Any) -> None:
    """What SGLang calls in its workers as a custom weight loader: loads nothing, writes what is there."""
    import torch

    _save(model, os.environ[DUMPS], torch.distributed.get_rank())


def _save(model: Any, folder: str, rank: int) -> None:
    from safetensors.torch import save_file

    named = {name: parameter.data.clone().contiguous() for name, parameter in model.named_parameters()}
    save_file(named, str(Path(folder) / f"rank-{rank}.safetensors"))


def sglang_paused(server: Any) -> bool:
    return server.tokenizer_manager.is_pause


def break_next_write(worker: Any) -> None:
    """The bytes arrive, then the transport says that they did not; Mooncake does that."""
    from weight_sync.errors import TransportError
    from weight_sync_integrations.verl.actor import side

    transport = side().agent._transport
    assert transport is not None
    wait = transport.wait

    def fail(ticket: Any, deadline: Any) -> None:
        wait(ticket, deadline)
        raise TransportError("cable pulled", endpoint="e", tensor="t", byte_range=(0, 1), code="injected")

    transport.wait = fail  # type: ignore[method-assign]


def cut(whole: Mapping[str, Any], kind: str, tp: int, rank: int) -> dict[str, Any]:
    """Live tensors of one of an engine's tp workers, from whole ones: q, k, v in one tensor, gate and up in another, experts
    stacked; vocabulary and heads cut by rows, what reads them by columns. For vLLM and SGLang with as many KV heads as workers
    or more; the vocabulary must be a multiple of 64. kind: of the engine, vllm or sglang."""
    import torch

    def rows(tensor: Any) -> Any:
        return tensor.chunk(tp, 0)[rank]

    result: dict[str, Any] = {}
    for name, tensor in whole.items():
        by_rows = name.endswith(("embed_tokens.weight", "lm_head.weight")) or any(
            f".{part}_proj." in name for part in ("q", "k", "v", "gate", "up")
        )
        by_columns = ".o_proj." in name or ".down_proj." in name
        result[name] = rows(tensor) if by_rows else tensor.chunk(tp, 1)[rank] if by_columns else tensor
    for first in [name for name in result if ".experts.0.gate_proj." in name]:
        begin = first.partition("0.gate_proj")[0]
        count = sum(name.startswith(begin) and ".gate_proj." in name for name in result)
        gate, up, down = (
            [result.pop(f"{begin}{expert}.{part}_proj.weight") for expert in range(count)] for part in ("gate", "up", "down")
        )
        stacked = f"{begin}routed_experts." if kind == "vllm" else begin
        result[f"{stacked}w13_weight"] = torch.stack([torch.cat(pair) for pair in zip(gate, up, strict=True)])
        result[f"{stacked}w2_weight"] = torch.stack(down)
    for first, parts, joined in (("q", "qkv", "qkv"), ("gate", ("gate", "up"), "gate_up")):
        for name in [name for name in result if f".{first}_proj." in name]:
            pieces = [result.pop(name.replace(f".{first}_proj.", f".{part}_proj.")) for part in parts]
            result[name.replace(f".{first}_proj.", f".{joined}_proj.")] = torch.cat(pieces)
    return result
