"""Where a scheduler process learns that it takes part in a job, and what its endpoint needs: two ways.

environment    whoever starts the server sets WEIGHT_SYNC_TOKEN and the variables of worker.py (launch.py does).
private        another framework starts the server, and can pass it arguments only: `--custom-weight-loader MARKER` (MARKER is
               an import path, and one of SGLang's own arguments: it names code that may be called to load weights). Each worker
               then makes a token of its own and announces it, with its address, in a folder that only its user can read:
               <temporary folder>/weight-sync-<uid>/<engine>/rank-<n>.json. Whoever can run code as this user on that node
               reads them there (announced()). No token is in an argument, a log or the environment.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
import stat
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weight_sync.errors import ConfigError
from weight_sync_integrations.sglang.plugin import MARKER, TOKEN_VARIABLE

RENDEZVOUS_VARIABLE = "WEIGHT_SYNC_RENDEZVOUS"
"""Folder into which each worker writes rank-<n>.json: {"rank", "host", "port", "pid"}."""

BIND_VARIABLE = "WEIGHT_SYNC_BIND"
"""Address the worker endpoints listen on and announce."""

TRANSPORT_VARIABLE = "WEIGHT_SYNC_TRANSPORT"
"""JSON {"name": a registered transport, further keys: its options}; absent when only describe and record are wanted."""

_ANYWHERE = ("", "0.0.0.0", "::")


@dataclass(frozen=True, slots=True)
class Settings:
    """folder: where the worker announces itself. bind: address to listen on. announce_token: write the token there too.

    transport: {"name", options}, or None: the controller says it before it binds.
    """

    folder: Path
    bind: str
    transport: Mapping[str, Any] | None = None
    announce_token: bool = False
    token: str = field(default="", repr=False)

    def announce(self, rank: int, host: str, port: int) -> None:
        """Write this worker's file; it appears complete or not at all."""
        place: dict[str, Any] = {"rank": rank, "host": host, "port": port, "pid": os.getpid()}
        if self.announce_token:
            place["token"] = self.token
        with tempfile.NamedTemporaryFile("w", dir=self.folder, suffix=".part", delete=False) as file:  # mode 0600
            json.dump(place, file)
        os.replace(file.name, self.folder / f"rank-{rank:05d}.json")


def from_environment() -> Settings:
    text = os.environ.get(TRANSPORT_VARIABLE)
    return Settings(
        folder=Path(_variable(RENDEZVOUS_VARIABLE)),
        bind=os.environ.get(BIND_VARIABLE, "127.0.0.1"),
        transport=json.loads(text) if text else None,
        token=_variable(TOKEN_VARIABLE),
    )


def marked(server_args: Any) -> bool:
    """Whether the server was started with our marker."""
    return MARKER in (getattr(server_args, "custom_weight_loader", None) or ())


def private(server_args: Any) -> Settings:
    """Settings of a worker whose server was started by another framework."""
    host = str(server_args.host or "").strip("[]")
    bind = host if host not in _ANYWHERE else socket.gethostbyname(socket.gethostname())
    folder = _folder(engine_key(server_args.dist_init_addr, host, server_args.port))
    return Settings(folder, bind, announce_token=True, token=secrets.token_urlsafe(32))


def engine_key(dist_init_addr: str | None, host: str, port: int) -> str:
    """What names one engine on all its nodes, of the server's own arguments."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", dist_init_addr or f"{host}-{port}").strip("-")


def announced(key: str) -> list[dict[str, Any]]:
    """{"rank", "host", "port", "pid", "token"} of every worker of an engine that lives on this node, by rank.

    Files of processes that have ended (an engine that was here before, under the same address) do not count.
    """
    files = sorted(_folder(key).glob("rank-*.json"))
    return [place for place in (json.loads(file.read_text()) for file in files) if _alive(place["pid"])]


def complete(places: Iterable[Mapping[str, Any]], world: int) -> bool:
    return sorted(place["rank"] for place in places) == list(range(world))


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:  # gone, or another user's: not ours in either case
        return False
    return True


def _folder(key: str) -> Path:
    """Made for this user alone; one that somebody else made there first is refused."""
    base = Path(tempfile.gettempdir()) / f"weight-sync-{os.getuid()}"
    for folder in (base, base / key):
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
        if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077 or not stat.S_ISDIR(found.st_mode):
            raise ConfigError(f"{folder}: must be a folder of user {os.getuid()} that nobody else can read; remove it")
    return base / key


def _variable(name: str) -> str:
    value = os.environ.get(name)
    if not value:
        raise ConfigError(f"the environment of this SGLang server lacks {name}; launch.environment() sets it")
    return value
