"""A NIXL agent with its UCX backend: loading, starting, and the few calls of it that the transport makes.

NIXL's own Python class fixes how often its progress thread looks (always: one busy core for each idle agent), so the bindings
underneath are used (nixl_cu12._bindings, NIXL 1.5.1). What UCX may use is told by environment variables, read when a backend is
made; the backend's own options have no way to name more than one UCX transport.
"""

from __future__ import annotations

import bisect
import ctypes
import importlib
import importlib.util
import os
import sys
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from weight_sync.errors import ConfigError
from weight_sync.transport import preflight, rdma
from weight_sync.transport.regions import Array

MODULES = ("nixl_cu12", "nixl_cu13")
"""Packages with the bindings, one for each CUDA version; for host memory they do the same."""
STRATEGY = {"tcp": "p2p_nixl", "rdma": "p2p_nixl_rdma"}

_TRANSPORTS = {"tcp": "tcp,self", "rdma": "rc,ud,self"}
"""UCX_TLS for each protocol: what UCX can use at all, so that it cannot fall back to something else. self: an agent connects
to itself first of all. ud: over it UCX sets up rc connections and keeps them alive. UCX's shared memory transports alone are
refused by NIXL ("no peer failure handler"); with tcp beside them nobody could say which one moved the bytes."""
_QUIET = {"UCX_LOG_FILE": "stderr", "UCX_WARN_UNUSED_ENV_VARS": "n"}
"""UCX logs to standard output otherwise. Read once, when the first backend of a process is made."""
_OPTIONS = {"engine_config": "RCACHE_ENABLE=n"}
"""Without UCX's registration cache: it keeps memory registered, and its keys good, after it was given back, and it patches this
process's memory calls to know when memory goes. Storages are registered once, so there is nothing to gain from it."""
_LOOK_MICROSECONDS = 1000
"""The progress thread sleeps until something arrives, and looks again after this long whatever happens."""


class NixlFailure(Exception):
    """A call of NIXL that failed; the text is NIXL's status, e.g. NIXL_ERR_REMOTE_DISCONNECT."""

    @property
    def code(self) -> str:
        return str(self)


def load_nixl() -> ModuleType:
    """The bindings. ImportError where none is installed or their libraries do not load."""
    for name in MODULES:
        found = importlib.util.find_spec(name)
        if found is not None and found.origin is not None:
            _put_systems_verbs_first(Path(found.origin).parents[1] / f"{name}.libs")
            return importlib.import_module(f"{name}._bindings")
    raise ImportError(f"none of {', '.join(MODULES)} is installed")


def _put_systems_verbs_first(libraries: Path) -> None:
    """Make UCX use the system's libibverbs instead of the one in the wheel, which looks for drivers in /usr/lib64/libibverbs
    only and finds no device where they are elsewhere (Debian, Ubuntu); NIXL then says no more than NIXL_ERR_BACKEND.

    Symbols of a library in the process's global scope come before those of the libraries that UCX's modules were linked to. The
    wheel's is loaded first, outside that scope: it brings its own libnl, which otherwise would register itself in the system's
    copy, be refused there as known, and crash at the end of the process when it takes back what it never registered. So does
    LD_PRELOAD=libibverbs.so.1, which finds the devices too.
    """
    bundled = sorted(libraries.glob("libibverbs-*.so*"))
    if bundled:
        ctypes.CDLL(str(bundled[0]))
        with suppress(OSError):  # no libibverbs here: no RDMA either, which preflight says
            ctypes.CDLL("libibverbs.so.1", mode=ctypes.RTLD_GLOBAL)


@contextmanager
def ucx_environment(protocol: str, devices: str) -> Iterator[None]:
    """UCX_* variables around the making of a backend, restored afterwards.

    devices: value for UCX_NET_DEVICES, "" to leave that to UCX and whoever set it. ConfigError where the surrounding
    environment sets one that is needed here: whoever set it, or uses UCX in this process too, would be surprised by the change.
    """
    wanted = {"UCX_TLS": _TRANSPORTS[protocol], **({"UCX_NET_DEVICES": devices} if devices else {})}
    with preflight.environment_lock:
        if clash := [f"{name}={os.environ[name]}" for name in wanted if name in os.environ]:
            raise ConfigError(
                f"transport nixl, protocol {protocol!r}: the environment sets {', '.join(clash)}, where this transport needs "
                f"{', '.join(f'{name}={value}' for name, value in wanted.items())}. Unset it (devices: the option devices)"
            )
        values = {**{name: value for name, value in _QUIET.items() if name not in os.environ}, **wanted}
        os.environ.update(values)
        try:
            yield
        finally:
            for name in values:
                del os.environ[name]


def start_agent(protocol: str, devices: str, name: str) -> tuple[Agent, tuple[str, ...]]:
    """A running agent, and the RDMA devices that it may use (none for tcp). ConfigError when this machine cannot have it.

    devices: comma separated, all when empty: RDMA devices for rdma, network interfaces for tcp.
    """
    if protocol not in STRATEGY:
        raise ConfigError(
            f"transport nixl: protocol {protocol!r} is not one of {', '.join(STRATEGY)}; between processes of one host: "
            "+weight_sync=p2p_cma (NIXL takes none of UCX's shared memory transports alone: they do not report a dead peer)"
        )
    seen = preflight.require(STRATEGY[protocol])
    names = rdma.device_names(devices)
    if protocol == "rdma":
        used = tuple(port.device for port in rdma.chosen(seen.rdma_ports, devices, {}, transport="nixl"))
        wanted = ",".join(f"{device}:1" for device in names)
    else:
        used = ()
        _check_interfaces(names)
        wanted = ",".join(names)
    loaded_before = any(module in sys.modules for module in MODULES)
    try:
        native = load_nixl()
    except (ImportError, OSError) as error:
        raise ConfigError(f"transport nixl: NIXL cannot be imported: {error}") from error
    with ucx_environment(protocol, wanted):
        try:
            return Agent(native, name), used
        except NixlFailure as error:
            raise ConfigError(
                f"transport nixl, protocol {protocol!r}: the UCX backend did not start ({error.code}); its log says why with "
                f"UCX_LOG_LEVEL=info and NIXL_LOG_LEVEL=INFO.{_why(protocol, loaded_before)}\n" + preflight.report(seen)
            ) from error


def _check_interfaces(names: list[str]) -> None:
    """ConfigError for a network interface that is not there: UCX only warns, and uses what is left."""
    there = sorted(path.name for path in Path("/sys/class/net").glob("*"))
    if missing := [name for name in names if name not in there]:
        raise ConfigError(f"transport nixl: devices names {', '.join(missing)}; network interfaces here: {', '.join(there)}")


def _why(protocol: str, loaded_before: bool) -> str:
    if protocol != "rdma" or not loaded_before:
        return ""
    return (
        " This process had loaded NIXL before: if another part of it has made a UCX backend already, that uses a libibverbs of "
        "its own, which may find no driver here; let this transport be opened first"
    )


class Agent:
    """One NIXL agent. Its progress thread serves peers even while our program does nothing. All calls but close() raise
    NixlFailure; all addresses are host memory.
    """

    def __init__(self, native: ModuleType, name: str) -> None:
        self._native = native
        own = [kind for kind in vars(native).values() if isinstance(kind, type) and issubclass(kind, Exception)]
        self._failures = (*own, RuntimeError)
        config = native.nixlAgentConfig()
        config.useProgThread = True
        config.useListenThread = False  # no port of NIXL's own: metadata travels with endpoints
        config.pthrDelay = _LOOK_MICROSECONDS
        config.syncMode = native.nixl_thread_sync_t.NIXL_THREAD_SYNC_NONE
        self.name = name
        with self._as_failure():
            self._agent: Any = native.nixlAgent(name, config)
            self._backend = [self._agent.createBackend("UCX", _OPTIONS)]

    def register(self, ranges: list[tuple[int, int]]) -> None:
        """(address, bytes) pairs, each registered whole."""
        with self._as_failure():
            self._agent.registerMem(self._ranges(ranges), self._backend)

    def metadata(self, ranges: list[tuple[int, int]], *, connection: bool) -> bytes:
        """What a peer needs to reach these registered ranges: their keys, and if asked for this agent's UCX address."""
        with self._as_failure():
            return self._agent.getLocalPartialMD(self._ranges(ranges), connection, self._backend)

    def load(self, metadata: bytes) -> str:
        """Take a peer's metadata; its agent's name. Loading the same again changes nothing."""
        with self._as_failure():
            return self._agent.loadRemoteMD(metadata).decode()

    def prepare(self, peer: str, *, reads: bool, local: Array, remote: Array, nbytes: Array) -> int:
        """A transfer of all these ranges as one, to be posted any number of times. NIXL looks their registrations up."""
        operation = self._native.NIXL_READ if reads else self._native.NIXL_WRITE
        lists = [self._native.nixlXferDList(self._native.DRAM_SEG, _rows(at, nbytes)) for at in (local, remote)]
        with self._as_failure():
            return self._agent.createXferReq(operation, *lists, peer, "", self._backend)

    def post(self, transfer: int) -> bool:
        """Begin it. True when it is complete already."""
        with self._as_failure():
            return self._agent.postXferReq(transfer) == self._native.NIXL_SUCCESS

    def complete(self, transfer: int) -> bool:
        with self._as_failure():
            return self._agent.getXferStatus(transfer) == self._native.NIXL_SUCCESS

    def release(self, transfer: int) -> None:
        """Only one that is complete: NIXL's release of one in flight does not stop it."""
        with self._as_failure():
            self._agent.releaseXferReq(transfer)

    def close(self) -> bool:
        """Delete the agent: joins its thread, destroys its UCX worker and with it every connection and registration. What was
        in flight goes no further than what the kernel already has. False if something still holds the agent.
        """
        gone = weakref.ref(self._agent) if self._agent is not None else lambda: None
        self._agent = None
        return gone() is None

    @contextmanager
    def _as_failure(self) -> Iterator[None]:
        """The bindings raise a class of their own for each status, with its name as the text."""
        try:
            yield
        except self._failures as error:
            raise NixlFailure(str(error)) from error

    def _ranges(self, ranges: list[tuple[int, int]]) -> Any:
        return self._native.nixlRegDList(self._native.DRAM_SEG, [(address, nbytes, 0, "") for address, nbytes in ranges])


def _rows(addresses: Array, nbytes: Array) -> Array:
    """NIXL's descriptors: address, bytes, device."""
    return np.ascontiguousarray(np.stack([addresses, nbytes, np.zeros_like(nbytes)], axis=1))


def unreadable(ranges: list[tuple[int, int]], maps: Mapping[int, int] | None = None) -> tuple[int, int] | None:
    """The first (address, bytes) that this process could not read itself: GPU memory, or none at all. None when all can be.

    maps: start -> end of the mappings that can be read; this process's own when None (/proc/self/maps, see proc(5)).
    """
    if maps is None:
        maps = {}
        for line in Path("/proc/self/maps").read_text().splitlines():
            span, rights, *_ = line.split()
            if rights.startswith("r"):
                start, _, end = span.partition("-")
                maps[int(start, 16)] = int(end, 16)
    joined: list[list[int]] = []
    for start, end in sorted(maps.items()):
        if joined and joined[-1][1] == start:
            joined[-1][1] = end
        else:
            joined.append([start, end])
    starts = [start for start, _ in joined]
    for address, nbytes in ranges:
        at = bisect.bisect_right(starts, address) - 1
        if nbytes > 0 and (at < 0 or address + nbytes > joined[at][1]):
            return address, nbytes
    return None
