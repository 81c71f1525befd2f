"""What `--custom-megatron-init-path weight_sync_integrations.miles.hook.install` names.

miles and slime call install(args) on every trainer rank, once Megatron's groups are made and before they choose the class of
their weight updater by name, in the module of the actor. There all classes they can choose from are replaced by ours.
"""

from __future__ import annotations

import functools
import inspect
import sys
from typing import Any

from weight_sync.errors import ConfigError
from weight_sync_integrations.miles.job import block_of, check_marker, refuse

ACTORS = ("miles.backends.megatron_utils.actor", "slime.backends.megatron_utils.actor")
UPDATERS = ("UpdateWeightFromDistributed", "UpdateWeightP2P", "UpdateWeightFromTensor", "UpdateWeightFromDisk")


def install(args: Any) -> None:
    """Replace the updaters in this process. Raises ConfigError, before a model is built, for what cannot be synced."""
    block_of(args)
    refuse(args, is_lora=False)
    check_marker(args)
    from weight_sync_integrations.miles.updater import Updater

    modules = [sys.modules[name] for name in ACTORS if name in sys.modules]
    if not modules:
        raise ConfigError(f"weight_sync was asked to install itself where none of {', '.join(ACTORS)} is loaded")
    for module in modules:
        replace_in(module, Updater)


def replace_in(module: Any, updater: type) -> None:
    """Put `updater` under every name of an updater that the module has; and let its log have what we measure."""
    names = [name for name in UPDATERS if hasattr(module, name)]
    if not names:
        raise ConfigError(f"{module.__name__} has none of {', '.join(UPDATERS)}: this version of it is not known")
    for name in names:
        setattr(module, name, updater)
    log = getattr(module, "log_perf_data", None)
    if log is not None and "extra_metrics" not in inspect.signature(log).parameters and not hasattr(log, "weight_sync"):
        module.log_perf_data = _with_our_metrics(log, updater)


def _with_our_metrics(log: Any, updater: type) -> Any:
    """miles-rl 0.0.2 does not ask its updater for metrics: ours are logged after its own, on the same rank and step.

    Which rank that is, is decided here as miles decides it (log_utils.log_perf_data).
    """

    @functools.wraps(log)
    def log_perf_data(rollout_id: int, args: Any) -> Any:
        log(rollout_id, args)
        found = updater.latest.pop_metrics() if updater.latest is not None else {}  # type: ignore[attr-defined]
        if not found or not _logs_here():
            return
        from miles.utils import tracking_utils
        from miles.utils.metric_utils import compute_rollout_step

        step = compute_rollout_step(args, rollout_id)
        tracking_utils.log(args, {**found, "rollout/step": step}, step_key="rollout/step")

    log_perf_data.weight_sync = True  # type: ignore[attr-defined]
    return log_perf_data


def _logs_here() -> bool:
    from miles.backends.training_utils.parallel import get_parallel_state

    state = get_parallel_state()
    return state.tp.rank == 0 and state.is_pp_last_stage and state.intra_dp_cp.rank == 0
