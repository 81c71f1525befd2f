"""Starting a Mooncake engine and finding out what it really is.

The engine ignores the `protocol` argument: what it installs depends on the build, on the RDMA devices it finds and on MC_*
variables, and asking for "rdma" without a device quietly gives tcp. The fact is in the description that every engine
publishes on its handshake port for its peers (transfer_metadata in Mooncake's source), so that is what we read, for our
own engine and for every peer.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from weight_sync.errors import ConfigError
from weight_sync.ids import Deadline
from weight_sync.transport import preflight, rdma
from weight_sync.transport.regions import check_deadline, failed_peer

PROTOCOLS = ("tcp", "rdma", "nvlink_intra")
STRATEGY = {"tcp": "p2p_tcp", "rdma": "p2p_rdma", "nvlink_intra": "p2p_nvlink"}

STEERING = ("MC_FORCE_TCP", "MC_FORCE_HCA", "MC_FORCE_MNNVL", "MC_INTRANODE_NVLINK", "MC_USE_TENT")
"""Variables that choose the transport. Mooncake looks whether they are set, not at their value: "0" counts as set."""

_WANTED = {"tcp": {"MC_FORCE_TCP": "1"}, "rdma": {}, "nvlink_intra": {"MC_INTRANODE_NVLINK": "1"}}
_NATIVE_TIMEOUT = "30"
"""Seconds, for MC_TRANSFER_TIMEOUT, which bounds only the blocking batch calls (local device copies) and one-sided reads.
Everything else has our deadlines."""

_METADATA_REQUEST = 1
_MAX_ANSWER = 128 << 20
_environment_lock = threading.Lock()


@contextmanager
def engine_environment(protocol: str) -> Iterator[None]:
    """Where MC_* variables are set: around the making of an engine, restored afterwards (MC_LOG_LEVEL: load_mooncake).

    ConfigError when the surrounding environment already steers Mooncake elsewhere: overriding that silently would
    surprise its other users.
    """
    wanted = _WANTED[protocol]
    clash = [name for name in STEERING if name in os.environ and name not in wanted]
    if clash:
        raise ConfigError(
            f"transport mooncake, protocol {protocol!r}: the environment sets {', '.join(clash)}, which makes Mooncake choose "
            f"another transport (any value counts, even 0). Unset it, or ask for the protocol that it stands for"
        )
    values = {**wanted, "MC_TRANSFER_TIMEOUT": _NATIVE_TIMEOUT}
    with _environment_lock:
        before = {name: os.environ.get(name) for name in values}
        os.environ.update(values)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


def primary_host() -> str:
    """The address this machine would use to reach others: what the routing table says, no packet is sent.

    127.0.0.1 where there is no route at all. Several networks: pass `host` explicitly.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("198.51.100.1", 9))  # TEST-NET-2, RFC 5737
        except OSError:
            return "127.0.0.1"
        return probe.getsockname()[0]


def start_engine(protocol: str, host: str, devices: str) -> tuple[Any, int, tuple[str, ...]]:
    """A running engine that is proved to use `protocol`, its RPC port, and the RDMA devices that it really uses.

    ConfigError when this machine cannot have it.
    """
    if protocol not in PROTOCOLS:
        raise ConfigError(f"transport mooncake: protocol {protocol!r} is not one of {', '.join(PROTOCOLS)}")
    seen = preflight.require(STRATEGY[protocol])
    ports: tuple[rdma.RdmaPort, ...] = ()
    gid: int | None = None
    if protocol == "rdma":
        ports = rdma.chosen(seen.rdma_ports, devices, os.environ)
        gid = rdma.wanted_gid(ports, os.environ)
        devices = ",".join(rdma.device_names(devices))
    made_by = preflight.load_mooncake().TransferEngine
    with engine_environment(protocol):
        engine = made_by()
        status = engine.initialize(f"{host}:0", "P2PHANDSHAKE", protocol, devices)
    if status != 0:
        raise ConfigError(
            f"transport mooncake: the engine for protocol {protocol!r} on host {host!r} did not start (status {status}); "
            f"its own log says why with MC_LOG_LEVEL=INFO"
        )
    port = engine.get_rpc_port()
    # Both ports listen on all interfaces whatever `host` says, so our own engine always answers on the loopback.
    segment = published("127.0.0.1", port, Deadline.after(10.0))
    found = protocol_of(segment)
    if found != protocol:
        del engine
        raise ConfigError(
            f"transport mooncake: protocol {protocol!r} was asked for, the engine installed {found!r} instead\n"
            + preflight.report(preflight.facts())
        )
    return engine, port, rdma.check_published(segment, ports, devices, gid) if protocol == "rdma" else ()


def published(host: str, port: int, deadline: Deadline) -> dict[str, Any]:
    """What the engine at host:port publishes: protocol, buffers, data port. Asked over a socket of our own, because the
    engine's own way blocks for a minute on a peer that accepts and never answers. TransportError when it does not answer.

    Frame: u64 length, u8 request type, JSON; answered alike (writeString/readString in Mooncake's common.h).
    """
    where = f"mooncake {host}:{port}"
    try:
        with socket.create_connection((host, port), timeout=check_deadline(where, deadline, "connecting")) as peer:
            peer.sendall(struct.pack("<QB", 3, _METADATA_REQUEST) + b"{}")
            (length,) = struct.unpack("<Q", _receive(peer, 8, deadline))
            if not 1 < length <= _MAX_ANSWER:
                raise failed_peer(where, f"the peer announced an answer of {length} bytes", "bad answer")
            answer = json.loads(_receive(peer, length, deadline)[1:])
    except TimeoutError:
        raise failed_peer(where, f"the peer did not answer within {deadline.seconds:g} s", "deadline") from None
    except OSError as error:
        raise failed_peer(where, f"the peer cannot be reached ({error})", "unreachable") from error
    except ValueError as error:
        raise failed_peer(where, f"the peer answered what is not JSON ({error})", "bad answer") from error
    if not isinstance(answer, dict):
        raise failed_peer(where, f"the peer's engine publishes nothing (it answered {answer!r})", "bad answer")
    return answer


def protocol_of(segment: dict[str, Any]) -> str:
    """Builds with several protocols at once publish a list; such an engine is none of the three and shows as "a+b"."""
    protocol = segment.get("protocol")
    return "+".join(sorted(map(str, protocol))) if isinstance(protocol, list) else str(protocol)


def buffers_of(segment: dict[str, Any]) -> list[tuple[int, int]]:
    """(address, bytes) of everything registered there."""
    return [(int(buffer["addr"]), int(buffer["length"])) for buffer in segment.get("buffers") or ()]


def _receive(peer: socket.socket, nbytes: int, deadline: Deadline) -> bytes:
    parts = bytearray()
    while len(parts) < nbytes:
        peer.settimeout(max(deadline.remaining(), 1e-3))
        part = peer.recv(min(nbytes - len(parts), 1 << 20))
        if not part:
            raise OSError(f"connection closed after {len(parts)} of {nbytes} bytes")
        if deadline.remaining() <= 0:
            raise TimeoutError
        parts += part
    return bytes(parts)
