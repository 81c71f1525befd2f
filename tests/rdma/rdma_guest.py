"""A machine with RDMA verbs where there is none: a small QEMU guest with two soft-RoCE devices, to run one command in.

What it is made of are Debian packages (QEMU, a stock kernel, busybox, the user-space RDMA drivers), downloaded once and
unpacked below .venvs/rdma-guest; nothing is installed. The guest's root is this machine's own, read only, so the
environments in .venv and .venvs are there at the same paths; what the guest writes is gone with it, but for /share.

Everything is emulated in software (no KVM), about 20 times slower than the machine itself: nothing in there measures speed.

    guest = RdmaGuest(prepare(Deadline))        once; seconds when everything is there
    result = guest.run("command", seconds=300)  boots, runs it with bash in the repository, powers off
"""

from __future__ import annotations

import hashlib
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
STORE = REPOSITORY / ".venvs" / "rdma-guest"

MACHINE = ("qemu-system-x86", "busybox-static")
"""Packages that run here."""
GUEST = ("ibverbs-providers", "ibverbs-utils", "iproute2", "librdmacm1", "libnuma1", "libcurl4")
"""Packages that the guest sees as installed; those that this machine has installed are seen anyhow."""
KERNEL = "linux-image-amd64"
MODULES = ("virtio_pci", "9pnet_virtio", "9p", "overlay", "veth", "rdma_rxe", "rdma_ucm", "crc32_generic", "crc32c_generic")
"""What the guest needs of the kernel's modules; those that they depend on are found out."""
_HIDDEN_NEEDS = {"rdma_rxe": ("crc32_generic",)}
"""What a module asks the kernel for at run time, which its list of dependencies does not say."""

BOOT_SECONDS = 240.0
"""From power on to the job's first line: 15 on two idle cores, 35 on busy ones."""
_RECIPE = "1"
"""Raised when what is made of the packages changes."""


class Unavailable(Exception):
    """This machine cannot run the guest; the text is the reason, for a skip."""


@dataclass(frozen=True, slots=True)
class Store:
    """Where the unpacked parts are."""

    machine: Path
    layer: Path
    kernel: Path
    initramfs: Path


@dataclass(frozen=True, slots=True)
class Result:
    """code: the command's exit code, None if it never got to one; then `failure` says what happened instead.

    output: its standard output and error. console: what the kernel and the guest's init said. share: its files, see RdmaGuest.
    cpu_seconds: what the emulation cost, however busy the machine was.
    """

    code: int | None
    failure: str | None
    output: str
    console: str
    seconds: float
    booted_after: float | None
    cpu_seconds: float
    share: Path

    def explain(self) -> str:
        """For a person, when something went wrong."""
        what = self.failure or f"the command ended with {self.code}"
        return f"{what}\n--- output, last lines\n{_tail(self.output)}\n--- console, last lines\n{_tail(self.console)}"


def _tail(text: str, lines: int = 60) -> str:
    return "\n".join(text.splitlines()[-lines:])


def prepare(store: Path = STORE, *, seconds: float = 600.0) -> Store:
    """Download and unpack what is missing, and make the initramfs. Unavailable, with the reason, where that cannot be done."""
    if sys.platform != "linux" or os.uname().machine != "x86_64":
        raise Unavailable("the guest needs Linux on x86-64")
    if any(shutil.which(tool) is None for tool in ("apt-get", "apt-cache", "dpkg-deb")):
        raise Unavailable("the guest is made of Debian packages, and there is no apt-get here")
    end = time.monotonic() + seconds
    kernel = _kernel_package()
    wanted = {
        "machine": _missing(MACHINE, end),
        "layer": _missing(GUEST, end),
        "kernel": [kernel],
    }
    made = Store(store / "machine", store / "layer", store / "kernel", store / "initramfs.gz")
    if _outdated(store / "stamp-packages", wanted):
        print(f"rdma guest: downloading and unpacking Debian packages into {store} (once)", flush=True)
        shutil.rmtree(store, ignore_errors=True)
        for part, packages in wanted.items():
            _unpack(packages, store / part, end)
        _stamp(store / "stamp-packages", wanted)
    booted = [wanted, MODULES, (Path(__file__).parent / "guest_init").read_text()]
    if _outdated(store / "stamp-initramfs", booted):
        _initramfs(made)
        _stamp(store / "stamp-initramfs", booted)
    return made


def _outdated(stamp: Path, inputs: object) -> bool:
    return not stamp.exists() or stamp.read_text() != _label(inputs)


def _stamp(stamp: Path, inputs: object) -> None:
    stamp.write_text(_label(inputs))


def _label(inputs: object) -> str:
    return hashlib.sha256(repr((_RECIPE, inputs)).encode()).hexdigest()


def _kernel_package() -> str:
    """linux-image-amd64 is empty and depends on the kernel of the day."""
    found = subprocess.run(["apt-cache", "depends", KERNEL], capture_output=True, text=True, check=False, timeout=60)
    names = re.findall(r"Depends: (linux-image-\S+)", found.stdout)
    if not names:
        raise Unavailable(f"apt knows no kernel package ({KERNEL}): is `apt-get update` needed?")
    return names[0]


def _missing(packages: Sequence[str], end: float) -> list[str]:
    """name=version of each of these packages, and of what they need, that is not installed here (in whatever version)."""
    words = ["apt-get", "-s", "-qq", "--no-install-recommends", "install", *packages]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=_left(end))
    if done.returncode != 0:
        raise Unavailable(f"apt-get cannot resolve {', '.join(packages)}: {done.stderr.strip().splitlines()[-1:]}")
    return sorted(f"{name}={version}" for name, version in re.findall(r"^Inst (\S+) \((\S+)", done.stdout, re.MULTILINE))


def _unpack(packages: Sequence[str], folder: Path, end: float) -> None:
    """Into `folder`, with /bin, /sbin and /lib below /usr, as on the machine that it is laid over."""
    folder.mkdir(parents=True)
    if not packages:
        return
    with tempfile.TemporaryDirectory(dir=folder.parent) as downloads:
        words = ["apt-get", "-qq", "download", *packages]
        done = subprocess.run(words, cwd=downloads, capture_output=True, text=True, check=False, timeout=_left(end))
        if done.returncode != 0:
            raise Unavailable(f"apt-get could not download {', '.join(packages)}: {done.stderr.strip()[-300:]}")
        for package in sorted(Path(downloads).glob("*.deb")):
            subprocess.run(["dpkg-deb", "-x", str(package), str(folder)], check=True, timeout=_left(end))
    for name in ("bin", "sbin", "lib", "lib64"):
        if (folder / name).is_dir():
            shutil.copytree(folder / name, folder / "usr" / name, symlinks=True, dirs_exist_ok=True)
            shutil.rmtree(folder / name)


def _left(end: float) -> float:
    return max(1.0, end - time.monotonic())


def _initramfs(store: Store) -> None:
    """busybox, the modules and our init, as the archive that the kernel boots into. busybox packs it itself."""
    modules = {path.stem.replace("-", "_"): path for path in store.kernel.glob("usr/lib/modules/*/kernel/**/*.ko")}
    busybox = store.machine / "usr/bin/busybox"
    source = busybox if busybox.exists() else Path(shutil.which("busybox") or "/nowhere/busybox")
    with tempfile.TemporaryDirectory() as made:
        root = Path(made)
        for name in ("proc", "sys", "dev", "bin", "modules", "host", "layer", "share", "memory", "merged"):
            (root / name).mkdir()
        shutil.copy(source, root / "bin/busybox")
        order = _in_order(MODULES, modules)
        for name in order:
            shutil.copy(modules[name], root / "modules" / f"{name}.ko")
        (root / "modules/order").write_text("".join(f"{name}.ko\n" for name in order))
        shutil.copy(Path(__file__).parent / "guest_init", root / "init")
        (root / "init").chmod(0o755)
        listing = "\n".join(sorted(str(path.relative_to(root)) for path in root.rglob("*")))
        packing = [str(root / "bin/busybox"), "cpio", "-o", "-H", "newc"]
        packed = subprocess.run(packing, cwd=root, input=listing.encode(), capture_output=True, check=True, timeout=60)
        store.initramfs.write_bytes(subprocess.run(["gzip", "-1"], input=packed.stdout, capture_output=True, check=True).stdout)


def _in_order(names: Sequence[str], modules: Mapping[str, Path]) -> list[str]:
    """These modules and what they depend on, dependencies first. A name that no file has is built into the kernel."""
    order: list[str] = []

    def add(name: str) -> None:
        name = name.replace("-", "_")
        if name in order or name not in modules:
            return
        # The dependencies are in the module's own .modinfo section, as "depends=a,b".
        found = re.search(rb"\0depends=([^\0]*)\0", modules[name].read_bytes())
        for other in [*(found.group(1).decode().split(",") if found else []), *_HIDDEN_NEEDS.get(name, ())]:
            add(other)
        order.append(name)

    for name in names:
        add(name)
    return order


@dataclass(slots=True)
class RdmaGuest:
    """One guest at a time. share: a folder here that is /share in there, writable from both sides; made by run() if None.

    megabytes, cores: the guest's.
    """

    store: Store
    megabytes: int = 3072
    cores: int = 2
    share: Path | None = None
    listen: Callable[[str], None] = field(default=lambda text: None)

    def run(self, command: str, *, seconds: float, boot_seconds: float = BOOT_SECONDS) -> Result:
        """Boot, run `command` in the repository, power off.

        After boot_seconds without a sign of the command, or `seconds` after its first, the guest is killed: that is a failure
        with the console to show, never a hang.
        """
        share = Path(tempfile.mkdtemp(prefix="rdma-guest-")) if self.share is None else self.share
        share.mkdir(parents=True, exist_ok=True)
        for name in ("output", "code"):
            (share / name).unlink(missing_ok=True)
        environment = "export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/run LANG=C.UTF-8 OMP_NUM_THREADS=1"
        # numpy's AVX2 argsort crashes on the emulated CPU (numpy 2.3, QEMU of Debian 12).
        environment += "\nexport NPY_DISABLE_CPU_FEATURES='AVX512F AVX512CD AVX512_SKX AVX2'"
        (share / "job").write_text(f"{environment}\nulimit -l unlimited\ncd {REPOSITORY}\necho guest-ready\n{command}\n")
        console = share / "console"
        began, used = time.monotonic(), _children_seconds()
        with (share / "qemu").open("wb") as said:
            process = subprocess.Popen(
                self._words(share, console),
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                env={**os.environ, "LD_LIBRARY_PATH": self._libraries()},
                start_new_session=True,
            )
            try:
                booted, failure = self._watch(process, share / "output", seconds, boot_seconds)
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        code = (share / "code").read_text().strip() if (share / "code").exists() else ""
        if failure is None and not code:
            failure = f"the guest ended (QEMU exit code {process.returncode}) before its command did: {_read(share / 'qemu')}"
        return Result(
            code=int(code) if code and failure is None else None,
            failure=failure,
            output=_read(share / "output"),
            console=_read(console),
            seconds=time.monotonic() - began,
            booted_after=booted,
            cpu_seconds=_children_seconds() - used,
            share=share,
        )

    def _watch(
        self, process: subprocess.Popen[bytes], output: Path, seconds: float, boot_seconds: float
    ) -> tuple[float | None, str | None]:
        """(seconds until the command began, None or what went wrong)."""
        began, booted, shown = time.monotonic(), None, 0
        while True:
            ended = process.poll() is not None
            if output.exists():
                with output.open("rb") as file:
                    file.seek(shown)
                    news = file.read()
                if news and booted is None:
                    booted = time.monotonic() - began
                whole = news if ended else news[: news.rfind(b"\n") + 1]
                if whole:
                    shown += len(whole)
                    self.listen(whole.decode(errors="replace"))
            if ended:
                return booted, None
            passed = time.monotonic() - began
            if booted is None and passed > boot_seconds:
                return None, f"the guest did not come up within {boot_seconds:g} s; it was killed"
            if booted is not None and passed > booted + seconds:
                return booted, f"the command did not end within {seconds:g} s; the guest was killed"
            time.sleep(0.2)

    def _words(self, share: Path, console: Path) -> list[str]:
        (kernel,) = self.store.kernel.glob("boot/vmlinuz-*")
        own = self.store.machine / "usr/bin/qemu-system-x86_64"
        qemu = str(own) if own.exists() else str(shutil.which("qemu-system-x86_64"))
        folders = [self.store.machine / "usr/share" / name for name in ("qemu", "seabios")]
        return [
            qemu,
            *(word for folder in folders if folder.exists() for word in ("-L", str(folder))),
            *("-machine", "q35,accel=tcg", "-cpu", "max", "-m", f"{self.megabytes}M", "-smp", str(self.cores)),
            *("-nodefaults", "-no-user-config", "-display", "none", "-serial", f"file:{console}", "-no-reboot", "-nic", "none"),
            *("-kernel", str(kernel), "-initrd", str(self.store.initramfs)),
            # A panic ends the guest at once (-no-reboot).
            *("-append", "console=ttyS0 quiet panic=-1 mitigations=off"),
            *("-virtfs", "local,path=/,mount_tag=host,security_model=none,readonly=on,multidevs=remap"),
            *("-virtfs", f"local,path={self.store.layer},mount_tag=layer,security_model=none,readonly=on"),
            *("-virtfs", f"local,path={share},mount_tag=share,security_model=none"),
        ]

    def _libraries(self) -> str:
        folders = [*(self.store.machine / "usr/lib").glob("*-linux-gnu")]
        return ":".join(map(str, folders)) + (f":{old}" if (old := os.environ.get("LD_LIBRARY_PATH")) else "")


def _children_seconds() -> float:
    """CPU time of processes of ours that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""
