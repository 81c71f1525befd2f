"""A sync as a flat dict of numbers, for any logger.

Always the keys under weight_sync/; on request also the keys that dashboards of two training frameworks already plot, with
the meaning they have there:

    verl    timing_s/update_weights                     the whole sync, seconds
            checkpoint_engine/payload_mbytes            bytes written / 2^20
    miles   perf/update_weights_time                    the whole sync, seconds
            perf/update_weights_implementation_time     moving the weights: gather + quantise + encode + write
            perf/finalize_and_resume_engines_time       after the last byte: verify + commit + post + resume

(Read in verl's trainer and checkpoint engines and in miles' weight updater; verl's delta keys wait for delta syncs.)
A failed sync gets no framework key: those timers only ever report updates that happened.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from weight_sync.errors import ConfigError
from weight_sync.observe.records import Phase, SyncRecord

MOVING: tuple[Phase, ...] = ("gather", "quantise", "encode", "write")
FINISHING: tuple[Phase, ...] = ("verify", "commit", "post", "resume")


def metrics(record: SyncRecord, keys: str | Iterable[str] = ()) -> dict[str, float | int]:
    """One flat dict; what is unknown (None) is left out, booleans are 0 and 1.

    keys: "verl", "miles", or several of them. Raises ConfigError for any other name.
    """
    chosen = key_sets(keys)
    stats = record.rank_stats
    result: dict[str, float | int | None] = {
        "weight_sync/version": record.version,
        "weight_sync/bytes": record.bytes,
        "weight_sync/gathered_bytes": record.gathered_bytes,
        "weight_sync/seconds": record.seconds,
        "weight_sync/stalled_seconds": record.stalled_seconds,
        "weight_sync/gb_per_s": record.gb_per_s,
        "weight_sync/sync_gb_per_s": record.sync_gb_per_s,
        "weight_sync/share_of_limit": record.share_of_limit,
        "weight_sync/bubble_share": record.bubble_share,
        "weight_sync/rank_seconds_max": None if stats is None else stats.max,
        "weight_sync/rank_seconds_mean": None if stats is None else stats.mean,
        "weight_sync/rank_seconds_skew": None if stats is None else stats.skew,
        "weight_sync/writes": record.writes,
        "weight_sync/transfers": record.transfers,
        "weight_sync/retries": record.retries,
        "weight_sync/verified": int(record.verified),
        "weight_sync/committed": int(record.committed),
        "weight_sync/failed": int(record.error is not None),
        "weight_sync/tokens_match": None if record.tokens_match is None else int(record.tokens_match),
    }
    result.update({f"weight_sync/seconds/{phase}": seconds for phase, seconds in record.phases.items()})
    result.update({f"weight_sync/{name}": value for name, value in record.figures.items()})
    if record.error is None:
        for name in chosen:
            result.update(ALIASES[name](record))
    return {key: value for key, value in result.items() if value is not None}


def key_sets(keys: str | Iterable[str]) -> tuple[str, ...]:
    """Check the names of key sets, given as one name or several. Raises ConfigError naming the unknown and the known."""
    chosen = (keys,) if isinstance(keys, str) else tuple(keys)
    unknown = [name for name in chosen if name not in ALIASES]
    if unknown:
        raise ConfigError(f"unknown metric keys {', '.join(map(repr, unknown))}; known are {', '.join(sorted(ALIASES))}")
    return chosen


def _verl(record: SyncRecord) -> Mapping[str, float]:
    return {
        "timing_s/update_weights": record.seconds,
        "checkpoint_engine/payload_mbytes": record.bytes / 2**20,
    }


def _miles(record: SyncRecord) -> Mapping[str, float]:
    return {
        "perf/update_weights_time": record.seconds,
        "perf/update_weights_implementation_time": sum(record.phases.get(phase, 0.0) for phase in MOVING),
        "perf/finalize_and_resume_engines_time": sum(record.phases.get(phase, 0.0) for phase in FINISHING),
    }


ALIASES: dict[str, Callable[[SyncRecord], Mapping[str, float]]] = {"verl": _verl, "miles": _miles}
