"""The small area behind Endpoint.probe, and what a source does with it to prove that it reaches this very peer.

Layout, little-endian: a header of 64 bytes (magic, epoch, address and count of a region table), SLOTS slots of 16 bytes
that peers write to, then SCRATCH bytes for the owner's own use (where its reads of other peers' areas land).
A reachable port proves nothing, nor does an answer on it: only a read and a write that went through the data path do.
"""

from __future__ import annotations

import secrets
import struct
from collections.abc import Callable
from typing import NamedTuple

from weight_sync.transport.base import Endpoint
from weight_sync.transport.regions import failed_peer

HEADER = struct.Struct("<QqqQ32x")
SLOT = 16
SLOTS = 4096
SCRATCH_OFFSET = HEADER.size + SLOT * SLOTS
AREA_BYTES = SCRATCH_OFFSET + 4096
_MAGIC = 0x31_65_62_6F_72_70_73_77  # b"wsprobe1"
_TRIES = 3


class Header(NamedTuple):
    epoch: int
    table: int
    regions: int


def new_epoch() -> int:
    """63 random bits: two transports never share an epoch, not even at the same address after a restart."""
    return secrets.randbits(63)


def pack_header(epoch: int, table: int = 0, regions: int = 0) -> bytes:
    return HEADER.pack(_MAGIC, epoch, table, regions)


def prove(endpoint: Endpoint, read: Callable[[int, int], bytes], write: Callable[[int, bytes], None]) -> Header:
    """Read the peer's header, compare its epoch, write a nonce and read it back. `read` and `write` are one-sided.

    Two sources that draw the same slot at once overwrite each other, which is no failure of the path: hence a few slots.
    Raises TransportError naming both epochs, or saying that the nonce did not come back.
    """
    address, nbytes = _area(endpoint)
    header = header_of(endpoint, read(address, HEADER.size))
    slots = (min(nbytes, SCRATCH_OFFSET) - HEADER.size) // SLOT
    for _ in range(_TRIES):
        slot = address + HEADER.size + SLOT * secrets.randbelow(slots)
        nonce = secrets.token_bytes(SLOT)
        write(slot, nonce)
        if read(slot, SLOT) == nonce:
            return header
    raise failed_peer(endpoint, f"{_TRIES} nonces were reported written and none could be read back", "probe mismatch")


def header_of(endpoint: Endpoint, data: bytes) -> Header:
    """The header that was read at a peer. TransportError where it is gone, or of another epoch than the endpoint's."""
    magic, *fields = HEADER.unpack(data)
    if magic != _MAGIC:
        raise failed_peer(endpoint, "the peer's probe area is gone: it was closed or replaced", "closed peer")
    header = Header(*fields)
    if header.epoch != endpoint.epoch:
        reason = f"stale endpoint: it was described at epoch {endpoint.epoch}, the peer is at {header.epoch}"
        raise failed_peer(endpoint, reason, "stale epoch")
    return header


def _area(endpoint: Endpoint) -> tuple[int, int]:
    if endpoint.probe is None or endpoint.probe[1] < HEADER.size + SLOT:
        raise failed_peer(endpoint, f"the endpoint carries no usable probe area ({endpoint.probe})", "no probe area")
    return endpoint.probe
