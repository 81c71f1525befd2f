"""RDMA devices of this machine, as the kernel shows them in sysfs: ports, GIDs, counters; and which of them may be used.

Format: Documentation/ABI/stable/sysfs-class-infiniband in the Linux source. Standard library only; nothing is changed.
"""

from __future__ import annotations

import ctypes
import ipaddress
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from weight_sync.errors import ConfigError
from weight_sync.ids import Deadline

SYSFS = Path("/sys/class/infiniband")
GID_VARIABLES = ("MC_GID_INDEX", "NCCL_IB_GID_INDEX")
"""Which GID Mooncake is to use, first one that is set; else it chooses itself. It reads them when it is imported, and
never again."""

TRANSMITTED = (
    "counters/port_xmit_packets",  # every driver that answers IB management queries: mlx4, mlx5, hfi1, qib
    "hw_counters/sent_pkts",  # rxe
    "hw_counters/tx_pkts",  # bnxt_re, efa
    "hw_counters/iwOutRdmaWrites",  # irdma
    "hw_counters/iwOutRdmaReads",  # irdma
)
"""Files of a port that only grow, and grow with RDMA traffic alone."""
STALE_SECONDS = 0.02
"""Drivers renew the counters that sysfs shows every 10 ms or so."""
WIRE_SECONDS = 1.0
"""How long a probe waits for the counters of the RDMA devices to show it."""


@dataclass(frozen=True, slots=True)
class Gid:
    """One of a port's addresses. value: as sysfs prints it. kind: "IB/RoCE v1", "RoCE v2" or "". netdev: its network device."""

    index: int
    value: str
    kind: str = ""
    netdev: str = ""

    @property
    def address(self) -> str:
        """As people write it: 10.0.0.1 for an IPv4 address inside a GID."""
        address = ipaddress.IPv6Address(self.value)
        return str(address.ipv4_mapped or address)


@dataclass(frozen=True, slots=True)
class RdmaPort:
    """One port of an RDMA device. state: as the kernel prints it, e.g. "4: ACTIVE". gids: those that are not all zero.

    parent: the network device under a device made in software (soft RoCE, soft iWARP), else empty.
    """

    device: str
    port: int
    state: str
    link_layer: str
    gids: tuple[Gid, ...]
    parent: str = ""

    @property
    def usable(self) -> bool:
        return "ACTIVE" in self.state and bool(self.gids)

    def __str__(self) -> str:
        soft = f", in software on {self.parent}" if self.parent else ""
        gids = ", ".join(f"{gid.index}: {gid.address}{f' ({gid.kind})' if gid.kind else ''}" for gid in self.gids) or "none"
        return f"{self.device} port {self.port} {self.state} {self.link_layer}{soft}, GIDs {gids}"


def ports(devices: Path = SYSFS) -> tuple[RdmaPort, ...]:
    """Every port of every device, sorted by name."""
    found: list[RdmaPort] = []
    for folder in sorted(devices.glob("*/ports/*"), key=lambda path: (path.parents[1].name, int(path.name))):
        found.append(
            RdmaPort(
                device=folder.parents[1].name,
                port=int(folder.name),
                state=text(folder / "state"),
                link_layer=text(folder / "link_layer"),
                gids=tuple(_gids(folder)),
                parent=text(folder.parents[1] / "parent"),
            )
        )
    return tuple(found)


def _gids(port: Path) -> Iterable[Gid]:
    # A port lists up to 1,024 places for GIDs, all zero but for a few. Attributes of an empty place cannot be read.
    for place in sorted((port / "gids").glob("*"), key=lambda path: int(path.name)):
        value = text(place)
        if value.strip("0:"):
            attributes = port / "gid_attrs"
            yield Gid(int(place.name), value, text(attributes / "types" / place.name), text(attributes / "ndevs" / place.name))


def chosen(
    found: Sequence[RdmaPort], devices: str, environment: Mapping[str, str], *, transport: str = "mooncake"
) -> tuple[RdmaPort, ...]:
    """The usable ports of the devices in a comma-separated filter, of all when it is empty: port 1 of each, or MC_IB_PORT's.

    ConfigError, naming `transport`, for a name that is not there or a device that is down: Mooncake passes over both without a
    word, and installs tcp when none is left; UCX, under NIXL, uses what is left.
    """
    wanted = device_names(devices)
    there = {port.device for port in found}
    if missing := [name for name in wanted if name not in there]:
        raise ConfigError(
            f"transport {transport}: devices={devices!r} names {', '.join(missing)}, which this machine does not have; "
            f"RDMA devices here: {', '.join(sorted(there)) or 'none'}"
        )
    number = environment.get("MC_IB_PORT", "1")
    usable = tuple(p for p in found if p.usable and str(p.port) == number and (not wanted or p.device in wanted))
    without = [name for name in wanted if name not in {port.device for port in usable}]
    if without or not usable:
        states = "; ".join(str(port) for port in found if not without or port.device in without)
        raise ConfigError(
            f"transport {transport}: port {number} of {', '.join(without) or 'every RDMA device'} cannot be used: {states}"
        )
    return usable


def device_names(devices: str) -> list[str]:
    """The names in a filter. Mooncake itself takes the spaces in "mlx5_0, mlx5_1" for part of the second name."""
    return [name.strip() for name in devices.split(",") if name.strip()]


def wanted_gid(found: Sequence[RdmaPort], environment: Mapping[str, str]) -> int | None:
    """The GID index that the environment asks for, None when Mooncake may choose. ConfigError where a port has no such GID."""
    name = next((name for name in GID_VARIABLES if name in environment), None)
    if name is None:
        return None
    value = environment[name]
    index = int(value) if value.isascii() and value.isdigit() else -1
    without = [port for port in found if index not in {gid.index for gid in port.gids}]
    if without:
        raise ConfigError(f"{name}={value}: no such GID on {'; '.join(map(str, without))}")
    return index


def check_published(
    segment: Mapping[str, object], ports: Sequence[RdmaPort], devices: str, wanted: int | None
) -> tuple[str, ...]:
    """The devices that an engine on this machine says it uses; what it publishes is the fact, what it was asked is not.

    ports: those that may be used. ConfigError unless it uses the devices of a filter that is not empty, and GID `wanted`: it
    read its variables when this process imported Mooncake, so that one set later does nothing.
    """
    published = segment.get("devices")
    used = {str(d["name"]): _address(str(d["gid"])) for d in (published if isinstance(published, list) else [])}
    if not used or (devices and set(used) != set(device_names(devices))):
        raise ConfigError(
            f"transport mooncake: the engine uses RDMA devices {', '.join(sorted(used)) or 'none'}; asked for: "
            f"{devices or 'all that are usable'}"
        )
    for port in ports:
        asked = next((gid.address for gid in port.gids if gid.index == wanted), None)
        if asked is not None and used.get(port.device, asked) != asked:
            raise ConfigError(
                f"transport mooncake: GID {wanted} ({asked}) was asked for on {port.device}, the engine uses "
                f"{used[port.device]}: {' or '.join(GID_VARIABLES)} was set after this process had imported Mooncake"
            )
    return tuple(sorted(used))


def _address(gid: str) -> str:
    """Of a GID as Mooncake publishes it, 16 bytes in hex between colons."""
    address = ipaddress.IPv6Address(bytes.fromhex(gid.replace(":", "")))
    return str(address.ipv4_mapped or address)


def transmitted(devices: Iterable[str], root: Path = SYSFS) -> dict[str, int]:
    """Counter -> value, for every counter of TRANSMITTED that these devices have; empty where a driver has none of them."""
    found: dict[str, int] = {}
    for device in devices:
        for port in sorted((root / device / "ports").glob("*")):
            for name in TRANSMITTED:
                value = text(port / name)
                if value.isdigit():
                    found[f"{device}/{port.name} {name.rpartition('/')[2]}"] = int(value)
    return found


def driven_devices() -> tuple[str, ...] | None:
    """The devices that the system's libibverbs has a driver for: what a program can open, while sysfs shows what the kernel
    has. None where there is no libibverbs. Opens nothing.
    """
    try:
        verbs = ctypes.CDLL("libibverbs.so.1")
    except OSError:
        return None
    verbs.ibv_get_device_list.restype = ctypes.POINTER(ctypes.c_void_p)
    verbs.ibv_get_device_name.restype = ctypes.c_char_p
    count = ctypes.c_int(0)
    listed = verbs.ibv_get_device_list(ctypes.byref(count))
    if not listed:
        return ()
    names = [verbs.ibv_get_device_name(ctypes.c_void_p(listed[i])).decode() for i in range(count.value)]
    verbs.ibv_free_device_list(listed)
    return tuple(sorted(names))


def sent_until_now(devices: Sequence[str]) -> dict[str, int]:
    """What `transmitted` says of these devices now, not of a moment ago. Takes STALE_SECONDS where they have counters."""
    if transmitted(devices):
        time.sleep(STALE_SECONDS)
    return transmitted(devices)


def seen_moving(devices: Sequence[str], before: Mapping[str, int], deadline: Deadline) -> dict[str, int]:
    """Counter -> packets sent since `before`, as soon as any has moved; empty when none does within WIRE_SECONDS."""
    until = Deadline.after(min(WIRE_SECONDS, deadline.remaining()))
    while before:
        now = transmitted(devices)
        moved = {name: now[name] - count for name, count in before.items() if now.get(name, count) > count}
        if moved or not until.remaining():
            return moved
        time.sleep(0.005)
    return {}


def text(path: Path) -> str:
    """A file of /sys or /proc, stripped; empty when it is not there or the kernel refuses to show it."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
