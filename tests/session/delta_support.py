"""What the tests of deltas share: optimiser steps that change little, and syncs that must (not) have been deltas."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from session_support import World, build

from weight_sync.delta.spec import DeltaSpec
from weight_sync.quant.emission import scheme_of
from weight_sync.session.delta import Reason
from weight_sync.session.session import Outcome
from weight_sync.session.state import State

SMALL = DeltaSpec(staging=4096, max_share=1.0)
"""Several rounds and several messages in worlds of tens of kilobytes; dense changes pass, too, as far as they fit."""


def nudge(world: World, share: float) -> None:
    """An optimiser step that changes about this share of the elements: to any bits, NaN too, unless they are computed with."""
    assert not any(source.quiet for source in world.sources), "a step during a sync"
    layout = world.layouts[0]
    made = layout.catalog
    weights = sorted({int(base) for base in made.base[made.is_made]})
    names = {made.name(base) for base in weights}
    for name, words in world.hf.items():
        flat = words.reshape(-1)
        hit = np.flatnonzero(world.noise.random(flat.size) < share)
        if name in names:
            flat[hit] = (world.noise.standard_normal(len(hit)) / 8).astype(ml_dtypes.bfloat16).view(np.uint16)
        else:
            if world.sides[0].held_as:
                flat &= 0xBFFF  # a number: a cast keeps no NaN's bits
            flat[hit] ^= world.noise.integers(1, 2 ** (8 * flat.itemsize - 2), len(hit), dtype=np.uint64).astype(flat.dtype)
    if weights:
        world.become(scheme_of(made.scheme), weights)
    for rank, buffer in enumerate(world.source):
        world._fill(layout, rank, buffer, buffer.bytes)


def served(world: World, version: int) -> Outcome:
    """A sync that must succeed, with every byte of every engine compared."""
    expected = world.expected()
    outcome = world.sync.sync(version)
    world.check(expected)
    assert (world.sync.version, world.sync.state, outcome.version) == (version, State.IDLE, version)
    assert [(e.version, e.serving, e.reason) for e in world.engines] == [(version, True, None)] * len(world.engines)
    assert not any(source.quiet for source in world.sources)
    assert outcome.delta is not None
    assert outcome.delta.complete == world.payload()
    return outcome


def complete(world: World, version: int, reason: Reason) -> Outcome:
    """served(), by a complete session for this reason."""
    outcome = served(world, version)
    assert outcome.delta is not None
    assert (outcome.delta.reason, outcome.bytes) == (reason, world.payload()), outcome.delta.text
    return outcome


def delta(world: World, version: int) -> Outcome:
    """served(), by a delta session."""
    outcome = served(world, version)
    assert outcome.delta is not None
    assert outcome.delta.used, outcome.delta.text
    assert outcome.bytes == outcome.delta.encoded
    return outcome


def settled(spec: DeltaSpec = SMALL, sides: Any = None, **more: Any) -> World:
    """A world at version 2: one complete session, one delta."""
    world = build(sides, delta=spec, **more)
    complete(world, 1, Reason.FIRST)
    nudge(world, 0.02)
    delta(world, 2)
    nudge(world, 0.02)
    world.traps.log.clear()
    return world
