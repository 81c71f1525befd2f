"""One process of `bench link`: a buffer, a transport over it, one side of a small session.

The parent calls its methods by name. A HostPeer's buffer is in host memory, a DevicePeer's on a GPU of its own; what is
measured has the same name on both.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from weight_sync.errors import ConfigError, WeightSyncError
from weight_sync.ids import ITEMSIZE, Deadline
from weight_sync.quant.kernel import Job, Kernel, kernel_for
from weight_sync.quant.scheme import load_scheme
from weight_sync.session.contracts import RankDescription
from weight_sync.session.digests import LANES, XXH3
from weight_sync.session.inprocess import arrays_for
from weight_sync.session.inputs import Declared, dims_of, layout_of
from weight_sync.session.memory import memory_of
from weight_sync.session.source import SourceAgent
from weight_sync.session.target import TargetAgent
from weight_sync.transport import registry
from weight_sync.transport.base import Batch, Endpoint, Region

SECONDS = 120.0
"""Longest time one measurement may take."""
_SCHEME, _WEIGHT = "fp8_block", (1024, 2048)
"""What is quantised: weights of so many rows and columns."""


class _Source:
    """TrainerSource of rank 0 over tensors that nobody steps."""

    def __init__(self, live: Mapping[str, Any], coords: Mapping[str, int]) -> None:
        self._live, self._coords = live, dict(coords)

    def describe(self) -> RankDescription:
        memory = memory_of(self._live, "trainer rank 0")
        return RankDescription(0, "localhost", self._coords, memory.epoch, memory.params, memory.storages, device=memory.device)

    def tensors(self) -> Mapping[str, Any]:
        return self._live

    def quiesce(self) -> None: ...

    def release(self) -> None: ...


class HostPeer:
    """See the module docstring. options: of the transport, with its name. number: which GPU, for a DevicePeer."""

    kind = XXH3

    def __init__(self, options: Mapping[str, Any], nbytes: int, number: int) -> None:
        self.options, self.nbytes = dict(options), nbytes
        self.prepare(number)
        self.buffer = self.allocate(nbytes)
        self.transport = self.open()
        self.transport.register([Region(self.address, nbytes)])
        self.source: SourceAgent | None = None
        self.target: TargetAgent | None = None

    def open(self) -> Any:
        rest = dict(self.options)
        return registry.create(rest.pop("name"), **rest)

    # -- what differs on a GPU ---------------------------------------------------------------------------------------

    def prepare(self, number: int) -> None: ...

    def allocate(self, nbytes: int) -> Any:
        return np.ones(nbytes, np.uint8)

    @property
    def address(self) -> int:
        return int(self.buffer.ctypes.data)

    def words(self, count: int) -> Any:
        """16-bit words of normally distributed bfloat16 values, so that they quantise to many different ones."""
        values = np.random.default_rng(1).normal(0, 0.02, min(count, 1 << 20)).astype(np.float32)
        return np.resize((values.view(np.uint32) >> 16).astype(np.uint16), count)

    def beside(self, array: Any) -> Any:
        return array

    def settle(self) -> None: ...

    def copied(self) -> float:
        """Seconds a byte of a strided copy: rows of 2 KB out of rows of 4 KB."""
        rows = self.buffer[: len(self.buffer) // 8192 * 8192].reshape(-1, 4096)
        target = np.empty((len(rows), 2048), np.uint8)
        target[...] = 0  # touch the pages
        began = time.perf_counter()
        target[...] = rows[:, :2048]
        return (time.perf_counter() - began) / target.nbytes

    def tensors(self, layout: Any) -> dict[str, Any]:
        """Of torch where it is installed, as a trainer's and an engine's are: arrays are slower to look at."""
        try:
            import torch  # pyright: ignore[reportMissingImports]
        except ImportError:
            return arrays_for(layout, 0)
        return {p.name: torch.zeros(p.shape, dtype=getattr(torch, p.dtype)) for p in layout.rank_params(0)}

    @property
    def memory_bytes(self) -> float:
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))

    def host_rate(self) -> float:
        """Bytes/s between this memory and the host's; 0 where it is the host's."""
        return 0.0

    # -- link --------------------------------------------------------------------------------------------------------

    def describe(self) -> tuple[int, dict[str, Any]]:
        return self.address, self.transport.describe().to_json()

    def probe(self, endpoint: Mapping[str, Any]) -> None:
        self.transport.probe(Endpoint.from_json(endpoint), Deadline.after(SECONDS))

    def write(self, address: int, endpoint: Mapping[str, Any], size: int, count: int) -> float:
        """Seconds of `count` writes of `size` bytes, handed over in batches as a sync does."""
        each = max(1, self.transport.batch_bytes // size)
        at = np.arange(count, dtype=np.int64) * size % (self.nbytes - size + 1)
        batches = [
            Batch(
                Endpoint.from_json(endpoint), part + self.address, part + address, np.full(len(part), size, np.int64),
                ["measured"] * len(part),
            )
            for part in (at[low : low + each] for low in range(0, count, each))
        ]  # fmt: skip
        seconds = 0.0
        for _ in range(2 if self.kind == LANES else 1):  # batches that come again, as in every sync, have their tables made
            began = time.perf_counter()
            tickets = [self.transport.write(batch) for batch in batches]
            for ticket in tickets:
                self.transport.wait(ticket, Deadline.after(SECONDS))
            seconds = time.perf_counter() - began
        return seconds

    def digested(self, piece: int) -> float:
        """Seconds of hashing the whole buffer, in pieces as large as a transfer."""
        memory = memory_of({"buffer": self.buffer}, "bench link")
        count = self.nbytes // piece
        views = [memory.view("buffer", i * piece, (1,), (piece,)) for i in range(count)]
        seconds = 0.0
        for _ in range(2 if self.kind == LANES else 1):
            began = time.perf_counter()
            digests = memory.digests(self.kind)
            digests.whole("measured", range(count), lambda: views)
            digests.text(range(count))
            seconds = time.perf_counter() - began
        return seconds * self.nbytes / (count * piece)

    def quantised(self) -> tuple[float, float]:
        """(bytes of weights seen a second, bytes that kernels read and write a second) of quantising to fp8 in blocks."""
        from weight_sync.config import quant_yaml

        scheme = load_scheme(_SCHEME, quant_yaml)
        kernel: Kernel = kernel_for(scheme, "cuda" if self.kind == LANES else "cpu")
        rows, columns = _WEIGHT
        count = max(1, min(self.nbytes, (4 << 30) if self.kind == LANES else (16 << 20)) // (2 * rows * columns))
        words = self.words(count * rows * columns)
        views = [words[i * rows * columns : (i + 1) * rows * columns].reshape(rows, columns) for i in range(count)]
        scan = kernel.prepare_scan([Job(view, "bfloat16", (0, 0), _WEIGHT) for view in views], [True] * count)
        look = self._timed(scan.run)
        groups = [-(-n // g) for n, g in zip(_WEIGHT, scheme.group, strict=True)]
        per = groups[0] * groups[1]
        amax = self.beside(np.asarray(scan.amax, np.float32))
        jobs, written = [], 0
        for i, view in enumerate(views):
            outs = {p.name: self.allocate(p.nbytes((0, 0), _WEIGHT, _WEIGHT)) for p in scheme.parts}
            written += sum(len(out) for out in outs.values())
            jobs.append(Job(view, "bfloat16", (0, 0), _WEIGHT, outs, amax[i * per : (i + 1) * per].reshape(*groups)))
        make = self._timed(kernel.prepare(jobs).run)
        read = 2 * count * rows * columns
        return read / look, (read + written) / make

    def _timed(self, run: Callable[[], Any]) -> float:
        run()  # compiles, touches pages
        self.settle()
        began = time.perf_counter()
        run()
        self.settle()
        return time.perf_counter() - began

    def cpu(self) -> float:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return usage.ru_utime + usage.ru_stime

    def nothing(self) -> None:
        return None

    def memory(self) -> tuple[float, float]:
        """(bytes of one rank's memory, rate to the host)"""
        return self.memory_bytes, self.host_rate()

    # -- one side of a small session -----------------------------------------------------------------------------------

    def begin(self, side: Declared, trainer: bool) -> int:
        """Make this side's rank; the number of its parameters."""
        layout = layout_of(side, "trainer" if trainer else "rollout")
        live, coords = self.tensors(layout), dims_of(side, "trainer" if trainer else "rollout").coords(0)
        if trainer:
            self.source = SourceAgent(_Source(live, coords), self.open)
        else:
            self.target = TargetAgent(rank=0, host="localhost", coords=coords, tensors=lambda: live, transport=self.open)
        return len(live)

    def agent(self, method: str, payload: Mapping[str, Any]) -> tuple[float, dict[str, Any]]:
        """Seconds of a call to this side's agent, and its reply."""
        agent = self.source or self.target
        assert agent is not None
        began = time.perf_counter()
        reply = agent.call(method, payload)
        return time.perf_counter() - began, reply

    def close(self) -> None:
        self.transport.close()


class DevicePeer(HostPeer):
    """The same on GPU `number`. Needs torch and Triton."""

    kind = LANES

    def prepare(self, number: int) -> None:
        try:
            import torch  # pyright: ignore[reportMissingImports]
            import triton  # noqa: F401  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise ConfigError(f"bench link on GPUs needs torch and triton: {error}") from None
        if torch.cuda.device_count() < 2:
            raise ConfigError(f"bench link on GPUs measures between two of them; torch finds {torch.cuda.device_count()}")
        self.torch = torch
        self.device = torch.device("cuda", number)
        torch.cuda.set_device(self.device)

    def allocate(self, nbytes: int) -> Any:
        return self.torch.ones(nbytes, dtype=self.torch.uint8, device=self.device)

    @property
    def address(self) -> int:
        return int(self.buffer.data_ptr())

    def words(self, count: int) -> Any:
        values = self.torch.empty(count, dtype=self.torch.bfloat16, device=self.device)
        return values.normal_(0, 0.02).view(self.torch.int16)

    def beside(self, array: Any) -> Any:
        return self.torch.from_numpy(array).to(self.device)

    def settle(self) -> None:
        self.torch.cuda.synchronize(self.device)

    def copied(self) -> float:
        rows = self.buffer[: len(self.buffer) // 8192 * 8192].view(-1, 4096)
        target = self.torch.zeros((len(rows), 2048), dtype=self.torch.uint8, device=self.device)
        return self._timed(lambda: target.copy_(rows[:, :2048])) / target.nbytes

    def tensors(self, layout: Any) -> dict[str, Any]:
        return {
            p.name: self.allocate(p.numel * ITEMSIZE[p.dtype]).view(getattr(self.torch, p.dtype)).view(p.shape)
            for p in layout.rank_params(0)
        }

    @property
    def memory_bytes(self) -> float:
        return float(self.torch.cuda.get_device_properties(self.device).total_memory)

    def host_rate(self) -> float:
        part = self.buffer[: 1 << 28]
        host = self.torch.empty(len(part), dtype=self.torch.uint8, pin_memory=True)
        return len(part) / self._timed(lambda: host.copy_(part, non_blocking=True))


def serve(connection: Any, options: Mapping[str, Any], nbytes: int, device: bool, number: int) -> None:
    peer: HostPeer | None = None
    while (message := connection.recv()) is not None:
        try:
            if peer is None:
                peer = (DevicePeer if device else HostPeer)(options, nbytes, number)
            connection.send((True, getattr(peer, message[0])(*message[1:])))
        except Exception as error:  # noqa: BLE001 - goes to the parent, which raises it
            connection.send((False, error))


class Remote:
    """The parent's handle of a peer in a process of its own."""

    def __init__(self, options: Mapping[str, Any], nbytes: int, device: bool, number: int) -> None:
        context = mp.get_context("spawn")
        self._connection, child = context.Pipe()
        self.process = context.Process(target=serve, args=(child, options, nbytes, device, number), daemon=True)
        self.process.start()
        self._asked = ""

    def ask(self, *message: Any) -> None:
        self._asked = message[0]
        self._connection.send(message)

    def answer(self) -> Any:
        if not self._connection.poll(SECONDS):
            raise WeightSyncError(f"bench link: a process gave no answer to {self._asked} for {SECONDS:g} s")
        good, value = self._connection.recv()
        if not good:
            raise value
        return value

    def call(self, *message: Any) -> Any:
        self.ask(*message)
        return self.answer()

    def end(self) -> None:
        self._connection.send(None)
        self.process.join(10)
        if self.process.is_alive():
            self.process.kill()


def together(peers: Sequence[Remote], *message: Any) -> list[Any]:
    """The same asked of several at once."""
    for peer in peers:
        peer.ask(*message)
    return [peer.answer() for peer in peers]
