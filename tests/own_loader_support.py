"""Trainer ranks that hold a checkpoint, for tests of engines that load what they receive with their own loaders."""

from __future__ import annotations

from pathlib import Path

from weight_sync.session.inprocess import ArraySource

TRAINERS = 2


def trainer_ranks(export: Path) -> list[ArraySource]:
    """Each HF tensor's rows, cut unevenly over the ranks."""
    from safetensors.torch import load_file

    tensors = load_file(export / "model.safetensors")
    ranks: list[ArraySource] = []
    for rank in range(TRAINERS):
        held, shards = {}, []
        for name, tensor in tensors.items():
            cut = -(-tensor.shape[0] // 3)
            low, high = ((0, cut), (cut, tensor.shape[0]))[rank]
            if low < high:
                held[name] = tensor[low:high].clone()
                offset = [low] + [0] * (tensor.dim() - 1)
                steps = list(held[name].stride())
                shards.append(
                    {
                        "tensor": name,
                        "offset": offset,
                        "shape": list(held[name].shape),
                        "param": name,
                        "start": 0,
                        "strides": steps,
                    }
                )
        ranks.append(ArraySource(rank, held, shards=shards))
    return ranks
