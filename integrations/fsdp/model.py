"""A real FSDP2 trainer of a Hugging Face checkpoint: build it, take optimiser steps, export it.

The counterpart of integrations/megatron/model.py for the stand-alone job and the tests. Every rank calls every method
together: they are collectives. Runs on gloo or nccl.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weight_sync.errors import ParallelError

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh


def build(
    hf_path: str | Path,
    parallel: Mapping[str, int] | None = None,
    *,
    seed: int = 0,
    learning_rate: float = 1e-2,
    dtype: str | None = None,
    compute_dtype: str | None = None,
) -> FsdpTrainer:
    """Load the checkpoint on every rank, shard it over all ranks, and make an AdamW optimiser for it.

    torch.distributed must be initialised.

    Args:
        parallel: {"dp_shard": n, "dp_replicate": m}; n * m ranks. By default everything is sharded over all ranks.
        seed: of the training data.
        dtype: of the live parameters, torch's name without prefix; the checkpoint's by default. This is what is sent.
        compute_dtype: what forward and backward cast to ("bfloat16" over float32 parameters); dtype by default.

    Raises: ParallelError for unknown axes, or sizes that do not multiply to the world.
    """
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from transformers import AutoModelForCausalLM

    world = torch.distributed.get_world_size()
    names, sizes = _mesh_of(parallel or {}, world)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(device, sizes, mesh_dim_names=names)
    model = AutoModelForCausalLM.from_pretrained(hf_path, dtype=getattr(torch, dtype) if dtype else "auto")
    policy = MixedPrecisionPolicy(
        param_dtype=getattr(torch, compute_dtype) if compute_dtype else None, reduce_dtype=torch.float32
    )
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    # foreach kernels do not take parameters of different meshes or dtypes together; a tiny model loses nothing.
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0, foreach=False)
    return FsdpTrainer(model, optimizer, mesh, seed)


def _mesh_of(parallel: Mapping[str, int], world: int) -> tuple[tuple[str, ...], tuple[int, ...]]:
    unknown = sorted(set(parallel) - {"dp_shard", "dp_replicate"})
    if unknown:
        raise ParallelError(f"no parallel axis {', '.join(unknown)}; an FSDP2 trainer has dp_shard and dp_replicate")
    replicate = int(parallel.get("dp_replicate", 1))
    shard = int(parallel.get("dp_shard", world // max(replicate, 1)))
    if replicate < 1 or shard < 1 or replicate * shard != world:
        raise ParallelError(f"dp_replicate x dp_shard = {replicate} x {shard}, but there are {world} trainer ranks")
    if replicate == 1:
        return ("dp_shard",), (shard,)
    return ("dp_replicate", "dp_shard"), (replicate, shard)


class FsdpTrainer:
    """One rank of the trainer.

    Attributes:
        model: the sharded transformers model.
        optimizer: torch's AdamW over it.
        mesh: its device mesh, with named dims.
    """

    def __init__(self, model: Any, optimizer: Any, mesh: DeviceMesh, seed: int) -> None:
        self.model = model
        self.optimizer = optimizer
        self.mesh = mesh
        self._seed = seed
        self._steps = 0

    def train_step(self, *, sequence_length: int = 32, batch: int = 2) -> float:
        """One optimiser step on random tokens. Returns the mean loss of all ranks, on every rank."""
        import torch

        rank = torch.distributed.get_rank()
        generator = torch.Generator().manual_seed((self._seed * 1_000_003 + self._steps) * 4_099 + rank)
        vocab = self.model.config.vocab_size
        tokens = torch.randint(0, vocab, (batch, sequence_length), generator=generator).to(self.mesh.device_type)
        self.model.train()
        loss = self.model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._steps += 1
        total = loss.detach().to(torch.float64)
        torch.distributed.all_reduce(total)
        return float(total) / torch.distributed.get_world_size()

    def export_hf(self, path: str | Path) -> Path:
        """Write the current weights as a complete Hugging Face checkpoint, gathered whole. Rank 0 writes.

        The oracle that a sync is checked against; all ranks return when the folder is complete.
        """
        import torch

        full = dict(self._whole())
        if torch.distributed.get_rank() == 0:
            self.model.save_pretrained(path, state_dict=full, max_shard_size="1TB")
        torch.distributed.barrier()
        return Path(path)

    def exported(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor of the Hugging Face checkpoint, whole, one after another, on every rank: weight_sync.session.exported's
        Export. A collective. Names and shapes are made by transformers' own save conversion, parameter by parameter."""
        from transformers.core_model_loading import revert_weight_conversion

        for name, tensor in self._whole():
            yield from revert_weight_conversion(self.model, {name: tensor}).items()

    def _whole(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every entry of the model's own state dict, gathered, on every rank."""
        from torch.distributed.tensor import DTensor

        once = dict(self.model.named_parameters())  # a tied weight under its first name only: transformers would
        tied = set(dict(self.model.named_parameters(remove_duplicate=False))) - set(once)  # not see that copies are tied
        for name, tensor in self.model.state_dict().items():
            if name not in tied:
                yield name, (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu()
