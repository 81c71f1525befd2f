"""The flat dict, key by key."""

from __future__ import annotations

import pytest
from observe_support import SECONDS, failed_record, record

from weight_sync.errors import ConfigError
from weight_sync.observe.metrics import metrics


def test_every_promised_key_is_there_with_the_value_of_the_record() -> None:
    made = record(gathered_bytes=7, retries=1).with_tokens_match(True).with_step_seconds(13.0)
    flat = metrics(made)
    assert flat == {
        "weight_sync/version": 1,
        "weight_sync/bytes": 4_000_000_000,
        "weight_sync/gathered_bytes": 7,
        "weight_sync/seconds": 3.5,
        "weight_sync/stalled_seconds": 3.25,
        "weight_sync/gb_per_s": 2.0,
        "weight_sync/sync_gb_per_s": made.sync_gb_per_s,
        "weight_sync/share_of_limit": 0.5,
        "weight_sync/bubble_share": 0.25,
        "weight_sync/rank_seconds_max": 2.0,
        "weight_sync/rank_seconds_mean": 1.5,
        "weight_sync/rank_seconds_skew": 2.0 / 1.5,
        "weight_sync/writes": 40,
        "weight_sync/transfers": 20,
        "weight_sync/retries": 1,
        "weight_sync/verified": 1,
        "weight_sync/committed": 1,
        "weight_sync/failed": 0,
        "weight_sync/tokens_match": 1,
        **{f"weight_sync/seconds/{phase}": seconds for phase, seconds in SECONDS.items()},
    }
    assert all(type(value) in (int, float) for value in flat.values()), "booleans would become strings in some loggers"


def test_unknown_values_are_left_out() -> None:
    flat = metrics(record(limit=None))
    absent = {
        "weight_sync/share_of_limit",
        "weight_sync/bubble_share",
        "weight_sync/tokens_match",
        "weight_sync/seconds/gather",
    }
    assert not absent & flat.keys()


def test_verl_users_find_the_keys_they_plot() -> None:
    added = {key: value for key, value in metrics(record(), "verl").items() if not key.startswith("weight_sync/")}
    assert added == {"timing_s/update_weights": 3.5, "checkpoint_engine/payload_mbytes": 4_000_000_000 / 2**20}


def test_miles_users_find_the_keys_they_plot() -> None:
    seconds = {**SECONDS, "gather": 4.0, "quantise": 0.5}
    added = {
        key: value
        for key, value in metrics(record(seconds=seconds), keys=["miles"]).items()
        if not key.startswith("weight_sync/")
    }
    assert added == {
        "perf/update_weights_time": 8.0,
        "perf/update_weights_implementation_time": 6.5,
        "perf/finalize_and_resume_engines_time": 1.125,
    }


def test_both_key_sets_can_be_asked_for_at_once() -> None:
    assert {"timing_s/update_weights", "perf/update_weights_time"} <= metrics(record(), ["verl", "miles"]).keys()


def test_a_failed_sync_reports_failure_and_no_framework_timer() -> None:
    flat = metrics(failed_record(), ["verl", "miles"])
    assert (flat["weight_sync/failed"], flat["weight_sync/verified"]) == (1, 0)
    assert all(key.startswith("weight_sync/") for key in flat)


def test_an_unknown_key_set_is_named_together_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'slime'.*miles, verl"):
        metrics(record(), ["verl", "slime"])
