"""Real plans on the shipped clusters: what is added up, what options do, and the commands."""

from __future__ import annotations

import json
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml

sys.path.insert(0, str(Path(__file__).parent))
from conftest import CONFIG

from weight_sync.cli import main
from weight_sync.config import engine_yaml, family_yaml
from weight_sync.errors import ConfigError
from weight_sync.layout.table import Layout
from weight_sync.plan.planner import make_plan
from weight_sync.plan.proof import prove_exact_once
from weight_sync.plan.runs import expand_runs, merge_runs
from weight_sync.plan.schedule import Budget, CostModel, Method, make_schedule
from weight_sync.session.inputs import Declared, layout_of
from weight_sync.simulate import Options, cluster_names, load_cluster, predict, simulate
from weight_sync.simulate.cluster import parse_cluster
from weight_sync.simulate.sources import first_holders
from weight_sync.simulate.work import work_of

GPU = CostModel(3.7e-6, 48.5e9, 1e12)


@pytest.fixture(scope="module")
def layouts() -> tuple[Layout, Layout]:
    family = family_yaml("qwen3_moe")
    trainer = Declared(family, CONFIG, {"ranks": 8, "tp": 2, "pp": 2, "ep": 2}, None, {"vocab_multiple": 256})
    rollout = Declared(family, CONFIG, {"tp": 2, "engines": 2, "remainder": "last"}, engine_yaml("sglang"))
    return layout_of(trainer, "trainer"), layout_of(rollout, "rollout")


def test_work_adds_up_to_the_plan_and_counts_the_writes_that_the_source_agent_would_make(
    layouts: tuple[Layout, Layout],
) -> None:
    plan = make_plan(*layouts)
    schedule = make_schedule(plan, replace(GPU, seconds_per_write=0.0))
    assert (schedule.method == Method.DIRECT).all()
    work = work_of(schedule)
    assert work.nbytes == plan.nbytes.sum()
    np.testing.assert_array_equal(work.sent, np.bincount(plan.source_rank, plan.nbytes, 8))
    writes = 0
    for pair in np.unique(plan.source * len(plan.target_params) + plan.target):
        rows = np.flatnonzero(plan.source * len(plan.target_params) + plan.target == pair)
        runs = expand_runs(
            plan.shape[rows],
            plan.source_start[rows],
            plan.source_strides[rows],
            plan.target_start[rows],
            plan.target_strides[rows],
        )
        writes += len(merge_runs(runs[1] * 2, runs[2] * 2, runs[3] * 2)[0])
    assert work.writes == pytest.approx(writes, rel=0.02)
    assert work_of(schedule, bucket=4096).writes > work.writes
    assert work_of(schedule, bytes_ratio=0.5).nbytes == work.nbytes / 2


def test_staged_pieces_travel_in_rounds_and_nothing_is_lost(layouts: tuple[Layout, Layout]) -> None:
    whole = Declared(family_yaml("qwen3_moe"), CONFIG, {"tp": 1, "remainder": "last"}, engine_yaml("sglang"))
    plan = make_plan(layouts[0], layout_of(whole, "rollout"))  # half a row from each of two ranks: strided where it arrives
    schedule = make_schedule(plan, CostModel(1.0, 1e9, 1e12), Budget(1 << 19, 1 << 19))
    work = work_of(schedule)
    assert schedule.rounds > 1
    assert len(work.rounds) == schedule.rounds
    assert sum(r.nbytes.sum() for r in work.rounds) == plan.nbytes.sum()
    staged = sum(p.nbytes for p in schedule.pieces if p.method in (Method.UNPACK, Method.BOTH))
    assert sum(r.placed.sum() for r in work.rounds) == staged > 0
    said = simulate(schedule, load_cluster("h100_400g")).prediction
    assert said.phases["place"] > 0
    assert said.seconds > said.bound_seconds


@pytest.mark.parametrize("name", cluster_names())
def test_every_shipped_cluster_loads_says_where_each_number_is_from_and_predicts_no_less_than_the_bound(
    name: str, layouts: tuple[Layout, Layout]
) -> None:
    text = (Path(__file__).parents[2] / "conf" / "weight_sync" / "cluster" / f"{name}.yaml").read_text()
    for line in text.splitlines():
        value = line.partition(":")[2].partition("#")[0].strip()
        if value[:1].isdigit() and "." in value and not line.startswith("description"):
            assert line.partition("#")[2].strip(), f"{name}: {line.strip()} has no source"
    said = predict(make_schedule(make_plan(*layouts), GPU), load_cluster(name))
    assert said.seconds >= said.bound_seconds > 0


def test_a_wrong_cluster_names_every_bad_key() -> None:
    data = yaml.safe_load((Path(__file__).parents[2] / "conf" / "weight_sync" / "cluster" / "h200.yaml").read_text())
    data["nic"] = {"per_node": 8, "speed": 1.0}
    with pytest.raises(ConfigError, match=r"nic.rate.*nic.speed"):
        parse_cluster(data, "cluster x")
    with pytest.raises(ConfigError, match="h100_400g"):
        load_cluster("nonsense")


def test_the_first_holder_as_source_is_a_correct_plan_and_a_slower_one(layouts: tuple[Layout, Layout]) -> None:
    plan = make_plan(*layouts)
    other = first_holders(plan, layouts[0])
    prove_exact_once(other, source=layouts[0], target=layouts[1])
    assert (other.source_rank[np.lexsort((other.target_start, other.target))]
            <= plan.source_rank[np.lexsort((plan.target_start, plan.target))]).all()  # fmt: skip
    busiest = [np.bincount(p.source_rank, p.nbytes).max() for p in (plan, other)]
    assert busiest[1] > 1.5 * busiest[0]


def test_fewer_bytes_are_faster_and_finer_steps_agree(layouts: tuple[Layout, Layout]) -> None:
    schedule, cluster = make_schedule(make_plan(*layouts), GPU), load_cluster("h100_400g")
    coarse, fine = (simulate(schedule, cluster, Options(steps=n)).prediction.seconds for n in (40, 4000))
    assert coarse == pytest.approx(fine, rel=0.05)
    assert simulate(schedule, cluster, Options(bytes_ratio=0.5)).prediction.phases["write"] < 0.7 * coarse


def test_simulate_prints_seconds_bound_limit_and_use_of_links_and_draws(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "sync.svg"
    words = ["+recipes=qwen3_4b_h100x8", "cluster=h100_400g", "compare=true", f"picture={picture}", "output=json"]
    assert main(["simulate", *words]) == 0
    facts = json.loads(capfd.readouterr().out)
    assert facts["seconds"] > facts["bound_seconds"] > 0
    assert set(facts["others"]) == {"replica", "broadcast"}
    assert facts["critical_link"] in [u["name"] for items in facts["usage"].values() for u in items]
    assert "seconds since the sync began" in picture.read_text() or picture.stat().st_size > 1000
    assert main(["simulate", *words[:2], "dead_engine=0:0.001", "output=json"]) == 2
    assert "version stays" in json.loads(capfd.readouterr().out)["failed"]


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("slow=actor:0:0.5", "trainer or rollout"),
        ("down=0", "NODE:CARD"),
        ("bucket=none", "must be a number"),
        ("relay=yes", "true or false"),
        ("picture=x.gif", ".png or .svg"),
        ("source=best", "plan or first"),
    ],
)
def test_a_wrong_word_of_simulate_is_one_clear_error_before_anything_is_planned(
    word: str, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", "+recipes=no_such_recipe", word]) == 1
    assert said in capfd.readouterr().err


def test_search_ranks_what_fits_and_counts_what_does_not(capfd: pytest.CaptureFixture[str]) -> None:
    words = ["+recipes=qwen3_4b_h100x8", "cluster=h100_400g", "tp=1,2,4", "pp=1", "ep=1", "rollout_tp=1,2,4", "rollout_ep=1"]
    assert main(["search", *words, "memory=5e9", "top=100", "output=json"]) == 0
    said = json.loads(capfd.readouterr().out)
    seconds = [f["seconds"] for f in said["found"]]
    assert seconds == sorted(seconds)
    assert all(f["trainer_bytes"] <= 5e9 and f["rollout_bytes"] <= 5e9 for f in said["found"])
    assert {f["strategy"] for f in said["found"]} == {"shard to shard", "replica", "broadcast"}
    assert said["refused"]["trainer: more weights than fit a GPU"] == 1
    assert main(["search", *words, "memory=1e9"]) == 1


def test_bench_link_measures_this_machine_and_writes_a_cluster_that_loads(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], layouts: tuple[Layout, Layout]
) -> None:
    out = tmp_path / "here.yaml"
    assert main(["bench", "link", "transport=cma", "bytes=4194304", f"out={out}", "output=json"]) == 0
    said = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert all(value >= 0 for value in said["measured"].values())
    python, control = said["cluster"]["python"], said["cluster"]["control"]
    assert all(1e-9 < seconds < 1e-2 for seconds in (python["check"], python["receive"]))
    assert 0 <= control["compare"] < 1e-2
    assert 1e6 < said["cluster"]["quantise"]["make"] < said["cluster"]["quantise"]["look"] < 1e12
    assert said["cluster"]["transports"] == ["cma"]
    cluster = load_cluster(str(out))
    assert cluster.local.rate == pytest.approx(said["cluster"]["local"]["rate"], rel=1e-3)
    numbers = [line for line in out.read_text().splitlines() if re.match(r" *\w+: [\d.]+(e[-+]\d+)?( |$)", line)]
    assert len(numbers) >= 20
    assert [line for line in numbers if not re.search("# .*(measured|assumed)", line)] == []
    assert predict(make_schedule(make_plan(*layouts)), cluster).seconds > 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("transport=nosuch",), "bench link knows tcp, cma, rdma, ipc, nvlink"),
        (("transport=cma", "bytes=7"), "bytes=7: at least 1048576"),
        (("transport=cma", "bytes=x"), "bytes=x: must be a whole number"),
        (("out=here.txt",), "out=here.txt: must end in .yaml"),
    ],
)
def test_a_wrong_word_of_bench_link_is_one_clear_error(
    words: tuple[str, ...], said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "link", *words]) == 1
    assert said in capfd.readouterr().err


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="here are GPUs")
@pytest.mark.parametrize("transport", ["ipc", "nvlink"])
def test_bench_link_on_gpus_says_what_is_missing(transport: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "link", f"transport={transport}"]) == 1
    assert re.search("needs torch and triton|measures between two of them", capfd.readouterr().err)
