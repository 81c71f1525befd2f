"""What is compared at each level of verification: it passes when it should, and finds what it is there to find."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from session_support import ALWAYS_DIRECT, DENSE, MOE, NEVER_SHORT_RUNS, World, build, declared

from weight_sync.errors import BindError, SessionError, VerifyError
from weight_sync.ids import ITEMSIZE
from weight_sync.plan.schedule import Budget
from weight_sync.session import readback, snapshot, source
from weight_sync.session.memory import Memory
from weight_sync.session.snapshot import Snapshot, Untouched, scramble
from weight_sync.session.state import State
from weight_sync.session.target import TargetAgent
from weight_sync.session.verify import Level, check_joiner
from weight_sync.transport.faults import Fault, FaultKind, ScriptedFaults
from weight_sync.transport.memory import MemoryHub, MemoryTransport

PADDED = declared(DENSE | {"vocab_size": 47, "num_hidden_layers": 1}, rollout={"tp": 3})
"""47 rows of the vocabulary over three workers: padding that no transfer writes."""


class Watch:
    """An observer that remembers whether the session called the sync verified."""

    def __init__(self) -> None:
        self.marks: list[str] = []

    def sync(self, *_: Any, **__: Any) -> Any:
        return self

    phase = sync

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def figures(self, values):
        pass

    def mark_verified(self) -> None:
        self.marks.append("verified")

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


def padded(level: Level, **more: Any) -> World:
    return build(PADDED, level=level, costs=NEVER_SHORT_RUNS, budget=Budget(512, 512), **more)


def not_served(world: World, match: str, version: int = 1, kind: type[Exception] = VerifyError) -> str:
    """A sync that must fail, after which the version stays and no engine serves. Returns the error's text."""
    before = world.sync.version
    with pytest.raises(kind, match=match) as caught:
        world.sync.sync(version)
    assert (world.sync.version, world.sync.state) == (before, State.FAILED)
    assert not any(engine.serving for engine in world.engines)
    assert world.traps.sprung
    return str(caught.value)


def padding_of(world: World, rank: int) -> tuple[str, np.ndarray[Any, Any]]:
    """A padded parameter of a rollout rank and the live bytes of its padding."""
    table = world.target_agents[rank]._table
    assert table is not None
    for p in world.layouts[1].rank_params(rank):
        if p.filling:
            # Padding comes last in vocab-padded parameters.
            flat = world.target[rank].words(world.target[rank].bytes, p.name, p).view(np.uint8)
            return p.name, flat[-p.filling * ITEMSIZE[p.dtype] :]
    raise AssertionError("no padding")


def flip(world: World, rank: int, param: str, byte: int) -> Callable[[], None]:
    def action() -> None:
        world.target[rank].bytes[world.target[rank].start[param] + byte] ^= 0x40

    return action


# -- off ---------------------------------------------------------------------------------------------------------------


def test_off_says_so_on_every_sync_compares_nothing_and_is_not_called_verified(caplog: pytest.LogCaptureFixture) -> None:
    watch = Watch()
    world = padded(Level.OFF, observer=watch)
    with caplog.at_level(logging.WARNING):
        for version in (1, 2):
            outcome = world.commit(version)
            assert outcome.digest.startswith("unverified-")
            world.step()
    assert len([r for r in caplog.records if "without comparing a single byte" in r.message]) == 2
    assert watch.marks == []


def test_off_lets_a_corrupt_byte_through_which_every_other_level_finds() -> None:
    def world(level: Level) -> World:
        def transport(side: str, rank: int, hub: MemoryHub) -> Any:
            bad = ScriptedFaults({3: Fault(FaultKind.CORRUPT)}) if (side, rank) == ("trainer", 0) else None
            return MemoryTransport(hub, faults=bad)

        return padded(level, transport=transport)

    blind = world(Level.OFF)
    expected = blind.expected()
    assert blind.sync.sync(1).version == 1
    with pytest.raises(AssertionError, match="1 bytes differ"):
        blind.check(expected)
    for level in (Level.DIGEST, Level.FULL, Level.CHECK_WEIGHT_EQUAL):
        not_served(world(level), "1 of .* transfers arrived with other bytes")


def test_off_still_refuses_memory_that_moved() -> None:
    from session_support import moved

    world = padded(Level.OFF)
    params = list(world.layouts[1].rank_params(1))

    def move() -> None:
        world.target[1] = moved(world.target[1], params)

    world.traps.do("worker 1", "verify", move)
    not_served(world, "memory moved since it was bound", kind=BindError)


# -- digest ------------------------------------------------------------------------------------------------------------


def test_padding_that_changes_during_a_session_is_found_by_the_digest_level() -> None:
    world = padded(Level.DIGEST)
    world.commit(1)
    world.step()
    name, padding = padding_of(world, 2)

    def touch() -> None:
        padding[0] ^= 1

    world.traps.do("worker 2", "verify", touch)
    assert name in not_served(world, "bytes that no transfer writes have changed", 2)


@pytest.mark.parametrize(
    "world",
    [
        lambda: build(PADDED),
        lambda: build(declared(MOE, rollout={"tp": 2, "engines": 2})),
        lambda: build(declared(DENSE, rollout={"tp": 6})),
        lambda: build(declared(DENSE, {"ranks": 2, "pp": 2}, {"tp": 1, "pp": 2})),
    ],
)
def test_what_the_plan_writes_and_what_is_watched_as_untouched_are_all_bytes_each_once(world: Callable[[], World]) -> None:
    one = world()
    one.sync.connect()
    for rank, agent in enumerate(one.target_agents):
        memory, table = agent._memory, agent._table
        assert memory is not None
        assert table is not None
        buffer = one.target[rank]
        before = buffer.bytes.copy()
        untouched = Untouched(memory, table)
        digests = untouched.digests()
        covered = scramble(memory, table, Snapshot(memory))
        assert untouched.digests() == digests
        params = list(one.layouts[1].rank_params(rank))
        assert covered + untouched.nbytes == sum(p.numel * ITEMSIZE[p.dtype] for p in params)
        assert covered == int((buffer.bytes != before).sum())
        assert covered == sum((p.numel - p.filling) * ITEMSIZE[p.dtype] for p in params)


# -- full --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"sides": declared(MOE, rollout={"tp": 2}), "costs": NEVER_SHORT_RUNS, "budget": Budget(512, 512)},
        {"sides": declared(MOE, rollout={"tp": 3, "engines": 2}), "costs": ALWAYS_DIRECT},
        {"sides": PADDED, "costs": NEVER_SHORT_RUNS},
        {"sides": declared(DENSE, {"ranks": 2, "pp": 2}, {"tp": 1, "pp": 2}), "explicit": True},
    ],
)
@pytest.mark.parametrize("buffer", [4096, 1 << 20])
def test_full_reads_back_every_byte_that_was_written(
    options: dict[str, Any], buffer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "BUFFER_BYTES", buffer)
    monkeypatch.setattr(readback, "_RUNS", 37)
    world = build(level=Level.FULL, **options)
    read: list[int] = []
    compare = source.compare
    monkeypatch.setattr(source, "compare", lambda *a, **k: (read.append((done := compare(*a, **k))[0]), done)[1])
    outcome = world.commit(1)
    assert sum(read) == outcome.bytes == world.payload()


@pytest.mark.parametrize("seed", range(6))
def test_full_names_tensor_ranks_and_byte_of_what_changed_after_the_digests(seed: int) -> None:
    world = padded(Level.FULL)
    world.commit(1)
    world.step()
    noise = np.random.default_rng(seed)
    plan = world.sync.connect().plan
    row = int(noise.integers(len(plan)))
    index = noise.integers(0, plan.shape[row])
    element = int(plan.target_start[row] + (index * plan.target_strides[row]).sum())
    byte = element * int(plan.itemsize[row]) + int(noise.integers(plan.itemsize[row]))
    target = plan.target_params[int(plan.target[row])]
    world.traps.do(f"trainer {plan.source_rank[row]}", "compare", flip(world, target.rank, target.name, byte))
    text = not_served(world, "first byte that differs", 2)
    assert plan.catalog.name(int(plan.tensor[row])) in text
    assert f"to rollout rank {target.rank} ({target.name})" in text
    assert f"first byte that differs is {byte} of the parameter" in text
    sent, found = (int(x, 16) for x in re.findall(r"0x[0-9a-f]+", text)[:2])
    assert sent ^ found == 0x40
    world.commit(3)


def test_a_read_back_that_fails_is_fenced_like_a_write() -> None:
    def transport(side: str, rank: int, hub: MemoryHub) -> Any:
        # Ranges are counted over writes and reads: far behind the last write of the first sync.
        late = ScriptedFaults({n: Fault(FaultKind.ERROR, code=-1) for n in range(reads_from, reads_from + 1)})
        return MemoryTransport(hub, faults=late if (side, rank) == ("trainer", 1) and reads_from else None)

    reads_from = 0
    counting = build(PADDED, level=Level.DIGEST, transport=transport)
    counting.commit(1)
    reads_from = counting.source_agents[1]._transport._moved  # type: ignore[union-attr]
    world = build(PADDED, level=Level.FULL, transport=transport)
    from weight_sync.errors import TransportError

    not_served(world, "not read: the transport reports an error", kind=TransportError)
    assert not any(s.quiet for s in world.sources), "fenced, then released"
    assert not world.hub._peers


def test_nothing_but_weights_and_buffers_of_our_own_is_ever_registered() -> None:
    world = padded(Level.FULL)
    world.commit(1)
    for agent in (*world.source_agents, *world.target_agents):
        transport = agent._transport
        assert isinstance(transport, MemoryTransport)
        memory = agent._memory if isinstance(agent, TargetAgent) else agent._bound.memory  # type: ignore[union-attr]
        assert memory is not None
        own = [agent._stage] + ([] if isinstance(agent, TargetAgent) else [agent._readback])
        expected = [*memory.storages, *(buffer.storage for buffer in own if buffer is not None)]
        assert sorted((r.address, r.nbytes) for r in transport._regions.regions) == sorted(
            (s.address, s.nbytes) for s in expected
        )


# -- check_weight_equal ------------------------------------------------------------------------------------------------


def test_check_weight_equal_writes_twice_and_leaves_everything_as_one_sync_does() -> None:
    world = padded(Level.CHECK_WEIGHT_EQUAL)
    expected = world.expected()
    assert world.sync.sync(1).version == 1
    world.check(expected)
    assert world.traps.verbs("engine e0").count("check") == 3
    assert all(engine.serving for engine in world.engines)
    assert all(agent._snapshot is None for agent in world.target_agents)


@pytest.mark.parametrize("kind", [FaultKind.DROP, FaultKind.TRUNCATE])
def test_a_lost_write_of_bytes_that_happened_to_be_right_already_shows_after_scrambling(kind: FaultKind) -> None:
    """The same weights twice: losing a write of the second sync changes nothing, which digests cannot object to."""

    def transport(side: str, rank: int, hub: MemoryHub) -> Any:
        faults = ScriptedFaults({n: Fault(kind) for n in range(first, 10_000)})
        return MemoryTransport(hub, faults=faults if (side, rank) == ("trainer", 0) and first else None)

    direct: dict[str, Any] = {"sides": PADDED, "costs": ALWAYS_DIRECT, "transport": transport}
    first = 0
    counting = build(**direct)
    counting.commit(1)
    first = counting.source_agents[0]._transport._moved  # type: ignore[union-attr]
    blind = build(**direct)
    blind.commit(1)
    blind.commit(2)  # nothing is written at all, and nothing had to be
    not_served(build(level=Level.CHECK_WEIGHT_EQUAL, **direct), "arrived with other bytes")


def test_a_byte_changed_after_the_last_digest_fails_the_comparison_by_name() -> None:
    world = padded(Level.CHECK_WEIGHT_EQUAL)
    world.sync.connect()
    plan = world.sync.connect().plan
    row = len(plan) // 2
    target = plan.target_params[int(plan.target[row])]
    byte = int(plan.target_start[row]) * int(plan.itemsize[row])
    world.traps.do(f"worker {target.rank}", "compare", flip(world, target.rank, target.name, byte))
    text = not_served(world, "not as they were")
    assert f"{target.name} ({plan.catalog.name(int(plan.tensor[row]))}): 1 of " in text
    assert f"first byte {byte}" in text


def test_a_byte_of_padding_that_changes_fails_the_comparison_too() -> None:
    world = padded(Level.CHECK_WEIGHT_EQUAL)
    world.sync.connect()
    name, padding = padding_of(world, 2)

    def touch() -> None:
        padding[-1] ^= 1

    world.traps.do("worker 2", "compare", touch)
    text = not_served(world, "not as they were")
    assert name in text
    assert "no transfer writes there" in text


def test_check_weight_equal_against_what_the_engine_loaded_passes_only_for_the_same_weights() -> None:
    world = padded(Level.DIGEST)
    world.commit(1)  # stands for an engine that loaded the trainer's checkpoint
    expected = world.expected()
    assert world.sync.check_weight_equal(2).version == 2
    world.check(expected)
    assert all(engine.serving for engine in world.engines)
    world.step()  # now the engine holds other weights than the trainer
    with pytest.raises(VerifyError, match="not as they were"):
        world.sync.check_weight_equal(3)
    assert world.sync.version == 2
    assert not any(engine.serving for engine in world.engines)
    with pytest.raises(SessionError, match="session is failed"):  # it would compare with what the failed one wrote
        world.sync.check_weight_equal(3)
    world.commit(4)


def test_a_snapshot_that_shares_memory_with_the_weights_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    world = padded(Level.DIGEST)
    world.sync.connect()
    memory = world.target_agents[0]._memory
    assert memory is not None
    monkeypatch.setattr(snapshot, "duplicates", list)
    with pytest.raises(VerifyError, match="shares memory with live weights"):
        Snapshot(memory)


def test_a_snapshot_that_was_written_to_proves_nothing() -> None:
    world = padded(Level.DIGEST)
    world.sync.connect()
    agent = world.target_agents[0]
    assert agent._memory is not None
    taken = Snapshot(agent._memory)
    next(iter(taken._copies.values()))[0] ^= 1
    with pytest.raises(VerifyError, match=r"the snapshot of .* was written to"):
        taken.compare(agent._table or {})


def test_regions_that_overlap_are_found_by_scrambling() -> None:
    words = np.arange(16, dtype=np.int16)
    memory = Memory({"w": words}, "rollout rank 0")
    table = {"tensors": ["a", "b"], "params": ["w", "w"], "start": [0, 4], "strides": [[1], [1]], "shape": [[8], [8]]}
    with pytest.raises(VerifyError, match="the plan covers 32 bytes, 16 differ"):
        scramble(memory, table, Snapshot(memory))


def test_a_worker_neither_scrambles_without_a_snapshot_nor_ends_before_it_compared() -> None:
    world = padded(Level.DIGEST)
    connection = world.sync.connect()
    agent = world.target_agents[0]
    session = {"session": f"{world.sync._controller}-5"}
    agent.call("begin", session | {"version": 1, "plan": connection.schedule.digest, "epoch": connection.epochs[0][0]})
    with pytest.raises(SessionError, match="scramble without a snapshot"):
        agent.call("scramble", session)
    with pytest.raises(SessionError, match="compare without a snapshot"):
        agent.call("compare", session)
    agent.call("snapshot", session)
    agent.call("scramble", session)
    with pytest.raises(SessionError, match="scrambled and not compared since"):
        agent.call("end", session)
    with pytest.raises(VerifyError, match="not as they were"):
        agent.call("compare", session)
    with pytest.raises(SessionError, match="scrambled and not compared since"):
        agent.call("end", session)
    agent.call("abort", session | {"reason": "the drill"})


def test_a_joiners_digests_are_compared_with_the_committed_ones_by_name() -> None:
    table = {"rank": 3, "tensors": ["a", "b"], "params": ["p", "q"]}
    zero, one, other = "0" * 16, "1" * 16, "12" * 8
    check_joiner("e1", table, [zero, one], zero + one)
    with pytest.raises(VerifyError, match=rf"engine e1, worker 3: 1 of 2 .*: b \(q\): committed {one}, read {other}"):
        check_joiner("e1", table, [zero, one], zero + other)
    with pytest.raises(VerifyError, match="1 digests for 2 transfers"):
        check_joiner("e1", table, [zero, one], zero)
