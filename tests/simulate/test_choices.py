"""What a user may choose or break in a simulation, and that each choice has its effect."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from conftest import CONFIG, work_from

from weight_sync.cli import main
from weight_sync.config import engine_yaml, family_yaml, quant_yaml
from weight_sync.errors import ConfigError, PlanError
from weight_sync.ids import ITEMSIZE
from weight_sync.layout.table import Layout
from weight_sync.plan.plan import Plan
from weight_sync.plan.planner import make_plan
from weight_sync.plan.proof import prove_exact_once
from weight_sync.plan.schedule import make_schedule
from weight_sync.quant.emission import Quantisation
from weight_sync.quant.published import Excludes
from weight_sync.quant.scheme import load_scheme
from weight_sync.session.inputs import Declared, layout_of
from weight_sync.simulate import Faults, Options, Prediction, cluster_names, load_cluster, simulate
from weight_sync.simulate.cluster import parse_cluster, transport_name
from weight_sync.simulate.network import Network, place
from weight_sync.simulate.sources import first_holders
from weight_sync.simulate.sync import run
from weight_sync.simulate.work import Items, Work, work_of

CLUSTERS = Path(__file__).parents[2] / "conf" / "weight_sync" / "cluster"
EXACT = Options(verify=False, steps=10**6)


@pytest.fixture(scope="module")
def fp8() -> tuple[Plan, Layout, Layout]:
    """A plan whose weights are quantised in blocks of 64 x 64, from two dp groups of tp2 ep2 to two engines of tp2."""
    quant = Quantisation(load_scheme("fp8_block", quant_yaml, {"group": [64, 64]}), Excludes("fp8")).to_json()
    family = family_yaml("qwen3_moe")
    trainer = Declared(family, CONFIG, {"ranks": 4, "tp": 2, "ep": 2}, None, {"vocab_multiple": 256}, quant=quant)
    rollout = Declared(family, CONFIG, {"tp": 2, "engines": 2, "remainder": "last"}, engine_yaml("sglang"), quant=quant)
    source, target = layout_of(trainer, "trainer"), layout_of(rollout, "rollout")
    return make_plan(source, target), source, target


def of(plain: dict[str, Any], work: Work, transport: str = "", options: Options = EXACT, **changes: Any) -> Prediction:
    cluster = parse_cluster({**plain, **changes}, "test")
    placement = place(cluster, work.trainers, work.rollouts, share_nodes=True)
    return run(work, Network(cluster, placement, Faults(), transport), options).prediction


@pytest.mark.parametrize("name", cluster_names())
def test_every_number_of_a_cluster_says_whether_it_is_measured_of_a_data_sheet_assumed_or_fitted(name: str) -> None:
    seen = 0
    for line in (CLUSTERS / f"{name}.yaml").read_text().splitlines():
        key, _, rest = line.partition(":")
        value, _, source = rest.partition("#")
        if re.fullmatch(r"[\d.]+(e[-+]?\d+)?", value.strip()):
            seen += 1
            assert re.search(r"measured|data sheet|assumed|fitted", source), f"{name}: {key.strip()}: {source}"
    assert seen >= 15


@pytest.mark.parametrize("name", cluster_names())
def test_a_number_that_says_it_is_as_another_is_as_that_other(name: str) -> None:
    cluster = load_cluster(name)
    values = cluster.model_dump() | cluster.control.model_dump() | cluster.python.model_dump()
    values |= {"the pause": values["pause"]}
    said = 0
    for line in (CLUSTERS / f"{name}.yaml").read_text().splitlines():
        found = re.match(r"\s*(\w+): [^#]*# .*\bas (digest_source|receive|the pause)\b", line)
        if found:
            said += 1
            assert values[found[1]] == values[found[2]], f"{name}: {line.strip()}"
    assert said


def test_a_number_of_a_cluster_is_replaced_by_its_path_and_checked_as_in_the_file() -> None:
    cluster = load_cluster("h100_400g", {"fabric.oversubscription": 4.0, "fabric.nodes_per_leaf": 2.0, "cores.count": 2.0,
                                         "cores.wire": 1e-10})  # fmt: skip
    assert (cluster.fabric.oversubscription, cluster.fabric.nodes_per_leaf) == (4.0, 2)
    assert cluster.cores is not None
    assert load_cluster("h100_400g", {"nic": None}).nic is None
    with pytest.raises(ConfigError, match=r"fabric.oversubscription: Input should be greater than or equal to 1"):
        load_cluster("h100_400g", {"fabric.oversubscription": 0.5})
    with pytest.raises(ConfigError, match=r"fabric.oversubscribed: Extra inputs"):
        load_cluster("h100_400g", {"fabric.oversubscribed": 2.0})
    with pytest.raises(ConfigError, match=r"cluster.copy_rate.x: copy_rate is a value, not a block"):
        load_cluster("h100_400g", {"copy_rate.x": 1.0})


def test_a_transport_has_one_word_whatever_library_moves_it() -> None:
    assert transport_name("mooncake", {"protocol": "rdma"}) == transport_name("nixl", {"protocol": "rdma"}) == "rdma"
    assert transport_name("mooncake", {"protocol": "nvlink_intra"}) == "nvlink"
    assert (transport_name("cuda_ipc", {}), transport_name("cma", {})) == ("ipc", "cma")


def test_rdma_takes_the_network_card_within_a_node_and_others_the_local_link(plain: dict[str, Any]) -> None:
    work = work_from([[100]])
    assert of(plain, work).seconds == pytest.approx(1.0)
    rdma = of(plain, work, "rdma")
    assert rdma.seconds == pytest.approx(10.0)
    assert rdma.bound_seconds <= rdma.seconds
    assert "nic" in rdma.critical


def test_cuda_ipc_has_a_rate_of_its_own_pays_no_writes_and_does_not_leave_the_node(plain: dict[str, Any]) -> None:
    plain["local"]["ipc"], plain["writes"] = 50.0, {"seconds": 0.5}
    work = work_from([[100]], writes=60)
    assert of(plain, work, "ipc").seconds == pytest.approx(2.0)
    assert of(plain, work, "nvlink").seconds == pytest.approx(30.0)
    with pytest.raises(ConfigError, match="transport ipc stays within one node, but trainer 0 sends to rollout 1 on another"):
        of(plain, work_from([[100, 100]]), "ipc")


def test_an_oversubscribed_switch_is_in_the_lower_bound_where_all_bytes_must_cross_it(plain: dict[str, Any]) -> None:
    work = work_from([[100, 0], [0, 100]])
    cluster = parse_cluster({**plain, "fabric": {"nodes_per_leaf": 1, "oversubscription": 4.0}}, "test")
    said = run(work, Network(cluster, place(cluster, 2, 2), Faults()), EXACT).prediction
    assert said.bound_seconds == pytest.approx(200 / (20 / 4))
    assert said.bound_limit == "out of the trainer's leaf switches"
    assert said.seconds == pytest.approx(said.bound_seconds)


def items(params: float, transfers: float, looked: float = 0.0) -> Items:
    return Items(*(np.array([value]) for value in (params, transfers, looked, transfers)))


def test_parameters_and_transfers_cost_what_the_cluster_says_where_they_are_looked_at(plain: dict[str, Any]) -> None:
    work = replace(work_from([[100]]), items=items(params=100, transfers=10))
    python = {"check": 0.02, "send": 0.1, "receive": 0.3}
    said = of(plain, work, options=Options(steps=10**6), python=python, control={"compare": 0.5, "verify": 0.25})
    assert said.phases["pause"] == pytest.approx(100 * 0.02)
    assert said.phases["write"] == pytest.approx(100 * 0.02 + 10 * 0.1), "beside the wire, which takes 1 s"
    assert said.phases["verify"] == pytest.approx(10 * 0.3 + 0.5 + 0.25)
    alone = of(plain, replace(work, items=None), options=Options(steps=10**6), python=python)
    assert (alone.phases["pause"], alone.phases["write"]) == (0.0, pytest.approx(1.0))


def test_the_second_look_comes_after_bytes_that_were_staged_but_for_cuda_ipc(plain: dict[str, Any]) -> None:
    work = work_from([[100]])
    staged = replace(work.rounds[0], staged=np.ones(1))
    work = replace(work, items=items(params=100, transfers=0), rounds=(staged,))
    python = {"check": 0.005}
    assert of(plain, work, "nvlink", python=python).phases["write"] == pytest.approx(1.0 + 0.5)
    assert of(plain, work, "ipc", python=python).phases["write"] == pytest.approx(1.0)


def test_what_is_quantised_is_looked_at_before_the_pause_and_made_beside_the_wire(plain: dict[str, Any]) -> None:
    work = work_from([[100]])
    work = replace(work, items=items(0, 0, looked=200), rounds=(replace(work.rounds[0], made=np.array([300.0])),))
    said = of(plain, work, quantise={"look": 100.0, "make": 60.0})
    assert said.phases["quantise"] == pytest.approx(2.0)
    assert said.phases["pause"] == 0.0
    assert said.phases["write"] == pytest.approx(5.0), "kernels are the limit"
    assert of(plain, work, digest_source=50.0, copy_rate=600.0).phases["quantise"] == pytest.approx(4.0), "where not known"


def test_bytes_that_kernels_read_and_write_are_those_of_the_weights_and_of_what_is_made(
    fp8: tuple[Plan, Layout, Layout],
) -> None:
    plan, _, _ = fp8
    work = work_of(make_schedule(plan))
    by_hand = np.zeros(plan.source_world)
    looked: dict[int, set[int]] = {}
    for row in np.flatnonzero(plan.made).tolist():
        rank, tensor = int(plan.source_rank[row]), int(plan.tensor[row])
        by_hand[rank] += int(plan.nbytes[row])
        if plan.catalog.leads[tensor]:  # values: one for each weight
            by_hand[rank] += int(np.prod(plan.shape[row])) * 2
        looked.setdefault(rank, set()).add(int(plan.source[row]))
    np.testing.assert_allclose(sum(r.made for r in work.rounds), by_hand)
    assert work.items is not None
    sizes = [p.numel * ITEMSIZE[p.dtype] for p in plan.source_params]
    assert work.items.looked.tolist() == [sum(sizes[i] for i in looked[rank]) for rank in range(plan.source_world)]
    assert sum(r.packed.sum() for r in work.rounds) == 0, "nothing is copied that is made"
    assert (work.items.sends.sum(), work.items.receives.sum()) == (len(plan), len(plan))


def test_the_first_holder_sends_quantised_weights_and_their_scales_too(fp8: tuple[Plan, Layout, Layout]) -> None:
    plan, source, target = fp8
    other = first_holders(plan, source)
    prove_exact_once(other, source=source, target=target)
    assert sorted(other.nbytes.tolist()) == sorted(plan.nbytes.tolist())
    assert np.bincount(other.source_rank, other.nbytes).max() > 1.3 * np.bincount(plan.source_rank, plan.nbytes).max()
    with pytest.raises(PlanError, match="not the one this plan was made from"):
        first_holders(plan, target)


def test_every_rank_of_a_relay_has_a_bar_until_its_last_byte(fp8: tuple[Plan, Layout, Layout]) -> None:
    schedule, cluster = make_schedule(fp8[0]), load_cluster("h100_400g")
    relayed = simulate(schedule, cluster, Options(relay=True, engines=2))
    writing = {s.rank: s for s in relayed.spans if s.phase == "write"}
    assert {f"rollout {i}" for i in range(4)} <= set(writing)
    assert sum(writing[f"trainer {i}"].nbytes for i in range(4) if f"trainer {i}" in writing) == fp8[0].nbytes.sum() / 2
    assert writing["rollout 0"].nbytes == 2 * writing["rollout 2"].nbytes, "what it got, and what it passed on"


# -- the command ---------------------------------------------------------------------------------------------------------

RECIPE = ("+recipes=qwen3_4b_h100x8", "output=json")


@pytest.fixture
def said(capfd: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    def call(*words: str) -> Any:
        assert main(["simulate", *words]) == 0, capfd.readouterr().err
        return json.loads(capfd.readouterr().out)

    return call


def test_effects_has_a_row_for_every_choice_and_each_is_what_the_choice_alone_gives(said: Callable[..., Any]) -> None:
    facts = said(*RECIPE, "effects=true")
    rows = {row["choice"]: row for row in facts["effects"]}
    assert rows["as it is"]["seconds"] == facts["seconds"]
    for label, word in (
        ("buckets of 256 KiB", "bucket=262144"),
        ("relay from engine to engine", "relay=true"),
        ("quantised: fp8_block", "weight_sync.quant.scheme=fp8_block"),
        ("source: the lowest rank that holds a box", "source=first"),
        ("without digests", "verify=false"),
    ):
        assert rows[label]["seconds"] == pytest.approx(said(*RECIPE, word)["seconds"]), label
    assert rows["quantised: fp8_block"]["bytes"] < 0.6 * facts["bytes"]
    calls = facts["phases"]["pause"] + facts["phases"]["finish"]
    assert rows["source: the lowest rank that holds a box"]["seconds"] - calls > 1.5 * (facts["seconds"] - calls)


def test_effects_of_a_quantised_recipe_say_what_it_would_be_without(said: Callable[..., Any]) -> None:
    words = ("weight_sync.quant.scheme=fp8_block", "effects=true")
    rows = {row["choice"]: row for row in said(*RECIPE, *words)["effects"]}
    assert rows["bf16, not quantised"]["seconds"] == pytest.approx(said(*RECIPE)["seconds"])


def test_a_choice_that_cannot_be_is_a_row_with_its_reason(said: Callable[..., Any]) -> None:
    rows = {row["choice"]: row for row in said("+recipes=glm45_air_h100x64", "output=json", "effects=true")["effects"]}
    row = rows["quantised: fp8_block"]
    assert (row["seconds"], row["bytes"]) == (None, None)
    assert "do not lie on the edges" in row["limit"]


def test_switches_and_message_rates_are_changed_by_a_word(said: Callable[..., Any]) -> None:
    recipe = ("+recipes=qwen3_30b_a3b_h100x32", "output=json")
    plain = said(*recipe)
    narrow = said(*recipe, "cluster.fabric.nodes_per_leaf=2", "cluster.fabric.oversubscription=4")
    assert narrow["limit"].startswith("switch: leaf")
    assert narrow["phases"]["write"] > 3 * plain["phases"]["write"]
    slow = said(*recipe, "cluster.writes.seconds=1e-3")
    assert slow["limit"].startswith("message rate")


def test_the_transport_of_the_strategy_decides_the_links_and_a_cluster_of_others_is_remarked(
    said: Callable[..., Any], capfd: pytest.CaptureFixture[str]
) -> None:
    assert said(*RECIPE)["limit"].startswith("network card")
    assert said(*RECIPE, "weight_sync=p2p_ipc")["critical_link"].endswith(("local out", "local in"))
    assert said(*RECIPE)["remark"] == ""
    assert "of tcp, which this job uses, they say nothing" in said(*RECIPE, "weight_sync=p2p_tcp")["remark"]
    assert main(["simulate", "+recipes=qwen3_30b_a3b_h100x32", "weight_sync=p2p_ipc"]) == 1
    assert "stays within one node" in capfd.readouterr().err


def test_a_timeline_holds_every_bar_and_the_use_of_links_over_time(said: Callable[..., Any], tmp_path: Path) -> None:
    file = tmp_path / "sync.json"
    facts = said(*RECIPE, f"timeline={file}", "top=2")
    events = json.loads(file.read_text())["traceEvents"]
    bars = [e for e in events if e["ph"] == "X"]
    ranks = {e["args"]["rank"] for e in bars if e["name"] == "write"}
    assert ranks == {f"{side} {i}" for side in ("trainer", "rollout") for i in range(4)}
    assert max(e["ts"] + e["dur"] for e in bars) == pytest.approx(facts["seconds"] * 1e6)
    curves = [e for e in events if e["ph"] == "C" and e["name"] == "nic"]
    assert all(0 <= e["args"]["mean"] <= e["args"]["fullest"] <= 1.001 for e in curves)
    assert len(facts["usage"]["nic"]) == 2
    assert facts["usage_mean"]["nic"]["in_use"] == 8


def test_a_timeline_is_json(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "+recipes=nosuch", "timeline=x.svg"]) == 1
    assert "timeline=x.svg: must end in .json" in capfd.readouterr().err


def test_the_predicted_seconds_of_plan_and_of_search_are_those_of_the_same_links(
    said: Callable[..., Any], capfd: pytest.CaptureFixture[str]
) -> None:
    simulated = said(*RECIPE, "cluster.nic.rate=2e10")["seconds"]
    assert main(["plan", *RECIPE, "cluster.nic.rate=2e10"]) == 0
    assert json.loads(capfd.readouterr().out)["predicted_seconds"] == pytest.approx(simulated, rel=0.1)
    cuts = ("tp=2", "pp=1", "ep=1", "rollout_tp=2", "rollout_ep=1,2")
    assert main(["search", *RECIPE, "cluster.nic.rate=2e10", *cuts]) == 0
    found = json.loads(capfd.readouterr().out)
    best = [f for f in found["found"] if f["strategy"] == "shard to shard"]
    assert len(best) == 1, "a dense model has no experts to spread: one cut, not two"
    assert best[0]["seconds"] == pytest.approx(simulated, rel=0.1)
    assert found["refused"] == {"rollout: the same places as another cut": 1}
