"""A joining worker reads its weights out of the live memory of a worker that serves them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from agent_process import RemoteAgent
from session_support import DENSE, World, build, declared

from weight_sync.errors import BindError, SessionError, TransportError, VerifyError
from weight_sync.session import pull as pulling
from weight_sync.session.digests import split_digests
from weight_sync.session.target import TargetAgent
from weight_sync.session.verify import check_joiner
from weight_sync.transport.base import Batch, Ticket, Transport
from weight_sync.transport.cma import CmaTransport
from weight_sync.transport.faults import Fault, FaultKind, ScriptedFaults
from weight_sync.transport.memory import MemoryTransport

SIDES = declared(DENSE | {"vocab_size": 47, "num_hidden_layers": 1}, rollout={"tp": 2})


def job(**more: Any) -> World:
    """One engine of two workers that serve version 1; with padding."""
    world = build(SIDES, **more)
    world.commit(1)
    world.traps.log.clear()
    return world


class Joiner:
    """A worker like rollout rank `rank`, with other bytes, bound with the same table and paused."""

    def __init__(self, world: World, rank: int, transport: Callable[[], Transport] | None = None, copy: Any = None) -> None:
        from session_support import Buffer

        self.lender = world.target_agents[rank]
        self.buffer = Buffer(list(world.layouts[1].rank_params(rank)), np.random.default_rng(99))
        self.agent = TargetAgent(
            rank=rank,
            host="localhost",
            coords=self.lender.coords,
            tensors=lambda: self.buffer.arrays,
            transport=transport or (lambda: MemoryTransport(world.hub)),
        )
        assert self.lender._table is not None
        self.table: dict[str, Any] = self.lender._table
        binding = self.agent.call("bind", self.table)
        self.agent.call("begin", {"session": "j", "version": 1, "plan": self.table["plan"], "epoch": binding["epoch"]})

    def pull(self, peer: Mapping[str, Any], seconds: float = 30.0) -> dict[str, Any]:
        return self.agent.call("pull", {"session": "j", "peer": peer, "seconds": seconds})

    def digests(self) -> str:
        return self.agent.call("verify", {"session": "j", "digests": True})["digests"]


def written(world: World, rank: int, raw: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """A copy of a rank's buffer in which everything that no HF tensor fills is 0."""
    buffer, layout = world.target[rank], world.layouts[1]
    kept = np.zeros(len(raw), bool)
    params = {p.name: p for p in layout.rank_params(rank)}
    marks = np.zeros(len(raw), np.uint8)
    for shard in layout.rank_shards(rank):
        view = buffer.elements(marks, params[shard.param], shard.start, shard.strides, shard.box.shape)
        view[...] = np.iinfo(view.dtype).max
    kept = marks > 0
    return np.where(kept, raw, 0)


def test_a_joiner_gets_every_byte_that_a_sync_writes_and_no_other_byte_changes() -> None:
    world = job()
    peer = world.target_agents[1]._binding()
    committed = honest(world, 1)
    joiner = Joiner(world, 1)
    before, lender = joiner.buffer.bytes.copy(), world.target[1].bytes.copy()
    world.traps.log.clear()
    reply = joiner.pull(peer)
    assert world.traps.log == [], "the worker that is read from is not asked for anything"
    assert np.array_equal(world.target[1].bytes, lender)
    want = written(world, 1, lender)
    assert np.array_equal(written(world, 1, joiner.buffer.bytes), want)
    untouched = written(world, 1, np.full_like(before, 1)) == 0
    assert np.array_equal(joiner.buffer.bytes[untouched], before[untouched]), "padding and guards"
    assert reply["bytes"] == int((~untouched).sum())
    check_joiner("e9", joiner.table, committed, joiner.digests())
    joiner.agent.call("end", {"session": "j"})


def test_reads_are_bounded_in_bytes_and_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulling, "_BATCH_BYTES", 1000)
    world = job()
    flying: list[int] = []
    most: list[int] = []

    class Counting(MemoryTransport):
        def read(self, batch: Batch) -> Ticket:
            assert batch.nbytes.sum() <= 2000
            ticket = super().read(batch)
            flying.append(ticket.id)
            most.append(len(flying))
            return ticket

        def wait(self, ticket: Ticket, deadline: Any) -> Any:
            flying.remove(ticket.id)
            return super().wait(ticket, deadline)

    joiner = Joiner(world, 0, lambda: Counting(world.hub))
    joiner.pull(world.target_agents[0]._binding())
    assert np.array_equal(written(world, 0, joiner.buffer.bytes), written(world, 0, world.target[0].bytes))
    assert max(most) == 2
    assert len(most) > 5


@pytest.mark.parametrize("change", ["shape", "dtype", "missing", "more"])
def test_another_layout_is_refused_by_name_before_a_byte_is_read(change: str) -> None:
    world = job()
    peer = world.target_agents[0]._binding()
    name = next(iter(peer["params"]))
    shape, dtype = peer["params"][name]
    other = {
        "shape": peer["params"] | {name: [[shape[0] + 1, *shape[1:]], dtype]},
        "dtype": peer["params"] | {name: [shape, "float32"]},
        "missing": {key: value for key, value in peer["params"].items() if key != name},
        "more": peer["params"] | {"model.extra.weight": [[4], "bfloat16"]},
    }[change]
    joiner = Joiner(world, 0)
    before = joiner.buffer.bytes.copy()
    with pytest.raises(BindError, match="holds another layout") as caught:
        joiner.pull(peer | {"params": other})
    assert ("model.extra.weight" if change == "more" else name) in str(caught.value)
    assert np.array_equal(joiner.buffer.bytes, before)


def test_a_worker_does_not_read_from_itself_nor_from_one_that_was_bound_anew() -> None:
    world = job()
    old = world.target_agents[0]._binding()
    joiner = Joiner(world, 0)
    before = joiner.buffer.bytes.copy()
    with pytest.raises(BindError, match="from itself"):
        joiner.pull(joiner.agent._binding())
    world.target_agents[0].call("abort", {"reason": "the drill"})
    world.target_agents[0].call("bind", joiner.table)
    with pytest.raises(TransportError):
        joiner.pull(old)
    assert np.array_equal(joiner.buffer.bytes, before)


@pytest.mark.parametrize("kind", [FaultKind.ERROR, FaultKind.DELAY])
def test_after_a_pull_that_failed_a_worker_does_nothing_but_abort(kind: FaultKind) -> None:
    world = job()
    script = {2: Fault(kind, seconds=0.3)}
    faults = ScriptedFaults(script)
    joiner = Joiner(world, 0, lambda: MemoryTransport(world.hub, faults=faults))
    peer = world.target_agents[0]._binding()
    with pytest.raises(TransportError):
        joiner.pull(peer, seconds=0.1)
    for verb in ("verify", "end", "snapshot", "pull", "place"):
        with pytest.raises(SessionError, match="a pull failed and may still be writing to the weights"):
            joiner.agent.call(verb, {"session": "j", "peer": peer, "seconds": 1, "round": 0})
    joiner.agent.call("abort", {"session": "j", "reason": "the drill"})
    binding = joiner.agent.call("bind", joiner.table)
    assert binding["endpoint"] != peer["endpoint"]
    again = {"session": "k", "version": 1, "plan": joiner.table["plan"], "epoch": binding["epoch"]}
    joiner.agent.call("begin", again)
    script.clear()
    joiner.agent.call("pull", {"session": "k", "peer": peer, "seconds": 30})
    assert np.array_equal(written(world, 0, joiner.buffer.bytes), written(world, 0, world.target[0].bytes))


@pytest.mark.parametrize("kind", [FaultKind.DROP, FaultKind.CORRUPT, FaultKind.TRUNCATE])
def test_a_read_that_reports_success_and_lies_is_found_by_the_committed_digests(kind: FaultKind) -> None:
    world = job()
    joiner = Joiner(world, 0, lambda: MemoryTransport(world.hub, faults=ScriptedFaults({1: Fault(kind)})))
    committed = honest(world, 0)
    joiner.pull(world.target_agents[0]._binding())
    with pytest.raises(VerifyError, match="are not the committed bytes"):
        check_joiner("e9", joiner.table, committed, joiner.digests())


def test_weights_that_change_while_they_are_read_are_found_by_the_committed_digests() -> None:
    world = job()
    committed = honest(world, 0)

    class Stepping(MemoryTransport):
        def read(self, batch: Batch) -> Ticket:
            world.step_target()  # type: ignore[attr-defined]
            return super().read(batch)

    def change() -> None:
        world.target[0].bytes[world.target[0].start["model.norm.weight"]] ^= 1

    world.step_target = change  # type: ignore[attr-defined]
    joiner = Joiner(world, 0, lambda: Stepping(world.hub))
    joiner.pull(world.target_agents[0]._binding())
    with pytest.raises(VerifyError, match=r"model\.norm\.weight"):
        check_joiner("e9", joiner.table, committed, joiner.digests())


def honest(world: World, rank: int) -> list[str]:
    """The committed digests of a rollout rank's transfers."""
    agent = world.target_agents[rank]
    binding = agent._binding()
    assert agent._table is not None
    session = {"session": f"{world.sync._controller}-5"}
    agent.call("begin", session | {"version": 2, "plan": agent._table["plan"], "epoch": binding["epoch"]})
    found = agent.call("verify", session)["digests"]
    agent.call("end", session)
    return split_digests(found)


def test_a_worker_whose_process_stands_still_can_be_read_from() -> None:
    """One-sided means that the lender's processor takes no part: here its whole process is stopped."""
    world = job()
    layout, table = world.layouts[1], world.target_agents[0]._table
    assert table is not None
    lender = RemoteAgent("target", layout, 0, seed=5, transport="cma")
    try:
        binding = lender.call("bind", table)
        lender.call("begin", {"session": "v", "version": 2, "plan": table["plan"], "epoch": binding["epoch"]})
        committed = split_digests(lender.call("verify", {"session": "v"})["digests"])
        joiner = Joiner(world, 0, CmaTransport)
        lender.stop()
        reply = joiner.pull(binding)
        assert os.waitid(os.P_PID, lender.pid, os.WSTOPPED | os.WNOWAIT) is not None, "still stopped"
        assert reply["bytes"] == int((written(world, 0, np.full_like(joiner.buffer.bytes, 1)) > 0).sum())
        check_joiner("e9", joiner.table, committed, joiner.digests())
    finally:
        lender.end()


def test_an_in_process_engine_pulls_for_each_of_its_workers() -> None:
    from weight_sync.ids import Deadline
    from weight_sync.session.inprocess import InProcessEngine

    world = job()
    joiners = [Joiner(world, rank) for rank in range(2)]
    engine = InProcessEngine("e9", [j.agent for j in joiners], model={}, sizes={})
    peers = {rank: world.target_agents[rank]._binding() for rank in range(2)}
    replies = engine.pull("j", peers, Deadline.after(30))
    assert sorted(replies) == [0, 1]
    assert engine.verify("j", Deadline.after(30)) == {rank: "".join(honest(world, rank)) for rank in range(2)}
