"""What this machine offers for moving weights, and why a strategy cannot work here: found out before anything is started.

Standard library only; nothing is changed and no process is left behind. `facts` looks, `reachable` judges, `require` refuses.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from weight_sync.errors import ConfigError
from weight_sync.transport.rdma import GID_VARIABLES, RdmaPort, driven_devices, ports, text, wanted_gid

_COMMAND_SECONDS = 20.0
_ENOUGH_MEMLOCK = 1 << 30
_CAP_IPC_LOCK, _CAP_SYS_PTRACE = 14, 19
environment_lock = threading.Lock()
"""Held while UCX's variables are other than the user's (nixl_agent), so that another thread's preflight does not see that."""
UCX_VARIABLES = ("UCX_TLS", "UCX_NET_DEVICES")
"""What UCX may use. The first is ours to set for a NIXL agent; the second is, where devices are chosen."""


@dataclass(frozen=True, slots=True)
class MooncakeBuild:
    """The installed Mooncake. nvlink_intra: whether the build can do it, None when it does not say.

    error: why it cannot be imported, None when it can.
    """

    distribution: str
    version: str
    nvlink_intra: bool | None
    error: str | None


@dataclass(frozen=True, slots=True)
class NixlBuild:
    """The installed NIXL, found by its metadata; it is not imported to find out."""

    distribution: str
    version: str


@dataclass(frozen=True, slots=True)
class Facts:
    """One machine, as seen by this process.

    memlock: bytes that may be pinned, None for unlimited (or CAP_IPC_LOCK). gpus: names; None when not looked for.
    nvlink: whether any NVLink is up, None when that cannot be told. ptrace_scope: Yama's, None where there is no Yama.
    environment: the variables that are set and steer Mooncake or UCX. driven: RDMA devices that the system's libibverbs has a
    driver for; None where there is no libibverbs, or it was not asked because the kernel has no device.
    """

    rdma_ports: tuple[RdmaPort, ...]
    verbs_devices: tuple[str, ...]
    memlock: int | None
    gpus: tuple[str, ...] | None
    nvlink: bool | None
    mooncake: MooncakeBuild | None
    ptrace_scope: int | None
    may_ptrace: bool
    linux: bool
    environment: Mapping[str, str]
    nixl: NixlBuild | None = None
    driven: tuple[str, ...] | None = None


def facts(root: Path = Path("/"), *, gpus: bool = True) -> Facts:
    """Look at this machine. `root` stands for /sys, /dev and /proc elsewhere (tests); gpus=False spares running nvidia-smi."""
    capabilities = _capabilities(root)
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    unlimited = soft == resource.RLIM_INFINITY or bool(capabilities >> _CAP_IPC_LOCK & 1)
    names = _gpus(root) if gpus else None
    scope = text(root / "proc/sys/kernel/yama/ptrace_scope")
    rdma_ports = ports(root / "sys/class/infiniband")
    return Facts(
        rdma_ports=rdma_ports,
        verbs_devices=tuple(sorted(p.name for p in (root / "dev/infiniband").glob("uverbs*"))),
        memlock=None if unlimited else soft,
        gpus=names,
        nvlink=_nvlink() if names else None,
        mooncake=_mooncake(),
        ptrace_scope=int(scope) if scope.isdigit() else None,
        may_ptrace=bool(capabilities >> _CAP_SYS_PTRACE & 1),
        linux=sys.platform == "linux",
        environment=_environment(),
        nixl=_nixl(),
        driven=driven_devices() if rdma_ports else None,
    )


EXPOSURE = (
    "No transport authenticates its peers. Mooncake and UCX (under NIXL) listen on all interfaces, and whoever can connect can "
    "read and overwrite registered memory: keep their ports inside a private network or behind a firewall (docs/security.md).",
    "p2p_cma and p2p_ipc open no port; any process of the same user can do what they do.",
)
"""What every user must be told, in two lines; doctor prints them."""


def reachable(found: Facts) -> dict[str, str | None]:
    """For each strategy, best first: None when it can work on this machine, else the reason why not."""
    return {
        "p2p_ipc": _why_not_gpus(found),
        "p2p_nvlink": _why_not_mooncake(found) or _why_not_nvlink(found),
        "p2p_rdma": _why_not_mooncake(found) or _why_not_rdma(found),
        "p2p_nixl_rdma": _why_not_nixl(found) or _why_not_verbs(found) or _why_not_driven(found),
        "p2p_cma": _why_not_cma(found),
        "p2p_tcp": _why_not_mooncake(found),
        "p2p_nixl": _why_not_nixl(found),
    }


_STRATEGIES = {
    ("mooncake", "tcp"): "p2p_tcp",
    ("mooncake", "rdma"): "p2p_rdma",
    ("mooncake", "nvlink_intra"): "p2p_nvlink",
    ("nixl", "tcp"): "p2p_nixl",
    ("nixl", "rdma"): "p2p_nixl_rdma",
    ("cma", None): "p2p_cma",
    ("cuda_ipc", None): "p2p_ipc",
}


def strategy_for(transport: str, options: Mapping[str, object]) -> str | None:
    """Which preflight a transport needs, by name and protocol: a strategy file of your own is checked by what it uses."""
    protocol = options.get("protocol")
    return _STRATEGIES.get((transport, None if protocol is None else str(protocol)))


def require(strategy: str, found: Facts | None = None) -> Facts:
    """ConfigError, with everything that was looked for and what would work instead, unless `strategy` can work here.

    Returns what was seen.
    """
    seen = facts(gpus=strategy in ("p2p_nvlink", "p2p_ipc")) if found is None else found
    verdicts = reachable(seen)
    if strategy not in verdicts:
        raise ConfigError(f"unknown strategy {strategy!r}; preflight knows {', '.join(verdicts)}")
    if verdicts[strategy] is None:
        return seen
    seen = facts() if found is None else found
    raise ConfigError(f"{strategy} cannot work on this machine: {verdicts[strategy]}\n{report(seen)}")


def report(found: Facts) -> str:
    """What was looked for and found, and every strategy with its verdict; several lines."""
    seen = "; ".join(map(str, found.rdma_ports))
    build = found.mooncake
    lines = [
        f"  RDMA devices in /sys/class/infiniband: {seen or 'none'}; verbs devices in /dev/infiniband: "
        f"{', '.join(found.verbs_devices) or 'none'}; memlock limit: "
        f"{'unlimited' if found.memlock is None else f'{found.memlock} bytes'}",
        f"  NVIDIA GPUs: {'not looked for' if found.gpus is None else ', '.join(found.gpus) or 'none'}; NVLink up: "
        f"{ {True: 'yes', False: 'no', None: 'not known'}[found.nvlink] }",
        "  Mooncake: "
        + ("not installed" if build is None else f"{build.distribution} {build.version}")
        + (f", cannot be imported: {build.error}" if build is not None and build.error else "")
        + f"; NIXL: {'not installed' if found.nixl is None else f'{found.nixl.distribution} {found.nixl.version}'}",
        f"  variables for Mooncake and UCX: {', '.join(f'{k}={v}' for k, v in found.environment.items()) or 'none'}; "
        f"yama/ptrace_scope: {'absent' if found.ptrace_scope is None else found.ptrace_scope}",
    ]
    verdicts = reachable(found)
    working = [name for name, reason in verdicts.items() if reason is None]
    lines.append(f"  would work here: {', '.join(working)}")
    lines += [f"  would not: {name}: {reason}" for name, reason in verdicts.items() if reason is not None]
    return "looked for, and found:\n" + "\n".join(lines)


def load_mooncake() -> ModuleType:
    """Import mooncake.engine. Its log level is read from MC_LOG_LEVEL at import and never again, so the first import of
    the process decides; ERROR unless the user has set it. One "Local segment descriptor not found" for each engine is
    logged as an error all the same, and means nothing. Raises ImportError or OSError where it is not installed right.
    """
    quiet = "MC_LOG_LEVEL" not in os.environ
    if quiet:
        os.environ["MC_LOG_LEVEL"] = "ERROR"
    try:
        return importlib.import_module("mooncake.engine")
    finally:
        if quiet:
            del os.environ["MC_LOG_LEVEL"]


def _why_not_mooncake(found: Facts) -> str | None:
    if found.mooncake is None:
        return "Mooncake is not installed (extra `mooncake`, or `mooncake_cuda` for GPU memory)"
    if found.mooncake.error is not None:
        return f"Mooncake cannot be imported: {found.mooncake.error}"
    return None


def _why_not_nixl(found: Facts) -> str | None:
    if found.nixl is None:
        return "NIXL is not installed (extra `nixl`)"
    if "UCX_TLS" in found.environment:
        return f"UCX_TLS={found.environment['UCX_TLS']} is set, which this strategy has to set itself"
    return None


def _why_not_verbs(found: Facts) -> str | None:
    if not found.rdma_ports:
        return "no RDMA device in /sys/class/infiniband"
    if not any(port.usable for port in found.rdma_ports):
        return f"no RDMA port is active and has a GID: {'; '.join(map(str, found.rdma_ports))}"
    if not found.verbs_devices:
        return "no uverbs device in /dev/infiniband (in a container: pass the device files in)"
    if found.memlock is not None and found.memlock < _ENOUGH_MEMLOCK:
        return f"only {found.memlock} bytes may be pinned (ulimit -l), which is too little to register weights"
    return None


def _why_not_rdma(found: Facts) -> str | None:
    if reason := _why_not_verbs(found):
        return reason
    try:
        wanted_gid([port for port in found.rdma_ports if port.usable], found.environment)
    except ConfigError as error:
        return str(error)
    if "MC_FORCE_TCP" in found.environment:
        return "MC_FORCE_TCP is set, so Mooncake would use tcp"
    return None


def undriven(found: Facts) -> tuple[str, ...]:
    """Usable RDMA devices that the system's libibverbs has no driver for."""
    usable = dict.fromkeys(port.device for port in found.rdma_ports if port.usable)
    return tuple(name for name in usable if name not in (found.driven or ()))


def _why_not_driven(found: Facts) -> str | None:
    """Mooncake would find none of them either; but it is NIXL that says nothing about it but NIXL_ERR_BACKEND."""
    if missing := undriven(found):
        what = "is not there" if found.driven is None else f"has no driver for {', '.join(missing)}"
        return f"the system's libibverbs {what} (Debian: libibverbs1, ibverbs-providers)"
    return None


def _why_not_gpus(found: Facts) -> str | None:
    if found.gpus is None:
        return "GPUs were not looked for"
    if not found.gpus:
        return "no NVIDIA GPU (asked nvidia-smi, looked in /proc/driver/nvidia/gpus)"
    return None


def _why_not_nvlink(found: Facts) -> str | None:
    if reason := _why_not_gpus(found):
        return reason
    assert found.gpus is not None
    assert found.mooncake is not None
    if found.mooncake.nvlink_intra is False:
        return f"{found.mooncake.distribution} {found.mooncake.version} is built without nvlink_intra"
    if found.nvlink is False and len(found.gpus) > 1:
        return "none of the GPUs has an NVLink that is up (nvidia-smi nvlink --status)"
    return None


def _why_not_cma(found: Facts) -> str | None:
    if not found.linux:
        return "process_vm_writev exists on Linux only"
    if found.ptrace_scope in (2, 3) and not (found.ptrace_scope == 2 and found.may_ptrace):
        return f"yama/ptrace_scope is {found.ptrace_scope}: no process may write into another one"
    return None


def _environment() -> dict[str, str]:
    names = (*GID_VARIABLES, *UCX_VARIABLES)
    with environment_lock:
        return {name: value for name, value in sorted(os.environ.items()) if name.startswith("MC_") or name in names}


def _gpus(root: Path) -> tuple[str, ...]:
    listed = _command("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
    if listed:
        return tuple(line.strip() for line in listed.splitlines() if line.strip())
    found = []
    for information in sorted((root / "proc/driver/nvidia/gpus").glob("*/information")):
        model = [line for line in text(information).splitlines() if line.startswith("Model:")]
        found.append(model[0].partition(":")[2].strip() if model else information.parent.name)
    return tuple(found)


def _nvlink() -> bool | None:
    status = _command("nvidia-smi", "nvlink", "--status")
    return None if status is None else "GB/s" in status


@functools.cache
def _mooncake() -> MooncakeBuild | None:
    """Looked for once in a process, and by the names of folders: reading the metadata of every installed distribution for each
    engine that is opened would cost more than opening it. Names differ by flavour (cuda13, non-cuda), so a prefix tells.
    """
    folders = (found for folder in sys.path for found in Path(folder or ".").glob("mooncake_transfer_engine*.dist-info"))
    installed = [importlib.metadata.Distribution.at(folder) for folder in folders]
    if not installed:
        return None
    name, version = min((d.metadata["Name"], d.version) for d in installed)
    try:
        engine = load_mooncake()
    except (ImportError, OSError) as error:  # a missing libibverbs.so.1 shows here
        return MooncakeBuild(name, version, None, str(error))
    supported = getattr(engine, "SUPPORT_INTRA_NVLINK", None)
    return MooncakeBuild(name, version, None if supported is None else bool(supported), None)


@functools.cache
def _nixl() -> NixlBuild | None:
    """As _mooncake: by the names of folders."""
    folders = (found for folder in sys.path for found in Path(folder or ".").glob("nixl_cu*.dist-info"))
    installed = [importlib.metadata.Distribution.at(folder) for folder in folders]
    return min((NixlBuild(d.metadata["Name"], d.version) for d in installed), key=str, default=None)


def _capabilities(root: Path) -> int:
    for line in text(root / "proc/self/status").splitlines():
        if line.startswith("CapEff:"):
            return int(line.split()[1], 16)
    return 0


def _command(*words: str) -> str | None:
    """Standard output, or None when there is no such program or it fails: both mean that the fact is not known."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_COMMAND_SECONDS, check=False)
    except (FileNotFoundError, PermissionError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
