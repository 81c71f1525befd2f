"""miles's trainer actor, init hook, engine actors and perf log, with our updater between them and real SGLang servers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import rank_work
import ray

TP1 = {"tensor_model_parallel_size": 1, "expert_tensor_parallel_size": 1}
LAYOUTS = {
    "tp2": {},
    "pp2": TP1 | {"pipeline_model_parallel_size": 2},
    "ep2": TP1 | {"expert_model_parallel_size": 2},
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_three_updates_of_miles_own_actor_leave_two_engines_byte_equal_to_the_trainers_export(
    layout: str, ranks: Any, servers: Any, folder: Path, model: Path
) -> None:
    manager = ray.get_actor("manager", namespace="miles")
    check = layout == "tp2"
    ray.get(manager.serve.remote([0, 1]))
    if check:  # what its train script does with --check-weight-update-equal, once engines have loaded the checkpoint
        for url in servers.urls[:2]:
            rank_work.loaded(url, str(model))
        ray.get([manager.check_weights.remote(action) for action in ("snapshot", "reset_tensors")])
    changes = LAYOUTS[layout] | {"check_weight_update_equal": check}
    urls = servers.urls[:2]
    results = ranks("three_syncs", changes=changes, urls=urls, folder=str(folder / layout), check=check)
    assert [r["class"] for r in results] == ["weight_sync_integrations.miles.updater.Updater"] * 2
    assert [r["versions"] for r in results] == [[1, 2, 3]] * 2
    held, export = results[0]["held"], results[0]["export"]
    assert held == export
    assert held[0] != held[1] != held[2]
    primary, other = (1, 0) if layout == "pp2" else (0, 1)  # miles logs on the last pipeline stage
    assert results[other]["logged"] == []
    _check_log(results[primary]["logged"])
    assert results[0]["levels"] == ["check_weight_equal" if check else "digest", "digest", "digest"]
    if check:
        assert "check tensor equality failed" in results[0]["compared"]


def _check_log(logged: list[dict[str, Any]]) -> None:
    """Per step: miles's own line, with its timers, and ours."""
    own, ours = logged[0::2], logged[1::2]
    assert [line["rollout/step"] for line in own] == [line["rollout/step"] for line in ours] == [1, 2, 3]
    for version, (line, more) in enumerate(zip(own, ours, strict=True), 1):
        parts = [line[f"perf/{name}_time"] for name in ("update_weights_implementation", "finalize_and_resume_engines")]
        assert all(part > 0 for part in parts)
        assert line["perf/update_weights_time"] > sum(parts)
        assert more["weight_sync/version"] == version
        assert more["weight_sync/verified"] == more["weight_sync/committed"] == 1
        assert more["weight_sync/bytes"] > 0
        assert more["weight_sync/gathered_bytes"] == 0


@pytest.mark.timeout(600)
def test_miles_fsdp_actor_is_substituted_on_the_driver_and_writes_its_shards_without_gathering(
    ranks: Any, servers: Any, folder: Path
) -> None:
    ray.get(ray.get_actor("manager", namespace="miles").serve.remote([0, 1]))
    results = ranks("fsdp_update", changes={}, urls=servers.urls[:2], folder=str(folder))
    for result in results:
        assert result["substituted"]
        assert result["pickled"]
        assert result["class"] == "FsdpUpdater"
        assert result["version"] == 2
    assert results[0]["held"] == results[0]["export"]


@pytest.mark.timeout(600)
def test_an_engine_that_hangs_fails_the_update_and_one_that_replaces_it_is_brought_to_the_next_version(
    ranks: Any, servers: Any, folder: Path
) -> None:
    ray.get(ray.get_actor("manager", namespace="miles").serve.remote([0, 1]))
    results = ranks("engine_that_hangs", changes={}, urls=servers.urls, folder=str(folder))
    failed = results[0]["failed"]
    assert "DeadlineExceeded" in failed["error"]
    assert "the sync failed on rank 0" in results[1]["failed"]["error"]
    assert [r["failed"]["version"] for r in results] == [1, 1]
    assert failed["paused"] is True
    assert failed["stamp"] == "1"
    assert [r["version"] for r in results] == [2, 2]
    assert results[0]["stamps"] == ["2", "2"]
    assert results[0]["paused"] == [False, False]
    assert results[0]["held"] == results[0]["export"]
    assert len(results[0]["members"]) == 2
    assert not any(servers.urls[1].split("//")[1] in name for name in results[0]["members"])
