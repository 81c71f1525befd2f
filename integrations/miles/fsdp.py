"""miles's FSDP actor with our updater. That backend calls no hook of ours, so the driver starts a subclass of its actor.

`python -m weight_sync_integrations.miles TRAIN.PY ARGUMENTS` does it; in a driver of one's own: substitute(), before the actors
are made.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from weight_sync.errors import ConfigError

PACKAGES = ("miles.backends.experimental.fsdp_utils", "miles.backends.fsdp_utils")
"""Where the FSDP backend is: in 0.0.2, in the main branch."""


def package() -> str:
    """The installed one. Raises ConfigError where miles has no FSDP backend."""
    for name in PACKAGES:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not name.startswith(error.name):
                raise
            continue
        return name
    raise ConfigError(f"this miles has no FSDP backend: none of {', '.join(PACKAGES)} is there")


def __getattr__(name: str) -> Any:
    """The actor class, made when it is asked for: Ray sends it to workers by this name."""
    if name != "WeightSyncFSDPActor":
        raise AttributeError(name)
    found = package()
    base = importlib.import_module(found).FSDPTrainRayActor

    def init(self: Any, args: Any, *arguments: Any, **named: Any) -> Any:
        from weight_sync_integrations.miles.hook import replace_in
        from weight_sync_integrations.miles.job import block_of, check_marker, refuse
        from weight_sync_integrations.miles.updater import FsdpUpdater

        block_of(args)
        refuse(args, is_lora=False)
        check_marker(args)
        replace_in(importlib.import_module(f"{found}.actor"), FsdpUpdater)
        return base.init(self, args, *arguments, **named)

    made = type(name, (base,), {"init": init, "__module__": __name__, "__doc__": "miles's FSDP actor with our updater."})
    setattr(sys.modules[__name__], name, made)
    return made


def substitute() -> type:
    """Let miles's driver start WeightSyncFSDPActor. It looks the class up in the package when it makes the actors."""
    made = __getattr__("WeightSyncFSDPActor")
    importlib.import_module(package()).FSDPTrainRayActor = made
    return made
