"""Recording an engine that runs a draft model beside its target, whose parameters go by the name of its role."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from weight_sync_integrations.recorder import Recording, Spec, record

if TYPE_CHECKING:
    import torch


def record_roles(
    models: Iterable[tuple[str, torch.nn.Module]],
    tensors: Mapping[str, Spec],
    load: Callable[[torch.nn.Module], Callable[[Any], object]],
) -> Recording:
    """Record every model's load_weights on the same HF tensors. load(model): what feeds that model.

    What a draft shares with the target is the target's: copies into it are left out of the draft's part.
    """
    total = Recording()
    places: set[int] = set()
    for i, (role, model) in enumerate(models):
        one = record(model, tensors, load(model))
        mine = {name: p.data_ptr() for name, p in [*model.named_parameters(), *model.named_buffers()]}
        shared = {name for name, place in mine.items() if place in places}
        places |= set(mine.values())
        prefix = "" if role == "target" else f"{role}."
        for ours, theirs in ((total.shards, one.shards), (total.constants, one.constants)):
            ours += [entry | {"param": prefix + entry["param"]} for entry in theirs if entry["param"] not in shared]
        total.inexpressible += [
            entry | {"param": entry["param"] and prefix + entry["param"]}
            for entry in one.inexpressible
            if entry["param"] not in shared
        ]
        total.uncovered |= {prefix + name: n for name, n in one.uncovered.items() if name not in shared}
        total.rewritten |= {prefix + name: n for name, n in one.rewritten.items() if name not in shared}
        total.derived += [prefix + name for name in one.derived if name not in shared]
        total.unread = [name for name in one.unread if i == 0 or name in total.unread]
    return total
