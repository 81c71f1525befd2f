"""Supervision of one inference server as a child process: start, wait until it answers, stop with everything it spawned.

Nothing here knows an engine. A server runs in its own session (so a terminal's Ctrl-C does not reach it half-way through
a sync, and its whole process group can be ended), writes to a log file, and every failure to come up carries the end
of that log.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import httpx

from weight_sync.errors import DeadlineExceeded, RolloutError
from weight_sync.ids import Deadline

_POLL = 0.25

_IDLE = 1.0
"""Seconds that an unused connection is kept. The engines' servers (uvicorn) close theirs after 5, as httpx would: a request
that is sent at that moment is lost, and a sync with it."""


@dataclass(slots=True)
class Server:
    """A running server. Use as a context manager, or call stop() in every case."""

    name: str
    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def tail(self, lines: int = 30) -> str:
        """The last lines of its log."""
        text = self.log.read_bytes()[-64_000:].decode(errors="replace")
        return "\n".join(text.splitlines()[-lines:])

    def check(self) -> None:
        """Raise RolloutError with the end of the log if the process has ended."""
        code = self.process.poll()
        if code is not None:
            raise RolloutError(f"server {self.name} ended with exit code {code}; its log {self.log} ends:\n{self.tail()}")

    def wait_ready(self, path: str, deadline: Deadline) -> None:
        """Return when GET `path` answers 200. Raises RolloutError if the server dies, DeadlineExceeded if it takes too long."""
        while True:
            self.check()
            left = deadline.remaining()
            if not left:
                raise DeadlineExceeded(
                    f"server {self.name}: GET {self.url}{path} not ready within {deadline.seconds:g} s; "
                    f"its log {self.log} ends:\n{self.tail()}"
                )
            try:
                if httpx.get(self.url + path, timeout=min(5.0, left)).status_code == 200:
                    return
            except httpx.TransportError:  # not listening yet: that is what we wait for, until the deadline
                pass
            time.sleep(_POLL)

    def stop(self, grace: float = 10.0) -> None:
        """End the server and its children: SIGTERM to the group, then SIGKILL after `grace` seconds. Safe to repeat."""
        group = self.process.pid
        _signal(group, signal.SIGTERM)
        deadline = Deadline.after(grace)
        while _alive(self.process, group) and deadline.remaining():
            time.sleep(0.05)
        _signal(group, signal.SIGKILL)
        self.process.wait()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()


def start_server(
    name: str, url: str, command: Sequence[str], environment: Mapping[str, str], log: Path, ready: str, deadline: Deadline
) -> Server:
    """Start `command` and wait until GET url + `ready` answers 200.

    Args:
        environment: set over this process's environment.
        log: file for its standard output and error; the folder is made, an old file is replaced.
    Raises: RolloutError (it died; the log's end is in the message), DeadlineExceeded. In both cases nothing is left running.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        process = subprocess.Popen(
            list(command),
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    server = Server(name, url, process, log)
    try:
        server.wait_ready(ready, deadline)
    except BaseException:
        server.stop(grace=2.0)
        raise
    return server


def quiet_client(*urls: str, token: str | None = None) -> httpx.Client:
    """An HTTP client for one or more servers (scheme, host and port); with one, paths are relative to it.

    httpx logs every request with its address at INFO, which a job that sets up logging would print: not for these servers.
    Other users of httpx in this process keep theirs. Proxies from the environment are not used: engines are on the local
    network.
    """
    _quiet.hosts |= {httpx.URL(url).netloc for url in urls}
    if _quiet not in logging.getLogger("httpx").filters:
        logging.getLogger("httpx").addFilter(_quiet)
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    limits = httpx.Limits(keepalive_expiry=_IDLE)
    return httpx.Client(base_url=urls[0] if len(urls) == 1 else "", trust_env=False, headers=headers, limits=limits)


class _Quiet(logging.Filter):
    """Drops httpx's request lines, at INFO and below, that go to one of `hosts` (host and port)."""

    def __init__(self) -> None:
        super().__init__()
        self.hosts: set[bytes] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        arguments = record.args if isinstance(record.args, tuple) else ()
        ours = any(isinstance(value, httpx.URL) and value.netloc in self.hosts for value in arguments)
        return record.levelno > logging.INFO or not ours


_quiet = _Quiet()


def free_port(host: str) -> int:
    """A port that is free now and that the kernel will not give away while a server takes a minute to come up.

    Ports of outgoing connections and of listeners that ask for any port come from the ephemeral range; this one lies
    below it. Raises RolloutError when a hundred random ones are all taken.
    """
    lowest_ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    low = max(1024, lowest_ephemeral - 12_000)
    for _ in range(100):
        # SGLang takes further ports up to about a thousand above this one.
        port = low + secrets.randbelow(max(1, lowest_ephemeral - 1_100 - low))
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError:
                continue  # taken: draw another
            return port
    raise RolloutError(f"no free port on {host} below {lowest_ephemeral}; give ServerSpec.port")


def _signal(group: int, number: int) -> None:
    try:
        os.killpg(group, number)
    except ProcessLookupError:  # nobody left to signal
        return


def _alive(process: subprocess.Popen[bytes], group: int) -> bool:
    process.poll()  # reap the leader, or its zombie keeps the group alive
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
