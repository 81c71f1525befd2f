"""`plan`: all its numbers against the plan itself, counted anew; and one rank's part against the whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands_support import Said

from weight_sync.commands.common import hosts_of, job_of, words_of
from weight_sync.commands.saved import load, save
from weight_sync.errors import ConfigError, PlanError
from weight_sync.ids import ITEMSIZE
from weight_sync.plan.plan import Plan
from weight_sync.plan.schedule import Method, Schedule
from weight_sync.session.inputs import Declared, PlanInputs
from weight_sync.session.part import rank_part

KEYS = {
    "digest", "trainer_ranks", "rollout_ranks", "transfers", "bytes_total", "bytes_max_source", "bytes_max_destination",
    "extra_bytes_source", "extra_bytes_destination", "plan_seconds", "peak_rss_bytes", "bound_seconds", "predicted_seconds",
    "limit",
}  # fmt: skip


def test_every_key_of_the_json_is_there_and_counts_what_the_plan_holds(
    call: Callable[..., Said], job: tuple[str, ...], schedule: Schedule
) -> None:
    facts = call("plan", *job, "cluster=h100_400g", "output=json").json
    plan = schedule.plan

    assert facts.keys() >= KEYS
    assert facts["digest"] == schedule.digest
    sent, received = [0] * plan.source_world, [0] * plan.target_world
    for i in range(len(plan)):
        nbytes = int(np.prod(plan.shape[i])) * ITEMSIZE[plan.target_params[plan.target[i]].dtype]
        sent[plan.source_params[plan.source[i]].rank] += nbytes
        received[plan.target_params[plan.target[i]].rank] += nbytes
    assert (facts["trainer_ranks"], facts["rollout_ranks"], facts["transfers"]) == (8, 8, len(plan))
    assert facts["bytes_total"] == sum(sent) == sum(received)
    assert (facts["bytes_max_source"], facts["bytes_max_destination"]) == (max(sent), max(received))
    assert facts["bytes_mean_source"] == pytest.approx(sum(sent) / 8)
    assert facts["skew_source"] == pytest.approx(max(sent) / (sum(sent) / 8))
    assert sum(item["bytes"] for item in facts["run_sizes"]) == facts["bytes_total"]
    assert sum(item["runs"] for item in facts["run_sizes"]) == facts["runs"]
    assert sum(item["transfers"] for item in facts["methods"].values()) == len(plan)
    assert 0 < facts["bound_seconds"] <= facts["predicted_seconds"]
    assert facts["limit"]
    assert facts["peak_rss_bytes"] > 1 << 20


def test_without_a_cluster_nothing_is_predicted(call: Callable[..., Said], job: tuple[str, ...]) -> None:
    facts = call("plan", *job, "output=json").json
    assert facts["predicted_seconds"] is facts["bound_seconds"] is facts["limit"] is None
    assert "cluster=NAME predicts it" in call("plan", *job).out


def test_staging_is_what_the_ranks_will_allocate(job: tuple[str, ...], call: Callable[..., Said]) -> None:
    strided = (*job, "trainer.tp=4", "trainer.ep=4", "weight_sync.costs.seconds_per_write=1", "weight_sync.budget.target=4096")
    facts = call("plan", *strided, "output=json").json
    schedule = job_of(strided).inputs.schedule()

    assert {Method(m) for m in schedule.method.tolist()} >= {Method.DIRECT, Method.PACK}
    largest = max(piece.nbytes for piece in schedule.pieces)
    assert facts["extra_bytes_source"] == 2 * (-(-largest // 64) * 64)
    assert facts["extra_bytes_destination"] == max(schedule.stage_bytes.values(), default=0)
    assert facts["rounds"] == schedule.rounds


def test_what_deltas_will_keep_is_said(job: tuple[str, ...], call: Callable[..., Said]) -> None:
    words = (*job, "weight_sync.delta.enabled=true", "weight_sync.delta.staging=1048576")
    before, facts = call("plan", *job, "output=json").json, call("plan", *words, "output=json").json
    assert not any(name.startswith("delta") for name in before)
    assert facts["delta_snapshot_bytes_max"] >= before["bytes_max_source"] / 4, "each distinct byte once"
    assert facts["delta_snapshot_bytes_max"] <= before["bytes_max_source"] + 64 * before["transfers"]
    assert facts["extra_bytes_source"] == before["extra_bytes_source"] + 1048576
    assert facts["extra_bytes_destination"] == max(before["extra_bytes_destination"], 1048576)
    assert "keeps at most" in call("plan", *words).out
    on_gpu = call("plan", *words, "weight_sync.delta.snapshot=device", "output=json").json
    assert on_gpu["extra_bytes_source"] == facts["extra_bytes_source"] + facts["delta_snapshot_bytes_max"]


def test_share_of_the_step_and_asynchronous_bubble_follow_from_the_prediction(
    call: Callable[..., Said], job: tuple[str, ...]
) -> None:
    words = ("plan.step_seconds=0.5", "plan.microbatches=4", "plan.microbatch_seconds=0.25", "cluster=h100_400g", "output=json")
    facts = call("plan", *job, *words).json
    sync = facts["predicted_seconds"]
    assert facts["share_of_step"] == pytest.approx(sync / (0.5 + sync))
    assert facts["async_bubble"] == pytest.approx(sync / (4 * 0.25 + sync))


def test_the_table_says_the_same_in_words(call: Callable[..., Said], job: tuple[str, ...]) -> None:
    said = call("plan", *job, "cluster=h100_400g")
    assert said.code == 0
    for word in ("proven exact-once", "8 trainer -> 8 rollout", "lower bound", "predicted", "staging"):
        assert word in said.out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("output=xml",), "output=xml: must be output=table or output=json"),
        (("output=json", "output=table"), "output= is given twice"),
        (("trainer.tp=3",), "not a multiple of tp * cp * pp"),
        (("rollout.tp=3", "rollout.moe_ep=1"), "do not divide over 3 ranks"),
        (("trainer=fsdp2",), "planning from config works for trainer=megatron"),
        (("cluster=nosuch",), "nosuch"),
        (("plan.gpus_per_node=0",), "plan.gpus_per_node=0: must be above 0"),
        (("plan.gpu_per_node=8",), "gpu_per_node"),
        (("cluster=h100_400g", "plan.gpus_per_node=16"), "has 8 GPUs a node"),
    ],
)
def test_what_cannot_work_is_one_error_and_exit_code_1(
    call: Callable[..., Said], job: tuple[str, ...], words: tuple[str, ...], said: str
) -> None:
    kept = [word for word in job if word.partition("=")[0] not in {w.partition("=")[0] for w in words}]
    if "trainer=fsdp2" in words:
        kept = [word for word in kept if not word.startswith(("trainer.tp", "trainer.pp", "trainer.ep"))]
    result = call("plan", *kept, *words)
    assert result.code == 1
    assert said in result.err
    assert result.out == ""


def test_no_model_is_refused_with_the_shipped_configs(call: Callable[..., Said]) -> None:
    assert "model.config=NAME with one of" in call("plan").err


def test_ranks_fill_nodes_in_order_and_engines_follow() -> None:
    assert hosts_of(8, 4, 6) == (["node0"] * 4, ["node0"] * 4 + ["node1"] * 2)
    assert hosts_of(None, 1, 2) == ([""], ["", ""])


def test_words_of_a_command_are_taken_once_and_the_rest_is_left() -> None:
    assert words_of(["a=1", "b=2", "c"], "a") == ({"a": "1"}, ["b=2", "c"])
    with pytest.raises(ConfigError, match="a= is given twice: 1 and 2"):
        words_of(["a=1", "a=2"], "a")


@pytest.mark.parametrize("name", ["plan.json", "plan.json.gz"])
def test_a_saved_plan_comes_back_whole_and_a_changed_one_is_refused(
    call: Callable[..., Said], job: tuple[str, ...], tmp_path: Path, name: str
) -> None:
    file = tmp_path / name
    digest = call("plan", *job, f"save={file}", "output=json").json["digest"]
    assert load(file).digest == digest
    whole = load(file)
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ConfigError, match="no saved plan of this version"):
        load(tmp_path / "other.json")
    with pytest.raises(ConfigError, match="no saved plan"):
        load(tmp_path / "nosuch.json")
    plain = tmp_path / "changed.json"
    save(whole, plain)
    plain.write_text(plain.read_text().replace('"piece"', '"piece"').replace(f'"digest": "{digest}"', '"digest": "0"', 1))
    with pytest.raises(PlanError, match="damaged, or made by another version"):
        load(plain)


# -- one rank's part -----------------------------------------------------------------------------------------------------


def _rows(plan: Plan, rows: Any) -> list[tuple[Any, ...]]:
    """Transfers as values that do not depend on the tables of parameters."""
    found = []
    for i in rows:
        a, b = plan.source_params[plan.source[i]], plan.target_params[plan.target[i]]
        box = (plan.offset[i].tolist(), plan.shape[i].tolist())
        ends = (a, int(plan.source_start[i]), plan.source_strides[i].tolist(), b, int(plan.target_start[i]))
        found.append((int(plan.tensor[i]), box, ends, plan.target_strides[i].tolist()))
    return found


@cache
def _inputs(job: tuple[str, ...]) -> PlanInputs:
    return job_of(job).inputs


def _changed(job: tuple[str, ...], sizes: dict[str, Any], tied: bool) -> PlanInputs:
    """The job's inputs with another trainer and head, without composing it again."""
    inputs = _inputs(job)
    assert isinstance(inputs.source, Declared)
    assert isinstance(inputs.target, Declared)
    config = {**inputs.source.config, "tie_word_embeddings": tied}
    symbols = {"vocab_multiple": 128 * sizes["tp"]}
    source = replace(inputs.source, dims=sizes, config=config, symbols=symbols)
    hosts = hosts_of(4, sizes["ranks"], len(inputs.target_hosts))
    return replace(
        inputs, source=source, target=replace(inputs.target, config=config), source_hosts=hosts[0], target_hosts=hosts[1]
    )


@pytest.mark.parametrize("tied", [False, True], ids=["own head", "tied head"])
@pytest.mark.parametrize(
    "sizes",
    [
        {"ranks": 8, "tp": 2, "pp": 2, "ep": 2},
        {"ranks": 8, "tp": 1, "pp": 4, "ep": 2},
        {"ranks": 8, "tp": 2, "pp": 2, "vpp": 2, "ep": 4},
        {"ranks": 8, "tp": 2, "pp": 1, "cp": 2, "ep": 8},
        {"ranks": 8, "tp": 1, "pp": 2, "ep": 2, "etp": 2, "pipeline": (1, 3), "order": "tp-cp-ep-pp-dp", "cp": 4},
    ],
    ids=str,
)
def test_one_ranks_part_is_exactly_its_rows_of_the_whole_plan(job: tuple[str, ...], sizes: dict[str, Any], tied: bool) -> None:
    inputs = _changed(job, sizes, tied)
    whole = inputs.schedule().plan

    for rank in range(whole.source_world):
        part = rank_part(inputs, rank)
        assert _rows(part, range(len(part))) == _rows(whole, whole.rows_from(rank).tolist())


def test_a_part_of_a_side_that_is_read_from_live_ranks_is_refused(job: tuple[str, ...]) -> None:
    inputs = _inputs(job)
    with pytest.raises(ConfigError, match="planned from declared layouts"):
        rank_part(replace(inputs, source={"live": True}), 0)
