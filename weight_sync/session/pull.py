"""Engine to engine: a joining worker reads its parameters out of the live memory of a worker that serves a verified version.

Whole parameters, but for padding: that is each engine's own, no digest was committed for it, and it stays as it is.

The worker that is read from takes no part in it: its transport, opened and registered by its last bind, answers alone. What it
must keep until the pull has returned: that transport open, its parameters where they were, and no write to them. Nobody here
can see whether the last held; the controller compares digests afterwards.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from weight_sync.errors import BindError, listed
from weight_sync.ids import ITEMSIZE, Deadline
from weight_sync.plan.runs import merge_runs
from weight_sync.session.memory import Memory
from weight_sync.session.snapshot import Untouched
from weight_sync.transport.base import Batch, Endpoint, Ticket, Transport
from weight_sync.transport.regions import split

_BATCH_BYTES = 32 << 20
_IN_FLIGHT = 2
"""Batches asked for at a time: bounds what a failed pull leaves behind, and keeps the wire busy."""


def pull(
    memory: Memory,
    untouched: Untouched,
    expected: Mapping[str, Any],
    peer: Mapping[str, Any],
    transport: Transport,
    deadline: Deadline,
) -> dict[str, Any]:
    """Read every byte that the plan writes. Returns {"bytes", "reads", "seconds"}.

    expected: this worker's own {name: [shape, dtype]}, checked against `memory` at bind; `untouched` was made then. peer: what
    the other worker answered to bind(). The layouts are compared before a byte is asked for. Raises BindError where they
    differ; TransportError, after which the parameters are suspect until the transport is closed.
    """
    begun = time.monotonic()
    _same(memory.where, expected, peer)
    endpoint = Endpoint.from_json(peer["endpoint"])
    if endpoint == transport.describe():
        raise BindError(f"{memory.where}: asked to read its weights from itself")
    transport.probe(endpoint, deadline)
    names = list(peer["addresses"])
    ranges = [untouched.written(name) * ITEMSIZE[memory.param(name).dtype] for name in names]
    owner = np.repeat(np.arange(len(names)), [len(r) for r in ranges])
    low, high = np.concatenate(ranges).T
    local, remote, nbytes, first = merge_runs(
        np.asarray([memory.address(name) for name in names], np.int64)[owner] + low,
        np.asarray([peer["addresses"][name] for name in names], np.int64)[owner] + low,
        high - low,
        owner,
    )
    labels = [names[i] for i in owner[first].tolist()]
    local, remote, nbytes, parent = split(local, remote, nbytes, _BATCH_BYTES)
    group = np.cumsum(nbytes) // _BATCH_BYTES
    moved, flying = 0, list[Ticket]()
    for g in np.unique(group).tolist():
        at = np.flatnonzero(group == g)
        if len(flying) == _IN_FLIGHT:
            moved += transport.wait(flying.pop(0), deadline).nbytes
        batch = Batch(endpoint, local[at], remote[at], nbytes[at], [labels[i] for i in parent[at].tolist()])
        flying.append(transport.read(batch))
    for ticket in flying:
        moved += transport.wait(ticket, deadline).nbytes
    return {"bytes": moved, "reads": len(nbytes), "seconds": time.monotonic() - begun}


def _same(where: str, expected: Mapping[str, Any], peer: Mapping[str, Any]) -> None:
    theirs, addresses = peer["params"], peer["addresses"]
    problems = [
        f"{name}: {expected.get(name, 'absent')} here, {theirs.get(name, 'absent')} there"
        for name in sorted(expected.keys() | theirs.keys())
        if expected.get(name) != theirs.get(name)
    ]
    problems += [f"{name}: has an address there, but no layout" for name in addresses if name not in theirs]
    if problems:
        raise BindError(f"{where}: the worker to read from holds another layout: {listed(problems)}")
    if not addresses:
        raise BindError(f"{where}: the worker to read from gave the address of no parameter")
