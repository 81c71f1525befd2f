"""vLLM's entry point for us (group `vllm.general_plugins`), called in every process of every vLLM on this machine.

It does nothing unless the environment carries a job's token, which launch.py sets for the servers it starts. Then it

    registers the weight-transfer engine "weight_sync"   (--weight-transfer-config '{"backend": "weight_sync"}')
    watches weight loading                               (live.py: which parameters stay as loaded)
    on a CPU, installs the plain-weight stand-ins        (cpu.py)

vLLM may call it more than once in a process; the second call changes nothing.
"""

from __future__ import annotations

import os

TOKEN_VARIABLE = "WEIGHT_SYNC_TOKEN"
"""The job's secret. A worker answers only calls that carry it; without it in the environment this plug-in is asleep."""

BACKEND = "weight_sync"


def register() -> None:
    """Make this process a weight_sync engine process if its environment says so."""
    if not os.environ.get(TOKEN_VARIABLE):
        return
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.platforms import current_platform

    from weight_sync_integrations.vllm import cpu, live

    # The factory refuses duplicates and has no public question "is it there?".
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            BACKEND, "weight_sync_integrations.vllm.transfer", "WeightSyncTransferEngine"
        )
    live.watch_loading()
    if current_platform.is_cpu():
        cpu.apply()
