"""Which transport a vLLM worker opens: told by the environment of the server, so that no request can change it."""

from __future__ import annotations

import json
import os
from typing import Any

from weight_sync.errors import ConfigError

TRANSPORT_VARIABLE = "WEIGHT_SYNC_TRANSPORT"
"""JSON: {"name": a registered transport, further keys: its options}. Set by launch.py from ServerSpec.transport."""


def open_transport() -> Any:
    """A weight_sync.transport.base.Transport. Raises ConfigError when the server was started without one."""
    text = os.environ.get(TRANSPORT_VARIABLE)
    if not text:
        raise ConfigError(
            f"this vLLM server was started without {TRANSPORT_VARIABLE}: no transport to receive weights over; "
            "give ServerSpec.transport"
        )
    from weight_sync.transport import registry

    options = json.loads(text)
    return registry.create(options.pop("name"), **options)
