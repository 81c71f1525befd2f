"""The transport contract: what moves bytes from a trainer rank into a rollout rank's memory.

Who calls what, when, and what is safe after:

    register(regions)   each side, once per storage and epoch, before describe(). Nothing outside the regions may be touched.
    describe()          each side; the descriptor travels to the peer (it is plain data).
    probe(peer)         the source, once for each peer and before anything is paused: proves that this very peer (not an
                        older or newer process at its address) answers over the expected protocol. If it raises, nothing
                        of the peer's registered memory was touched. write() to a peer never probed is refused.
    write(batch)        the source. Returns at once. Until wait() returns, the source bytes must not change. It may raise
                        for what can be known beforehand (memory not registered, peer unknown): then nothing was sent.
    wait(ticket, ...)   the source. Returns only when every byte of the batch is reported written. If it raises, the
                        destination of *every* write of the batch is suspect and the transport may still be writing:
                        the source may not change and the destination may not be trusted until both ends' transports
                        are closed. From then on the transport is poisoned: every call but close() raises.
    close()             either side, once. Unregisters, tears the engine down; no method may be called after it. Returning
                        is the fence: nothing of this side is in flight any more. If that cannot be had, it raises.

An object of this contract is used by one thread of the process that made it.

A success report is not proof that the right bytes arrived: the session compares digests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from weight_sync.ids import Deadline


@dataclass(frozen=True, slots=True)
class Region:
    """One local storage: `nbytes` bytes from `address`. Registered whole; never one tensor at a time."""

    address: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A peer as plain data. Mooncake calls `address` the session id.

    `protocol` is what the peer's transport really uses ("tcp", "rdma", "nvlink_intra", "memory"), found out, not asked for.
    `epoch` changes whenever the peer's memory or engine was replaced: a new transport object is a new epoch.
    `probe` is (address, bytes) of a small area, apart from all registered regions, that probe() may read and write; None
    for engines that this library did not open.
    """

    transport: str
    protocol: str
    address: str
    epoch: int
    probe: tuple[int, int] | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain data for a message to another process; `from_json` gives an equal endpoint back."""
        probe = None if self.probe is None else list(self.probe)
        return {**{f: getattr(self, f) for f in ("transport", "protocol", "address", "epoch")}, "probe": probe}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Endpoint:
        probe = data.get("probe")
        return cls(
            transport=str(data["transport"]),
            protocol=str(data["protocol"]),
            address=str(data["address"]),
            epoch=int(data["epoch"]),
            probe=None if probe is None else (int(probe[0]), int(probe[1])),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Writes to one peer: three int64 arrays of equal length, and the HF name of each write for error messages."""

    endpoint: Endpoint
    source: NDArray[np.int64]
    destination: NDArray[np.int64]
    nbytes: NDArray[np.int64]
    tensors: Sequence[str]

    def __post_init__(self) -> None:
        counts = {len(self.source), len(self.destination), len(self.nbytes), len(self.tensors)}
        if len(counts) != 1 or counts == {0}:
            raise ValueError(f"a batch needs as many sources, destinations, sizes and names, and at least one: {counts}")


@dataclass(frozen=True, slots=True)
class Ticket:
    """A local handle of a batch in flight, waited for once. Never leaves the process, unlike Endpoint."""

    id: int
    batch: Batch


@dataclass(frozen=True, slots=True)
class Completion:
    """What wait() reports: bytes written and seconds from write() to the report."""

    nbytes: int
    seconds: float


class Transport(Protocol):
    """See the module docstring for the order of calls. Failures raise TransportError, a passed deadline too."""

    name: str

    def register(self, regions: Sequence[Region]) -> None: ...

    def describe(self) -> Endpoint: ...

    def probe(self, endpoint: Endpoint, deadline: Deadline) -> None: ...

    def write(self, batch: Batch) -> Ticket: ...

    def wait(self, ticket: Ticket, deadline: Deadline) -> Completion: ...

    def close(self) -> None: ...
