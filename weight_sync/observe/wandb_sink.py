"""Sync metrics into a wandb run. wandb is imported when a run is opened and at no other time.

Without being asked this library never sends anything anywhere: the default mode writes an offline run into the run's
folder, to be uploaded with `wandb sync` or thrown away.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from weight_sync.errors import ConfigError, SessionError
from weight_sync.observe.metrics import key_sets, metrics
from weight_sync.observe.records import PHASES, SyncRecord

WandbMode = Literal["offline", "online", "auto", "disabled"]
"""auto: online when wandb finds an API key on this machine, offline otherwise."""


class WandbSink:
    """One wandb run. Made by `open_wandb`. With mode "disabled" every call does nothing."""

    def __init__(self, run: Any, mode: WandbMode, keys: tuple[str, ...]) -> None:
        self._run = run
        self.mode = mode
        self._keys = keys
        self._records: dict[tuple[int, str, float], SyncRecord] = {}
        self._step = -1

    @property
    def location(self) -> str:
        """Where the run can be found: its folder when offline, its address when online, empty when disabled."""
        if self._run is None:
            return ""
        return str(self._run.url) if self.mode == "online" else str(Path(self._run.dir).parent)

    def log(self, record: SyncRecord) -> None:
        """Log one sync at step = version. The same sync again adds what has become known since.

        Raises SessionError for a version below one already logged: wandb would drop it without an error.
        """
        if self._run is None:
            return
        if record.version < self._step:
            raise SessionError(f"wandb: version {record.version} after version {self._step}; steps can only grow")
        self._step = record.version
        self._records[record.identity] = record
        self._run.log(metrics(record, self._keys), step=record.version)

    def close(self, *, failed: bool = False) -> None:
        """Write the summary and end the run, marked as failed if it was."""
        if self._run is None:
            return
        self._run.summary.update(summary(list(self._records.values())))
        self._run.finish(exit_code=1 if failed else 0)
        self._run = None


def open_wandb(
    mode: WandbMode = "offline",
    *,
    directory: Path | str,
    project: str = "weight_sync",
    name: str | None = None,
    config: Mapping[str, Any] | None = None,
    keys: str | Iterable[str] = (),
) -> WandbSink:
    """Open a run under `directory`/wandb. keys: as for `metrics`.

    Raises ConfigError for an unknown mode or key set, and if wandb is not installed although the mode needs it.
    """
    if mode not in get_args(WandbMode):
        raise ConfigError(f"unknown wandb mode {mode!r}; known are {', '.join(get_args(WandbMode))}")
    chosen = key_sets(keys)
    if mode == "disabled":
        return WandbSink(None, mode, chosen)
    wandb = import_wandb(mode)
    if mode == "auto":
        mode = "online" if logged_in(wandb) else "offline"
    Path(directory).mkdir(parents=True, exist_ok=True)  # wandb falls back to a temporary folder when it is missing
    run = wandb.init(
        mode=mode,
        project=project,
        name=name,
        dir=str(directory),
        config=dict(config or {}),
        # console capture wraps stdout, which breaks bars that redraw in place
        settings=wandb.Settings(console="off", silent=mode == "offline"),
    )
    run.define_metric("weight_sync/version", hidden=True)
    run.define_metric("weight_sync/*", step_metric="weight_sync/version")
    return WandbSink(run, mode, chosen)


def import_wandb(mode: str) -> Any:
    """The wandb module. Raises ConfigError, naming the mode that needs it, when it is not installed."""
    missing = f"wandb mode {mode!r} needs wandb, which is not installed: pip install 'weight_sync[wandb]', or mode 'disabled'"
    try:
        wandb = importlib.import_module("wandb")
    except ModuleNotFoundError as error:
        if error.name != "wandb":
            raise
        raise ConfigError(missing) from error
    # Offline runs live in folders called wandb: without the package, such a folder in the working directory imports as one.
    if not hasattr(wandb, "init"):
        raise ConfigError(missing)
    return wandb


def logged_in(wandb: Any) -> bool:
    """Whether wandb finds an API key (environment or its own login), without asking for one."""
    if "prompt" in inspect.signature(wandb.login).parameters:
        return bool(wandb.login(prompt=False))
    return bool(wandb.api.api_key)  # older releases, where login() would ask


def summary(records: list[SyncRecord]) -> dict[str, float | int]:
    """The numbers a table of runs is sorted by. Rates and seconds are means over the syncs that committed."""
    good = [record for record in records if record.committed and record.error is None]
    compared = [record.tokens_match for record in records if record.tokens_match is not None]
    result: dict[str, float | int] = {
        "weight_sync/summary/syncs": len(records),
        "weight_sync/summary/failed": sum(record.error is not None for record in records),
        "weight_sync/summary/committed_version": next((r.version for r in reversed(records) if r.committed), -1),
        "weight_sync/summary/all_verified": int(bool(records) and all(record.verified for record in records)),
    }
    if compared:
        result["weight_sync/summary/all_tokens_match"] = int(all(compared))
    if good:
        result["weight_sync/summary/seconds_mean"] = sum(record.seconds for record in good) / len(good)
        speeds = [record.gb_per_s for record in good if record.gb_per_s is not None]
        if speeds:
            result["weight_sync/summary/gb_per_s_mean"] = sum(speeds) / len(speeds)
    return result


def panels() -> list[dict[str, Any]]:
    """The charts worth having, as plain data: title, metric keys, x axis, and how to draw them."""
    version = "weight_sync/version"
    phases = [f"weight_sync/seconds/{phase}" for phase in PHASES]
    ranks = [f"weight_sync/rank_seconds_{name}" for name in ("max", "mean")]
    return [
        {"title": "Sync seconds by phase", "kind": "area", "x": version, "keys": phases},
        {"title": "Sync seconds", "kind": "line", "x": version, "keys": ["weight_sync/seconds", "weight_sync/stalled_seconds"]},
        {"title": "GB/s", "kind": "line", "x": version, "keys": ["weight_sync/gb_per_s", "weight_sync/sync_gb_per_s"]},
        {"title": "Share of the limit", "kind": "line", "x": version, "keys": ["weight_sync/share_of_limit"]},
        {"title": "Bytes", "kind": "line", "x": version, "keys": ["weight_sync/bytes", "weight_sync/gathered_bytes"]},
        {"title": "Write seconds over ranks", "kind": "line", "x": version, "keys": ranks},
        {"title": "Rank skew (1 = even)", "kind": "line", "x": version, "keys": ["weight_sync/rank_seconds_skew"]},
        {"title": "Bubble share of a step", "kind": "line", "x": version, "keys": ["weight_sync/bubble_share"]},
        {
            "title": "Verified, tokens match, failed",
            "kind": "scatter",
            "x": version,
            "keys": ["weight_sync/verified", "weight_sync/tokens_match", "weight_sync/failed"],
        },
    ]
