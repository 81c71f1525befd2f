"""The transport contract: what moves bytes from a trainer rank into a rollout rank's memory.

Who calls what, when, and what is safe after:

    register(regions)   each side, once per storage and epoch, before describe(). Nothing outside the regions may be touched.
    describe()          each side; the descriptor travels to the peer (it is plain data).
    probe(peer)         the source, once for each peer and before anything is paused: proves that this very peer (not an
                        older or newer process at its address) answers over the expected protocol. If it raises, nothing
                        of the peer's registered memory was touched. write() to a peer never probed is refused.
    write(batch)        the source: local bytes go to the peer. Returns at once. Until wait() returns, the local bytes must
                        not change. It may raise for what can be known beforehand (memory not registered, peer unknown):
                        then nothing was sent.
    read(batch)         the reader: the peer's bytes come into local memory, without the peer's program taking part. Returns
                        at once; raises beforehand as write() does, and then nothing was asked for. Until wait() returns, the
                        local bytes may not be used, and the peer's bytes must not change (nothing here can see if they do).
    wait(ticket, ...)   whoever wrote or read. Returns only when every byte of the batch is reported written or read. If it
                        raises, the bytes that *every* entry of the batch was to fill are suspect and the transport may still
                        be filling them. After a write these are the peer's: the local bytes may not change and the peer's
                        may not be trusted until both ends' transports are closed. After a read they are ours: this memory
                        may be neither trusted nor reused until this transport is closed; the peer is unharmed. From then on
                        the transport is poisoned: every call but close() raises.
    close()             either side, once. Unregisters, tears the engine down; no method may be called after it. Returning
                        is the fence: nothing of this side is in flight any more. If that cannot be had, it raises.

An object of this contract is used by one thread of the process that made it.

A success report is not proof that the right bytes arrived: the session compares digests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

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
    for engines that this library did not open. `connection` is what its transport needs to reach the address, where that is
    more than a name (NIXL: base64 of an agent's metadata); no message shows it.
    """

    transport: str
    protocol: str
    address: str
    epoch: int
    probe: tuple[int, int] | None = None
    connection: str = field(default="", repr=False)

    def to_json(self) -> dict[str, Any]:
        """Plain data for a message to another process; `from_json` gives an equal endpoint back."""
        probe = None if self.probe is None else list(self.probe)
        data = {**{f: getattr(self, f) for f in ("transport", "protocol", "address", "epoch")}, "probe": probe}
        return {**data, "connection": self.connection} if self.connection else data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Endpoint:
        probe = data.get("probe")
        return cls(
            transport=str(data["transport"]),
            protocol=str(data["protocol"]),
            address=str(data["address"]),
            epoch=int(data["epoch"]),
            probe=None if probe is None else (int(probe[0]), int(probe[1])),
            connection=str(data.get("connection", "")),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Boxes:
    """Strides of a batch's entries, for a transport that walks them itself (`Transport.strided`).

    shape, local_strides, remote_strides: int64 [entries, dims], in bytes; the last dim is the bytes of one element, stride 1.
    """

    shape: NDArray[np.int64]
    local_strides: NDArray[np.int64]
    remote_strides: NDArray[np.int64]

    def extents(self, strides: NDArray[np.int64]) -> NDArray[np.int64]:
        """Bytes from the first to one past the last of each entry, on the side whose strides are given."""
        return 1 + ((self.shape - 1) * strides).sum(axis=1)


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Batch:
    """Byte ranges here and at one peer: three int64 arrays of equal length, and the HF name of each range for errors.

    local, remote: addresses, in this process and in the peer's. write() moves local to remote, read() remote to local.
    boxes: None, or the strides with which each entry lies on both sides; then the addresses are those of its first byte and
    nbytes is what it carries. Only transports that say `strided` take it.
    """

    endpoint: Endpoint
    local: NDArray[np.int64]
    remote: NDArray[np.int64]
    nbytes: NDArray[np.int64]
    tensors: Sequence[str]
    boxes: Boxes | None = None

    def __post_init__(self) -> None:
        counts = {len(self.local), len(self.remote), len(self.nbytes), len(self.tensors)}
        if len(counts) != 1 or counts == {0}:
            raise ValueError(f"a batch needs as many local and remote addresses, sizes and names, and at least one: {counts}")


@dataclass(frozen=True, slots=True)
class Ticket:
    """A local handle of a batch in flight, waited for once. Never leaves the process, unlike Endpoint."""

    id: int
    batch: Batch


@dataclass(frozen=True, slots=True)
class Completion:
    """What wait() reports: bytes written or read, and seconds from write() or read() to the report."""

    nbytes: int
    seconds: float


class Transport(Protocol):
    """See the module docstring for the order of calls. Failures raise TransportError, a passed deadline too.

    strided: takes batches with boxes, so that nothing needs packing. batch_bytes: how much it likes to be handed at a time.
    """

    name: str
    strided: bool
    batch_bytes: int

    def register(self, regions: Sequence[Region]) -> None: ...

    def describe(self) -> Endpoint: ...

    def probe(self, endpoint: Endpoint, deadline: Deadline) -> None: ...

    def write(self, batch: Batch) -> Ticket: ...

    def read(self, batch: Batch) -> Ticket: ...

    def wait(self, ticket: Ticket, deadline: Deadline) -> Completion: ...

    def close(self) -> None: ...


@runtime_checkable
class DeviceOrdered(Protocol):
    """A transport whose writes begin after what the caller has asked of the device so far, without the caller waiting for that.
    So a program can ask for many ahead of the device."""

    def follow(self, ticket: Ticket) -> None:
        """What the caller asks of the device from now on begins after this write has read its local bytes. Says nothing of how
        the write went: wait() does, and has to be called all the same."""
        ...
