"""Two witnesses: the declared layout against the one recorded from the engine's own loader.

They must place every element of every HF tensor alike. They need not cut it into the same boxes: the loader may copy expert by
expert what the rules place at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from weight_sync.errors import WitnessError, listed
from weight_sync.layout.box import Box
from weight_sync.layout.table import Layout, Shard


def agree(
    declared: Layout,
    rank: int,
    recorded: Iterable[Mapping[str, Any]],
    unexplained: Mapping[str, str],
    computed: Mapping[str, str] | None = None,
) -> None:
    """Raise WitnessError, naming tensor, rank and both boxes, unless the recording of one rank equals the declared layout.

    recorded: shards as Layout.rank_to_json writes them. unexplained: HF name -> operation the recorder could not express.
    computed: HF name -> operation that the rules declare (computed_names). The loader must apply the same one, and place the
        results alike.
    """
    problems: list[str] = []
    expected = {s.tensor: computed[s.tensor] for s in declared.rank_shards(rank) if s.tensor in computed} if computed else {}
    for name in sorted(unexplained.keys() | expected.keys()):
        found = unexplained.get(name, "a plain copy")
        if name not in expected:
            problems.append(f"{name}: the loader applies {found}, which is no move of elements")
        elif found != expected[name]:
            problems.append(f"{name}: declared {expected[name]}, but the loader applies {found}")
    said: dict[tuple[str, str], list[Shard]] = {}
    for shard in declared.rank_shards(rank):
        said.setdefault((shard.param, shard.tensor), []).append(shard)
    seen: dict[tuple[str, str], list[Shard]] = {}
    for item in recorded:
        box = Box(tuple(item["offset"]), tuple(item["shape"]))
        shard = Shard(item["tensor"], box, item["param"], item["start"], tuple(item["strides"]))
        seen.setdefault((shard.param, shard.tensor), []).append(shard)
    for key in sorted(said.keys() | seen.keys()):
        param, tensor = key
        if tensor in unexplained and tensor not in expected:
            continue  # said already
        a, b = said.get(key, []), seen.get(key, [])
        if not a or not b:
            where, boxes = ("recorded", b) if not a else ("declared", a)
            problems.append(f"{tensor} -> {param}: only {where}, {listed(s.box for s in boxes)}")
        elif reason := _differ(a, b):
            problems.append(f"{tensor} -> {param}: {reason}")
    if problems:
        raise WitnessError(
            f"rollout rank {rank}: the declared layout is not what the engine's own loader does: {listed(problems)}"
        )


def agree_on_tensors(
    declared: Layout, rank: int, recorded: Iterable[Mapping[str, Any]], unexplained: Mapping[str, str]
) -> None:
    """Raise WitnessError unless one rank's loader reads exactly the HF tensors of which the declared layout gives it a part.

    For ranks that receive whole HF tensors and place them with that loader: where to, and how transposed, cast or computed, is
    its own business. recorded, unexplained: as of agree(); a key of `unexplained` that is no HF tensor is another write.
    """
    said = {shard.tensor for shard in declared.rank_shards(rank)}
    elsewhere = sorted(unexplained.keys() - declared.catalog.ids.keys())
    seen = {str(item["tensor"]) for item in recorded} | (unexplained.keys() - set(elsewhere))
    problems = [f"{name}: the loader reads it, but no part of it is declared to be here" for name in sorted(seen - said)]
    problems += [f"{name}: a part is declared to be here, but the loader reads nothing of it" for name in sorted(said - seen)]
    problems += [f"{name}: the loader applies {unexplained[name]}, which is no move of elements" for name in elsewhere]
    if problems:
        where = f"rollout rank {rank}"
        raise WitnessError(f"{where}: the declared layout is not what the engine's own loader does: {listed(problems)}")


def _differ(declared: list[Shard], recorded: list[Shard]) -> str | None:
    """Why two lists of shards of one tensor in one parameter place elements differently, or None."""
    for i, b in enumerate(recorded):
        for c in recorded[:i]:
            # Counting alone would let an element copied twice make up for one that is not copied.
            if b.box.intersect(c.box) is not None:
                return f"declared {listed(a.box for a in declared)}, recorded {c.box} and then {b.box} over it"
    for a in declared:
        covered = 0
        for b in recorded:
            common = a.box.intersect(b.box)
            if common is None:
                continue
            covered += common.volume
            for corner in (common.offset, tuple(e - 1 for e in common.end)):
                if _element(a, corner) != _element(b, corner):
                    return _both(a, b)
            if any(x != y and n > 1 for x, y, n in zip(a.strides, b.strides, common.shape, strict=True)):
                return _both(a, b)
        if covered != a.box.volume:
            return f"declared {a.box}, of which {covered} of {a.box.volume} elements were recorded"
    extra = sum(b.box.volume for b in recorded) - sum(a.box.volume for a in declared)
    if extra:
        return f"recorded {listed(b.box for b in recorded)}, {extra} elements more than declared"
    return None


def _element(shard: Shard, index: tuple[int, ...]) -> int:
    return shard.start + sum((i - o) * s for i, o, s in zip(index, shard.box.offset, shard.strides, strict=True))


def _both(a: Shard, b: Shard) -> str:
    return (
        f"declared {a.box} at element {a.start} with strides {list(a.strides)}, "
        f"recorded {b.box} at element {b.start} with strides {list(b.strides)}"
    )
