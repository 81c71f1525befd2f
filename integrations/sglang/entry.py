"""How our worker gets into a scheduler process of a server that another framework has started (see settings.py).

An SGLang with plug-ins: plugin.py calls attach() at the end of Scheduler.__init__. One without (the fork inside miles-rl
0.0.2): the controller asks the server for /update_weights_from_tensor with no tensors and load_format=MARKER, which makes
SGLang call activate() in every scheduler process; it refuses the name unless it was started with it.
"""

from __future__ import annotations

import sys
from typing import Any

from weight_sync.errors import SessionError


def activate(model: Any, named_tensors: Any) -> None:
    """SGLang's contract of a custom weight loader. Loads nothing: it only opens our endpoint in this process."""
    attach(_scheduler())


def attach(scheduler: Any) -> None:
    """Give a scheduler our worker, once, and let its loop serve it between two steps."""
    if hasattr(scheduler, "weight_sync_worker"):
        return
    from weight_sync_integrations.sglang.settings import private
    from weight_sync_integrations.sglang.worker import Worker

    worker = Worker(scheduler, private(scheduler.server_args))
    original = scheduler.process_input_requests

    def process_input_requests(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        worker.serve()
        return result

    scheduler.process_input_requests = process_input_requests
    scheduler.weight_sync_worker = worker
    worker.start()


def _scheduler() -> Any:
    """The scheduler in whose call we are: SGLang passes its model only."""
    frame = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if owner is not None and hasattr(owner, "tp_worker") and hasattr(owner, "process_input_requests"):
            return owner
        frame = frame.f_back
    raise SessionError("weight_sync was called to load weights, but not by a scheduler: this SGLang is not known")
