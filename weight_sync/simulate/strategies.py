"""Two strategies of other systems, for comparison on the same cluster: `replica` and `broadcast`.

Both first gather: every rank of a pipeline stage gets that stage's full tensors, bucket by bucket, by all-gather over tensor
and expert ranks, and turns them into HF tensors. Then

    broadcast   one rank of each stage broadcasts the bucket to every rollout rank, each of which takes its part out of it
                with the engine's loader. Stages share a lock; one that finds it taken sleeps for `poll` and tries again.
    replica     every rank of a stage stands for some rollout ranks (gather_rank_map). It loads the bucket into a copy of
                such a rank's shard in host memory and writes that with RDMA to this rank of every engine. Distinct rollout
                ranks are served one after another; the writes of the last one go on meanwhile.

This is what the code of github.com/radixark/miles does (backends/megatron_utils/update_weight: update_weight_p2p.py and
update_weight_from_distributed/broadcast.py), read to the point where its seconds go; `poll` is its constant.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from weight_sync.errors import ConfigError
from weight_sync.ids import ITEMSIZE
from weight_sync.layout.parallel import EngineDims, TrainerDims, gather_rank_map
from weight_sync.plan.plan import Plan
from weight_sync.simulate.cluster import Cluster, Collective
from weight_sync.simulate.fluid import Floats, Ints, summed

BUCKET = float(1 << 30)
"""Bytes of a bucket, as in the published runs."""


@dataclass(frozen=True, slots=True)
class Gathered:
    """What gathering strategies need of a plan.

    stage_bytes, stage_tensors [stages]: full HF tensors of each pipeline stage, in the trainer's dtype.
    served [kinds of trainer ranks, 4]: stage, bytes loaded into replicas, bytes written while the rank waits for that, bytes
    written meanwhile.
    """

    trainer: TrainerDims
    rollout: EngineDims
    stage_bytes: Floats
    stage_tensors: Ints
    served: Floats


@dataclass(frozen=True, slots=True)
class Estimate:
    """seconds, and what they are made of: on the slowest trainer rank (replica), or one after another (broadcast)."""

    seconds: float
    parts: Mapping[str, float]


def gathered(plan: Plan, trainer: TrainerDims, rollout: EngineDims) -> Gathered:
    """Add up a plan to all engines of `rollout`, or to the first of them (the others are its copies).

    Raises ConfigError when the dims are not those of the plan.
    """
    width = rollout.engine_world
    if trainer.world != plan.source_world or plan.target_world not in (width, rollout.world):
        raise ConfigError(
            f"the plan has {plan.source_world} + {plan.target_world} ranks, the dims given {trainer.world} + {rollout.world}"
        )
    stage = np.asarray([trainer.coords(rank)["pp"] for rank in range(trainer.world)])[plan.source_rank]
    first = plan.target_rank < width
    cell = stage[first] * width + plan.target_rank[first]
    tensors, index = np.unique(plan.tensor, return_index=True)
    itemsize = np.asarray([ITEMSIZE[p.dtype] for p in plan.source_params])[plan.source[index]]
    nbytes = plan.catalog.shapes[tensors].prod(axis=1) * itemsize
    return Gathered(
        trainer,
        rollout,
        summed(stage[index], nbytes, trainer.pp),
        np.bincount(stage[index], minlength=trainer.pp),
        _served(summed(cell, plan.nbytes[first], trainer.pp * width).reshape(trainer.pp, width), trainer, rollout),
    )


def _served(part: Floats, trainer: TrainerDims, rollout: EngineDims) -> Floats:
    """Gathered.served. part [stages, ranks of an engine]: bytes of a stage that a rollout rank needs."""
    rows: set[tuple[float, ...]] = set()
    for rank, targets in gather_rank_map(trainer, rollout).items():
        stage = trainer.coords(rank)["pp"]
        engine_ranks = [target % rollout.engine_world for target in targets]
        distinct = sorted(set(engine_ranks))
        # Writes of the last distinct rank hide behind the gathering and loading of the next bucket.
        meanwhile = sum(float(part[stage, r]) for r in engine_ranks if r == distinct[-1])
        written = sum(float(part[stage, r]) for r in engine_ranks)
        rows.add((stage, sum(float(part[stage, r]) for r in distinct), written - meanwhile, meanwhile))
    return np.array(sorted(rows))


def gather_seconds(g: Gathered, cluster: Cluster) -> Floats:
    """Of each stage: a ring all-gather over its ranks; what one node lacks comes in over its cards."""
    ranks = max(g.trainer.tp, g.trainer.ep * g.trainer.etp)
    nodes = -(-ranks // cluster.gpus_per_node)
    seconds = g.stage_bytes * (1 - 1 / ranks) / cluster.local.rate
    if nodes > 1 and cluster.nic is not None:
        seconds = np.maximum(seconds, g.stage_bytes * (1 - 1 / nodes) / (cluster.nic.rate * cluster.nic.per_node))
    return seconds / _collective(cluster).gather


def replica(g: Gathered, cluster: Cluster, *, bytes_ratio: float = 1.0, post: float = 0.0) -> Estimate:
    """Gather, replica in host memory, RDMA writes. bytes_ratio: of what is sent to what is gathered (quantised on the way).

    post: seconds of what the engine does afterwards, where it is known.
    """
    c = _collective(cluster)
    wire = cluster.nic.rate * cluster.nic.per_node / cluster.gpus_per_node if cluster.nic else cluster.local.rate
    stage, loaded, waited, meanwhile = g.served.T
    gather = gather_seconds(g, cluster)[stage.astype(np.int64)]
    load, write = loaded * bytes_ratio / c.host, waited * bytes_ratio / wire
    write = write + np.maximum(0.0, meanwhile * bytes_ratio / wire - gather - load - write)  # the wire is the limit after all
    slowest = int(np.argmax(gather + load + write))
    parts = {name: float(x[slowest]) for name, x in (("gather", gather), ("load", load), ("write", write))}
    parts |= {"fixed": c.fixed, "post": post}
    return Estimate(sum(parts.values()), parts)


def broadcast(g: Gathered, cluster: Cluster, *, bytes_ratio: float = 1.0, tensor_ratio: float = 1.0) -> Estimate:
    """Gather, broadcast to all under one lock, load. bytes_ratio, tensor_ratio: of what is sent to what is gathered."""
    c = _collective(cluster)
    buckets = np.maximum(np.ceil(g.stage_bytes * bytes_ratio / BUCKET), 1)
    wire = g.stage_bytes * bytes_ratio / c.bus
    load = g.stage_tensors * tensor_ratio * c.tensor
    call = buckets * c.call * g.rollout.world
    hold = (wire + load + call) / buckets
    seconds = locked_seconds(
        buckets.astype(np.int64).tolist(), (gather_seconds(g, cluster) / buckets).tolist(), hold.tolist(), c.poll
    )
    parts = {"broadcast": float(wire.sum()), "tensors": float(load.sum()), "calls": float(call.sum()), "fixed": c.fixed}
    waiting = seconds + c.fixed - sum(parts.values())
    return Estimate(seconds + c.fixed, {**parts, "gather and lock": waiting})


def locked_seconds(buckets: list[int], prepare: list[float], hold: list[float], poll: float) -> float:
    """Seconds until all stages have sent their buckets under one lock, event by event.

    A stage prepares a bucket, then tries the lock, and every `poll` seconds again while it is taken. Stages start spread over
    one poll, as real ones are out of step.
    """
    stages = len(buckets)
    queue = [(prepare[s] + poll * s / stages, s) for s in range(stages)]
    heapq.heapify(queue)
    left, free = list(buckets), 0.0
    while queue:
        now, stage = heapq.heappop(queue)
        if now < free:
            tries = int((free - now) / poll) + 1
            heapq.heappush(queue, (now + tries * poll, stage))
            continue
        free = now + hold[stage]
        left[stage] -= 1
        if left[stage]:
            heapq.heappush(queue, (free + prepare[stage], stage))
    return free


def _collective(cluster: Cluster) -> Collective:
    if cluster.collective is None:
        raise ConfigError(f"cluster {cluster.name} has no `collective` block: replica and broadcast cannot be simulated on it")
    return cluster.collective
