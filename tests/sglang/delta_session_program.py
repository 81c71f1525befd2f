"""Run by test_delta_session.py with TRITON_INTERPRET=1: whole sessions with deltas as on GPUs, all of it in host memory.

The world is that of tests/session: agents of both sides, guard bytes between parameters, every byte of every engine compared
after every sync. Stand-ins, by name:

    Standin         a GPU's memory: DeviceMemory over torch tensors that are in host memory. Settled at any time; what is put
                    beside the weights is a copy, as it would be there
    interpreted     the GPU itself: Triton's interpreter, one launch at a time
    MemoryTransport the wire

What a GPU does later than it is asked to is not played here; tests/gpu/test_gpu_session.py has the same sessions on GPUs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import interpreted
import numpy as np
import session_support
import torch
from delta_support import complete, delta, nudge
from session_support import DENSE, MOE, ArraySource, Buffer, World, build, declared
from test_delta_faults import refused, repaired

from weight_sync.config import quant_yaml
from weight_sync.delta.message import directory_end
from weight_sync.delta.spec import DeltaSpec
from weight_sync.device import changes, kernels
from weight_sync.errors import DeltaError, VerifyError
from weight_sync.layout.table import Param
from weight_sync.plan.schedule import Budget
from weight_sync.quant.emission import Quantisation
from weight_sync.quant.published import Excludes
from weight_sync.quant.scheme import load_scheme
from weight_sync.session import memory, source, target
from weight_sync.session.contracts import RankDescription
from weight_sync.session.delta import Reason
from weight_sync.session.device_memory import DeviceMemory
from weight_sync.session.digests import LANES
from weight_sync.session.verify import Level

STAGING = 1 << 18
"""Large enough for the GPU to encode: records of whole programs. With less the host does."""
ODD = MOE | {"num_hidden_layers": 1, "num_experts": 2}
"""Some of its cuts are not made of whole words of 8 bytes: the GPU leaves these to the host."""
EVEN = DENSE | {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32, "head_dim": 8, "num_attention_heads": 8}
EVEN |= {"num_key_value_heads": 4}
"""All of its cuts are."""


class Standin(DeviceMemory):
    def settle(self) -> None: ...

    def beside(self, array: Any, into: Any | None = None) -> Any:
        return torch.from_numpy(array).clone() if into is None else into.copy_(torch.from_numpy(array))


class TorchBuffer(Buffer):
    """Its parameters as torch tensors over the same bytes."""

    def __init__(self, params: Any, noise: np.random.Generator) -> None:
        super().__init__(params, noise)
        self.arrays = {p.name: self._tensor(p) for p in params}

    def _tensor(self, p: Param) -> torch.Tensor:
        dtype = getattr(torch, p.dtype)
        raw = torch.from_numpy(self.bytes)[self.start[p.name] :][: p.numel * dtype.itemsize]
        return raw.view(dtype).view(p.shape)


class DeviceSource(ArraySource):
    def describe(self) -> RankDescription:
        return replace(super().describe(), device="cuda")


def stand_in() -> None:
    interpreted.rounding()
    interpreted.one_at_a_time()
    torch.set_num_threads(1)
    torch.cuda.device = lambda device: nullcontext()  # type: ignore[assignment, misc]
    memory.memory_of = source.memory_of = target.memory_of = Standin  # type: ignore[assignment, attr-defined]
    session_support.Buffer = TorchBuffer  # type: ignore[misc]
    session_support.ArraySource = DeviceSource  # type: ignore[misc]


def small_programs() -> None:
    """Of 512 words instead of 8,192: what the interpreter takes for one does not depend on what there is for it to do."""
    kernels.BLOCK, kernels.LOOPS = 256, 2
    kernels.PER_PROGRAM = changes.PER_PROGRAM = 512
    changes.AHEAD = 16


# -- what is looked at -------------------------------------------------------------------------------------------------


def begun(sides: Any, spec: DeltaSpec, shares: tuple[float, ...] = (0.02,), **more: Any) -> World:
    """A world after one complete session and a delta for each share."""
    world = build(sides, delta=spec, **more)
    complete(world, 1, Reason.FIRST)
    assert {agent._delta._kind for agent in world.source_agents} == {LANES}
    for version, share in enumerate(shares, 2):
        nudge(world, share)
        outcome = delta(world, version)
        assert (outcome.bytes == 0) == (share == 0.0), (share, outcome.bytes)
    world.traps.log.clear()
    return world


def by_gpu(world: World) -> list[tuple[int, int]]:
    """Of each trainer rank: regions that the GPU compares by itself, and all."""
    found = []
    for agent in world.source_agents:
        changes, regions = agent._delta._device, agent._delta._regions
        assert changes is not None
        assert regions is not None
        found.append((len(changes.numbers), len(regions.first)))
    return found


def as_it_lies() -> None:
    world = begun(declared(ODD), DeltaSpec("device", 1.0, STAGING), (0.02, 0.0, 0.1))
    assert all(0 < some < every for some, every in by_gpu(world)), by_gpu(world)


def cut() -> None:
    world = begun(declared(EVEN, {"ranks": 1}, {"tp": 4}), DeltaSpec("host", 1.0, STAGING), (0.0, 0.02))
    assert all(some == every for some, every in by_gpu(world)), by_gpu(world)


def joined() -> None:
    trainer = {"ranks": 4, "tp": 4, "etp": 4}
    world = begun(declared(EVEN, trainer, {"tp": 1}), DeltaSpec("device", 1.0, STAGING), (0.02,))
    assert all(some == every for some, every in by_gpu(world)), by_gpu(world)


def replicas() -> None:
    """One region goes to several ranks, under another number in the table of each. With small programs a small staging buffer
    does: regions of several programs and records, several messages and rounds."""
    sides = declared(EVEN | {"vocab_size": 120}, {"ranks": 1}, {"tp": 1, "engines": 2})
    world = begun(sides, DeltaSpec("device", 1.0, 1 << 14), (0.0,))
    (agent,) = world.source_agents
    regions, found = agent._delta._regions, agent._delta._device
    assert regions is not None
    assert found is not None
    assert np.bincount(regions.of).min() == 2, "each goes to both engines"
    assert len(found.numbers) == len(regions.first)
    assert regions.nbytes.max() > 8 * found._words
    nudge(world, 0.4)
    outcome = delta(world, 3)
    assert outcome.delta is not None
    assert outcome.delta.rounds > 1


def host_encodes() -> None:
    """A staging buffer too small for records of whole programs: the host finds, encodes and decodes for the same memory."""
    world = begun(declared(ODD), DeltaSpec("device", 1.0, 1 << 16), (0.02, 0.0))
    assert all(some == 0 for some, _ in by_gpu(world)), by_gpu(world)
    world = begun(declared(ODD), DeltaSpec("device", 1.0, STAGING), ())
    assert all(some > 0 for some, _ in by_gpu(world)), by_gpu(world)


def made() -> None:
    """Values and scales are compared in the staging buffer that they are made in, flight by flight. World knows what they must
    be of the float64 reference; at this level the rank also reads every byte back and makes it of the weights anew."""
    quant = Quantisation(load_scheme("fp8_block", quant_yaml, {"group": [16, 16]}), Excludes("fp8")).to_json()
    sides = declared(EVEN, {"ranks": 1}, {"tp": 1})
    sides = replace(sides[0], quant=quant), replace(sides[1], quant=quant)
    world = begun(sides, DeltaSpec("device", 1.0, STAGING), (0.02, 0.0), level=Level.FULL, budget=Budget(4096, 4096))
    agent = world.source_agents[0]
    bound, regions = agent._bound, agent._delta._regions
    assert bound is not None
    assert regions is not None
    computed = set(np.flatnonzero(bound.schedule.plan.computed[regions.first]).tolist())
    assert len(computed) > 2
    assert computed <= agent._delta._device.numbers  # type: ignore[union-attr]
    assert sum(map(len, bound.flights)) > 2, "several pieces share the places of the buffer"


def too_much() -> None:
    world = begun(declared(EVEN), DeltaSpec("device", 0.2, STAGING))
    nudge(world, 0.5)
    complete(world, 3, Reason.SHARE)
    nudge(world, 0.02)
    delta(world, 4)


def damaged() -> None:
    world = begun(declared(EVEN), DeltaSpec("device", 1.0, STAGING))
    nudge(world, 0.02)
    before = world.target[1].bytes.copy()

    def damage() -> None:
        """Invert a byte in the middle of the bodies of the message that came first."""
        message = next(m for agent in world.source_agents for m in agent._delta._messages if m.target == 1)
        begin = directory_end(len(message.records))
        world.target_agents[1]._stage.bytes((begin + message.nbytes) // 2, 1).bitwise_not_()

    world.traps.do("worker 1", "patch", damage)
    refused(world, DeltaError, r"delta from trainer rank \d in session .* not those that were sent")
    assert np.array_equal(before, world.target[1].bytes), "worker 1 applied none of it"
    repaired(world)

    name = "model.layers.0.self_attn.qkv_proj.weight"
    world.target[1].arrays[name].view(torch.int16)[3, 5] ^= 1
    nudge(world, 0.02)
    refused(world, VerifyError, rf"1 of \d+ transfers arrived with other bytes.*to rollout rank 1 \({name}\)", version=5)
    repaired(world, version=5)


CASES: Mapping[str, Callable[[], None]] = {
    "as it lies": as_it_lies,
    "tp1 to tp4": cut,
    "tp4 to tp1": joined,
    "two engines": replicas,
    "by the host": host_encodes,
    "quantised": made,
    "too much": too_much,
    "damaged": damaged,
}

if __name__ == "__main__":
    stand_in()
    for case in sys.argv[1:]:
        if case != "by the host":
            small_programs()
        CASES[case]()
        print(case)
