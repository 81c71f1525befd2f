"""The RDMA devices of this machine, and peers in processes of their own that start at once.

A peer's interpreter takes half a minute to import what it needs where everything is emulated, so peers are forked from a server
that has imported it and has opened nothing (multiprocessing's fork server).
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from multiprocessing import forkserver
from typing import Any

from agent_process import exchange_pages
from transport_peer import CANARY, LocalPeer, serve

from weight_sync.transport import rdma
from weight_sync.transport.base import Endpoint

PORTS = [port for port in rdma.ports() if port.usable and port.port == 1]
"""The first port of every usable device."""
ADDRESS = {port.device: next((g.address for g in port.gids if "." in g.address), port.gids[-1].address) for port in PORTS}
"""device -> an address of it that peers reach, IPv4 where there is one."""
NEAR = PORTS[0].device if PORTS else ""
FAR = PORTS[1].device if len(PORTS) > 1 else NEAR
"""Two devices of this machine that stand for two hosts."""

PATIENCE = 180.0
"""Seconds for a peer's answer."""


def options(device: str = NEAR, **more: Any) -> dict[str, Any]:
    """A transport's options on one device, at its own address."""
    return {"protocol": "rdma", "devices": device, "host": ADDRESS.get(device, "127.0.0.1"), **more}


_context = multiprocessing.get_context("forkserver")


def warm() -> None:
    """Start the fork server, with its imports.

    Python 3.11 does not tell it our sys.path, and it passes over modules that it does not find; so they are in its PYTHONPATH.
    """
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    _context.set_forkserver_preload(["rdma_warm"])
    forkserver.ensure_running()
    if before is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = before


class WarmPeer:
    """What transport_peer.ProcessPeer is, over a pipe. environment: set in the peer before it imports Mooncake, which reads it
    then; so such a peer is started from nothing."""

    def __init__(
        self,
        config: dict[str, Any],
        nbytes: int,
        spans: list[tuple[int, int]],
        environment: dict[str, str] | None = None,
        *,
        transport: str = "mooncake",
    ) -> None:
        context = multiprocessing.get_context("spawn") if environment else _context
        self._pipe, theirs = context.Pipe()
        words = (theirs, transport, config, nbytes, spans, environment or {})
        self._process = context.Process(target=run, args=words, daemon=True)
        self._process.start()
        theirs.close()
        said = self._answer()
        self.spans, self.nbytes, self.pid = spans, nbytes, self._process.pid or 0
        self.endpoint, self.base = Endpoint.from_json(said["endpoint"]), int(said["base"])

    def _answer(self) -> Any:
        if not self._pipe.poll(PATIENCE):
            self._process.kill()
            raise AssertionError(f"the peer did not answer within {PATIENCE:g} s")
        try:
            return self._pipe.recv()
        except EOFError:
            self._process.join(5.0)
            raise AssertionError(f"the peer process ended with {self._process.exitcode}") from None

    def ask(self, *words: Any) -> Any:
        self._pipe.send(list(words))
        return self._answer()

    def digest(self) -> str:
        return self.ask("digest")

    def count(self, value: int) -> int:
        return self.ask("count", value)

    def fill(self, value: int) -> None:
        self.ask("fill", value)

    def close(self) -> None:
        self.ask("close")

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    def stop(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def end(self) -> None:
        self.kill()


def run(
    pipe: Any, transport: str, config: dict[str, Any], nbytes: int, spans: list[tuple[int, int]], environment: dict[str, str]
) -> None:
    """A peer's process. Ends when the other end of the pipe does."""
    assert bool(environment) != ("mooncake.engine" in sys.modules), "imported by the fork server, and not before its variables"
    os.environ.update(environment)

    def words() -> Any:
        while True:
            try:
                yield pipe.recv()
            except EOFError:
                return

    serve(transport, config, nbytes, spans, words(), pipe.send, _behind_the_transports_back)


def _behind_the_transports_back(peer: LocalPeer, request: list[Any]) -> Any:
    """What a process can do with memory that is registered, without telling anybody."""
    transport: Any = peer.transport
    regions = peer.arena.regions(peer.spans)
    match request:
        case ["unregister"] if transport.name == "nixl":
            native = transport._agent
            native._agent.deregisterMem(native._ranges([(r.address, r.nbytes) for r in regions]), native._backend)
            return True
        case ["register again"] if transport.name == "nixl":
            transport._agent.register([(r.address, r.nbytes) for r in regions])
            return True
        case ["unregister"]:
            return [transport._pump.engine.unregister_memory(region.address) for region in regions]
        case ["register again"]:
            return [transport._pump.engine.register_memory(region.address, region.nbytes) for region in regions]
        case ["map other pages"]:
            exchange_pages(peer.arena.data)
            return True
        case ["fork"]:
            # A child that shares all pages until one of both writes to them, and that lives on.
            child = os.fork()
            if child == 0:
                signal.pause()
            peer.fill(CANARY)  # the parent writes first: where nothing prevents it, the pages that it keeps are new ones
            return child
    raise SystemExit(f"unknown command {request}")


class WarmProcess:
    """What is used of subprocess.Popen, of a process that the fork server makes: target(*arguments) with pipes for stdio."""

    def __init__(self, target: Any, *arguments: Any) -> None:
        requests, mine = _context.Pipe(duplex=False)
        replies, theirs = _context.Pipe(duplex=False)
        self._process = _context.Process(target=_with_stdio, args=(requests, theirs, target, arguments), daemon=True)
        self._process.start()
        requests.close()
        theirs.close()
        self.stdin = os.fdopen(os.dup(mine.fileno()), "wb", buffering=0)
        self.stdout = os.fdopen(os.dup(replies.fileno()), "rb", buffering=0)
        mine.close()
        replies.close()

    @property
    def pid(self) -> int:
        return self._process.pid or 0

    def kill(self) -> None:
        self._process.kill()

    def communicate(self) -> None:
        self._process.join()
        self.stdin.close()
        self.stdout.close()


def _with_stdio(requests: Any, replies: Any, target: Any, arguments: tuple[Any, ...]) -> None:
    sys.stdin, sys.stdout = os.fdopen(os.dup(requests.fileno())), os.fdopen(os.dup(replies.fileno()), "w")
    target(*arguments)
