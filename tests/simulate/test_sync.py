"""Whole simulated syncs on clusters with round numbers, where the seconds can be worked out by hand."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from conftest import work_from

from weight_sync.errors import ConfigError
from weight_sync.ids import Side
from weight_sync.simulate import Cluster, Faults, Options, Simulation, Slow
from weight_sync.simulate.cluster import parse_cluster
from weight_sync.simulate.network import Network, place
from weight_sync.simulate.sync import run
from weight_sync.simulate.work import Work, repeated

EXACT = Options(verify=False, steps=10**6)


def simulated(work: Work, cluster: Cluster, options: Options = EXACT, faults: Faults | None = None) -> Simulation:
    placement = place(cluster, work.trainers, work.rollouts, share_nodes=options.share_nodes)
    return run(work, Network(cluster, placement, faults or Faults()), options)


def test_equal_bytes_over_equal_cards_take_bytes_over_rate_and_meet_the_bound(cluster: Cluster) -> None:
    p = simulated(work_from([[100, 0], [0, 100]]), cluster).prediction
    assert p.seconds == pytest.approx(10.0)
    assert p.bound_seconds == pytest.approx(10.0)
    assert "nic" in p.critical


def test_one_trainer_rank_that_sends_everything_is_the_limit_and_the_bound_says_what_balance_would_give(
    cluster: Cluster,
) -> None:
    p = simulated(work_from([[100, 100], [0, 0]]), cluster).prediction
    assert p.seconds == pytest.approx(20.0)
    assert p.critical == "node 0 nic 0 out"
    assert p.bound_seconds == pytest.approx(10.0)


def test_ranks_of_one_node_use_its_local_link(cluster: Cluster) -> None:
    p = simulated(work_from([[100]]), cluster, Options(verify=False, share_nodes=True)).prediction
    assert p.seconds == pytest.approx(1.0)
    assert p.critical.endswith(("local out", "local in"))


def test_a_straggler_doubles_its_own_time_and_nobody_elses(plain: dict[str, Any]) -> None:
    plain["pcie"] = 10.0  # the straggler's own link is as narrow as its card
    cluster = parse_cluster(plain, "test")
    work = work_from([[100, 0], [0, 100]])
    slow = simulated(work, cluster, faults=Faults(slow=(Slow(Side.TRAINER, 1, 0.5),)))
    ends = {s.rank: s.seconds for s in slow.spans if s.phase == "write"}
    assert ends["trainer 1"] == pytest.approx(20.0)
    assert ends["trainer 0"] == pytest.approx(10.0)


def test_a_dead_card_sends_its_rank_over_its_neighbours_card(cluster: Cluster) -> None:
    p = simulated(work_from([[100, 0], [0, 100]]), cluster, faults=Faults(down=((0, 0),))).prediction
    assert p.seconds == pytest.approx(20.0)
    assert p.critical == "node 0 nic 1 out"
    with pytest.raises(ConfigError, match="node 0 has no network card left"):
        simulated(work_from([[100]]), cluster, faults=Faults(down=((0, 0), (0, 1))))
    with pytest.raises(ConfigError, match="node 7 card 0"):
        simulated(work_from([[100]]), cluster, faults=Faults(down=((7, 0),)))


def test_a_dead_engine_fails_the_sync_when_the_transport_notices_and_nothing_is_resumed(cluster: Cluster) -> None:
    options = Options(verify=True, engines=2)
    result = simulated(work_from([[100, 0], [0, 100]]), cluster, options, Faults(dead_engine=(1, 3.0)))
    assert result.failed is not None
    assert "no engine is resumed" in result.failed
    assert result.prediction.seconds == pytest.approx(8.0)
    assert not [s for s in result.spans if s.phase in ("verify", "finish")]
    with pytest.raises(ConfigError, match="dead engine 2"):
        simulated(work_from([[100, 0], [0, 100]]), cluster, options, Faults(dead_engine=(2, 3.0)))


def test_an_oversubscribed_switch_is_the_limit_between_leaves_only(plain: dict[str, Any]) -> None:
    plain["fabric"] = {"nodes_per_leaf": 1, "oversubscription": 4.0}
    p = simulated(work_from([[100, 0], [0, 100]]), parse_cluster(plain, "test")).prediction
    assert p.seconds == pytest.approx(200 / (20 / 4))
    assert "leaf" in p.critical
    plain["fabric"]["nodes_per_leaf"] = 2
    assert simulated(work_from([[100, 0], [0, 100]]), parse_cluster(plain, "test")).prediction.seconds == pytest.approx(10.0)


def test_many_small_writes_are_limited_by_the_message_rate_and_blocking_ones_add_up(plain: dict[str, Any]) -> None:
    plain["writes"] = {"seconds": 0.5}
    work = work_from([[100]], writes=60)
    assert simulated(work, parse_cluster(plain, "test")).prediction.seconds == pytest.approx(30.0)
    assert "message rate" in simulated(work, parse_cluster(plain, "test")).prediction.limit
    plain["writes"] = {"seconds": 0.5, "threads": 4}
    assert simulated(work, parse_cluster(plain, "test")).prediction.seconds == pytest.approx(10.0)
    plain["local"]["serial"] = True
    shared = simulated(work, parse_cluster(plain, "test"), Options(verify=False, share_nodes=True))
    assert shared.prediction.seconds == pytest.approx(1.0 + 60 * 0.5 / 4)


def test_hashing_at_the_source_hides_behind_the_wire_and_at_the_destination_follows_it(plain: dict[str, Any]) -> None:
    plain |= {"digest_source": 20.0, "digest_target": 50.0}
    p = simulated(work_from([[100]]), parse_cluster(plain, "test"), Options(steps=10**6)).prediction
    assert p.phases["write"] == pytest.approx(10.0)
    assert p.phases["verify"] == pytest.approx(2.0)
    plain["digest_source"] = 5.0
    assert simulated(work_from([[100]]), parse_cluster(plain, "test")).prediction.phases["write"] == pytest.approx(10.0)
    slow = simulated(work_from([[100]]), parse_cluster(plain, "test"), Options()).prediction
    assert slow.phases["write"] == pytest.approx(20.0)


def test_cores_are_shared_by_wire_and_hashing(plain: dict[str, Any]) -> None:
    plain |= {"nic": None, "gpus_per_node": 4, "cores": {"count": 1.0, "wire": 0.05}, "digest_source": 20.0}
    plain["local"]["domain"] = 4
    p = simulated(work_from([[100]]), parse_cluster(plain, "test"), Options(steps=10**6)).prediction
    assert p.phases["write"] == pytest.approx(100 * 0.05 + 100 / 20)


def test_relay_takes_the_load_of_all_engines_but_the_first_from_the_trainer(cluster: Cluster) -> None:
    one = work_from([[100, 0], [0, 100]])
    many = repeated(one, 4)
    assert simulated(many, cluster).prediction.seconds == pytest.approx(40.0)
    relayed = simulated(many, cluster, Options(verify=False, relay=True, engines=4, bucket=1.0)).prediction
    assert relayed.seconds == pytest.approx(10.0 + 3 * 1.0 / 10)
    assert relayed.bound_seconds == pytest.approx(10.0)
    with pytest.raises(ConfigError, match="at least two engines"):
        simulated(one, cluster, Options(relay=True))


def test_a_machine_without_network_takes_no_more_ranks_than_it_has_places(plain: dict[str, Any]) -> None:
    plain |= {"nic": None}
    with pytest.raises(ConfigError, match="one machine of 2 ranks"):
        simulated(work_from([[1, 1], [1, 1]]), parse_cluster(plain, "test"))
