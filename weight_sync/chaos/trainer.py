"""A trainer rank: parameters in one allocation between guard bytes, and an optimiser that steps the moment it may."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import numpy as np

from weight_sync.chaos.case import Values, Words
from weight_sync.chaos.network import Network, Process
from weight_sync.ids import Deadline
from weight_sync.session.contracts import RankDescription
from weight_sync.session.inprocess import typed
from weight_sync.session.memory import describe, epoch_of
from weight_sync.session.source import SourceAgent
from weight_sync.transport.base import Batch, Completion, Ticket
from weight_sync.transport.faults import FaultPlan
from weight_sync.transport.memory import MemoryHub, MemoryTransport

GUARD = 32
"""Bytes before, between and after parameters: a write that leaves its parameter is seen in them."""


Twist = Callable[[str, Mapping[str, Any]], Mapping[str, Any]]
"""(method, payload) -> the payload that arrives."""


class Block:
    """Parameters in one allocation. initial: what was in it at first, guards and padding included."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], noise: np.random.Generator) -> None:
        at = GUARD
        self._start: dict[str, int] = {}
        for name, shape in shapes.items():
            self._start[name] = at
            at += -(-prod(shape) * 2 // 8) * 8 + GUARD
        self._shapes = dict(shapes)
        self.bytes = noise.integers(0, 256, at, np.uint8)
        self.initial = self.bytes.copy()
        self.words = self.views(self.bytes)
        self.blank = self.views(self.initial)
        self.arrays = {name: typed(view, "bfloat16") for name, view in self.words.items()}

    def views(self, raw: Any) -> Values:
        """The parameters in `raw`: this allocation or a copy of it."""
        return {
            name: raw[self._start[name] : self._start[name] + prod(shape) * 2].view(np.uint16).reshape(shape)
            for name, shape in self._shapes.items()
        }

    def fill(self, values: Mapping[str, Words]) -> None:
        for name, value in values.items():
            self.words[name][...] = value

    def with_(self, values: Mapping[str, Words]) -> Any:
        """The whole allocation as it must be when it holds `values`."""
        raw = self.initial.copy()
        for name, view in self.views(raw).items():
            view[...] = values[name]
        return raw

    def moved(self, noise: np.random.Generator, *, empty: bool = False) -> Block:
        """Another allocation with the same content, or with none. What is written to this one is lost from now on."""
        other = Block(self._shapes, noise)
        if not empty:
            other.bytes[:], other.initial[:] = self.bytes, self.initial
        return other


class DrillTransport(MemoryTransport):
    """The in-process transport, with places for events inside its calls."""

    def __init__(
        self, hub: MemoryHub, network: Network, place: str, *, landing_seed: int | None = None, faults: FaultPlan | None = None
    ) -> None:
        super().__init__(hub, landing_seed=landing_seed, faults=faults)
        self._network, self._place = network, place
        self.stuck = False
        """Whether it refuses to close, as an engine whose threads hang."""

    @property
    def reading(self) -> bool:
        """Whether it is open and may still move bytes: a batch is under way, or one failed."""
        return self._unusable != "closed" and (self._unusable is not None or bool(self._flights))

    def write(self, batch: Batch) -> Ticket:
        return self._network.inside(self._place, "wire write", lambda: super(DrillTransport, self).write(batch))

    def wait(self, ticket: Ticket, deadline: Deadline) -> Completion:
        return self._network.inside(self._place, "wire wait", lambda: super(DrillTransport, self).wait(ticket, deadline))

    def close(self) -> None:
        if self.stuck:
            raise RuntimeError("the engine's threads do not end")
        super().close()


def die(transports: list[DrillTransport]) -> None:
    """The end of the process they belong to."""
    for transport in transports:
        transport.stuck = False
        transport.die()
    transports.clear()


class DrillSource:
    """A TrainerSource. eager: steps as soon as it is released. The step's values come from `values(step)`."""

    def __init__(self, rank: int, coords: Mapping[str, int], block: Block, values: Callable[[int], Values]) -> None:
        self.rank, self.block, self.step = rank, block, 0
        self.quiet = False
        self.on_release: Callable[[], int] = lambda: self.step
        self.latest: Callable[[], int] = lambda: self.step
        self.may_step: Callable[[], None] = lambda: None
        self._coords, self._values = dict(coords), values

    def describe(self) -> RankDescription:
        params, storages = describe(self.block.arrays, f"trainer rank {self.rank}")
        return RankDescription(self.rank, "localhost", self._coords, epoch_of(storages), params, storages, None, None)

    def tensors(self) -> Mapping[str, Any]:
        return self.block.arrays

    def quiesce(self) -> None:
        self.take(self.latest())
        self.quiet = True

    def release(self) -> None:
        self.may_step()
        self.quiet = False
        self.take(self.on_release())

    def take(self, step: int) -> None:
        """Finish the optimiser steps up to `step`."""
        assert not self.quiet, "a step during a sync"
        if step > self.step:
            self.step = step
            self.block.fill(self._values(step))


class Trainer:
    """One rank: process, source and agent. boot() starts it, or starts it anew at other addresses with the same weights."""

    def __init__(self, source: DrillSource, open_: Callable[[], DrillTransport], moved: Callable[[Block], Block]) -> None:
        self.source, self._open, self._moved = source, open_, moved
        self.place = f"trainer {source.rank}"
        self.transports: list[DrillTransport] = []
        self.boot()

    def boot(self) -> None:
        self.process = Process(self.place)
        self.source.quiet = False
        self.twist: Twist = lambda method, payload: payload
        self.move()
        self.agent = SourceAgent(self.source, self._opened)

    def _opened(self) -> DrillTransport:
        self.transports.append(self._open())
        return self.transports[-1]

    def call(self, method: str, payload: Mapping[str, Any]) -> dict[str, Any]:
        return self.process.run(lambda: self.agent.call(method, self.twist(method, payload)))

    def move(self) -> None:
        self.source.block = self._moved(self.source.block)

    def kill(self) -> None:
        die(self.transports)
        self.process.kill()
