"""Where bytes land: in engines' live tensors, or beside them for the engines' own loaders. Decided when a job connects.

A live tensor that is no longer the checkpoint's may not be written into. The next step of the ladder is the engine's own loader
on received HF tensors (session/placing.py). All engines of a job take the same way, because they share one layout.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from weight_sync.errors import BindError, ConfigError, listed
from weight_sync.session.contracts import EngineDescription

_log = logging.getLogger("weight_sync")
_SHOWN = 4


class To(StrEnum):
    """live: into live tensors, or refuse. loader: always by the engines' own loaders. auto: live; where an engine has tensors
    that cannot be written, by the loader of every engine, and said so."""

    AUTO = "auto"
    LIVE = "live"
    LOADER = "loader"


@dataclass(frozen=True, slots=True)
class Landing:
    """to: see To. budget: bytes of whole HF tensors that each engine worker holds at a time for its loader."""

    to: To = To.AUTO
    budget: int = 1 << 30

    def __post_init__(self) -> None:
        if self.budget < 1:
            raise ConfigError(f"weight_sync.landing.budget={self.budget}: must be at least 1 byte")


@dataclass(frozen=True, slots=True)
class Landed:
    """What was decided. loader: bytes, as of PlanInputs.loader (0: live). why: in words, "" for live."""

    loader: int = 0
    why: str = ""


def decide(landing: Landing, servers: Mapping[int, EngineDescription], *, declared: bool, delta: bool) -> Landed:
    """Raises BindError where live tensors cannot be written and no loader may or can take the weights instead.

    declared: the engines' layout is declared, not recorded. delta: syncs may send only what changed.
    """
    stuck = {server.name: server.not_writable for server in servers.values() if server.not_writable}
    words = "; ".join(
        f"engine {name}: {len(found)} weights cannot be written in place: "
        + listed((f"{tensor}: {why}" for tensor, why in found.items()), _SHOWN)
        for name, found in stuck.items()
    )
    if landing.to is To.LIVE or (landing.to is To.AUTO and not stuck):
        if stuck:
            raise BindError(
                f"{words}. weight_sync.landing.to=live writes into live tensors only; auto would use the engine's own loader"
            )
        return Landed()
    asked = "weight_sync.landing.to=loader" if landing.to is To.LOADER else words
    if unable := {server.name: server.no_loader for server in servers.values() if server.no_loader}:
        lines = "; ".join(f"engine {name}: {why}" for name, why in unable.items())
        raise BindError(f"{asked}, and its own loader cannot take the weights instead: {lines}")
    if not declared:
        raise BindError(f"{asked}: the engine's own loader needs a declared layout, but weight_sync.engine=recorded")
    if delta:
        raise BindError(f"{asked}: the engine's own loader takes whole tensors; turn weight_sync.delta off")
    if landing.to is To.AUTO:  # a warning: it is shown without any logging being set up
        _log.warning(
            "engines load what they receive with their own loaders, because live tensors cannot be written "
            "(weight_sync.landing.to=auto): %s",
            words,
        )
    return Landed(landing.budget, asked)


def check_joiner(loader: int, server: EngineDescription) -> None:
    """Raise BindError where an engine cannot take its weights the way that the engines of the job do."""
    if loader and server.no_loader:
        raise BindError(f"engine {server.name}: the engines of this job load with their own loaders, and {server.no_loader}")
    if not loader and server.not_writable:
        lines = listed((f"{name}: {why}" for name, why in server.not_writable.items()), _SHOWN)
        raise BindError(
            f"engine {server.name}: the engines of this job are written in place, but here {len(server.not_writable)} weights "
            f"cannot be: {lines}"
        )
