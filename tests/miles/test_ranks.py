"""The controller inside rank 0: calls to ranks that wait in the training loop, and what ends their waiting."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from weight_sync.errors import BindError, DeadlineExceeded, SessionError, TransportError, VerifyError
from weight_sync.ids import Deadline
from weight_sync_integrations import spmd
from weight_sync_integrations.spmd import Ranks

WORLD = 3


class Gather:
    """all_gather_object among threads."""

    def __init__(self) -> None:
        self._values: list[Any] = [None] * WORLD
        self._barrier = threading.Barrier(WORLD)

    def of(self, rank: int) -> Callable[[Any], list[Any]]:
        def gather(value: Any) -> list[Any]:
            self._values[rank] = value
            self._barrier.wait(30)
            found = list(self._values)
            self._barrier.wait(30)
            return found

        return gather


def world(calls: list[Callable[..., dict[str, Any]]]) -> list[Ranks]:
    gather = Gather()
    with ThreadPoolExecutor(WORLD) as pool:
        made = [pool.submit(Ranks, rank, WORLD, calls[rank], "127.0.0.1", gather.of(rank)) for rank in range(WORLD)]
        return [future.result() for future in made]


def answer(rank: int) -> Callable[..., dict[str, Any]]:
    return lambda method, payload: {"rank": rank, "method": method, "thread": threading.get_ident(), **payload}


def following(ranks: list[Ranks], seconds: float = 20) -> tuple[ThreadPoolExecutor, list[Future[Any]]]:
    pool = ThreadPoolExecutor(WORLD)
    return pool, [pool.submit(r.follow, Deadline.after(seconds)) for r in ranks[1:]]


@pytest.fixture
def quiet() -> Any:
    made: list[Ranks] = []
    yield made
    for ranks in made:
        ranks.close()


def test_every_rank_is_called_on_the_thread_that_waits_and_all_get_the_result(quiet: list[Ranks]) -> None:
    ranks = world([answer(rank) for rank in range(WORLD)])
    quiet += ranks
    for round_ in (1, 2):  # the same objects serve update after update
        pool, waiting = following(ranks)
        with ranks[0].leading(10) as group:
            replies = group.call("describe", {rank: {"x": rank * round_} for rank in range(WORLD)}, Deadline.after(10))
            group.result = {"version": round_}
        assert [future.result(10) for future in waiting] == [{"version": round_}] * 2
        assert {rank: reply["x"] for rank, reply in replies.items()} == {0: 0, 1: round_, 2: 2 * round_}
        assert replies[0]["thread"] == threading.get_ident()
        assert len({reply["thread"] for reply in replies.values()}) == WORLD
        pool.shutdown()


@pytest.mark.parametrize(
    "error",
    [
        BindError("parameters moved"),
        VerifyError("bytes differ", [3, 4]),
        TransportError("write failed", endpoint="10.0.0.1:9", tensor="a.weight", byte_range=(16, 32), code=-1),
    ],
)
def test_what_a_rank_raises_is_raised_on_rank_0_as_it_was_and_ends_the_waiting_of_all(
    error: Exception, quiet: list[Ranks]
) -> None:
    def fails(method: str, payload: Any) -> dict[str, Any]:
        raise error

    ranks = world([answer(0), fails, answer(2)])
    quiet += ranks
    _, waiting = following(ranks)
    with pytest.raises(type(error)) as raised, ranks[0].leading(10) as group:
        group.call("write", {rank: {} for rank in range(WORLD)}, Deadline.after(10))
    assert str(raised.value) == str(error)
    assert {k: v for k, v in vars(raised.value).items() if k != "__notes__"} == vars(error)
    for future in waiting:
        with pytest.raises(SessionError, match=type(error).__name__):
            future.result(10)


def test_a_rank_that_is_gone_is_an_error_at_once_and_not_a_wait_for_the_deadline(quiet: list[Ranks]) -> None:
    ranks = world([answer(rank) for rank in range(WORLD)])
    quiet += ranks
    ranks[2].close()
    _, waiting = following(ranks[:2])
    began = time.monotonic()
    with pytest.raises(SessionError, match=r"trainer rank 2 .* does not answer"), ranks[0].leading(5) as group:
        group.call("describe", {rank: {} for rank in range(WORLD)}, Deadline.after(60))
    assert time.monotonic() - began < 30
    with pytest.raises(SessionError, match="the sync failed on rank 0"):
        waiting[0].result(10)


def test_ranks_whose_rank_0_is_gone_do_not_wait_for_their_deadline(quiet: list[Ranks], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spmd, "_LOOK", 0.2)
    ranks = world([answer(rank) for rank in range(WORLD)])
    quiet += ranks
    ranks[0].close()
    with pytest.raises(SessionError, match=r"rank 0 at .* is gone"):
        ranks[1].follow(Deadline.after(60))


def test_a_rank_that_is_never_called_ends_with_its_deadline(quiet: list[Ranks]) -> None:
    ranks = world([answer(rank) for rank in range(WORLD)])
    quiet += ranks
    with pytest.raises(DeadlineExceeded, match="waiting for rank 0"):
        ranks[1].follow(Deadline.after(0.3))
    with pytest.raises(SessionError, match="cannot lead"), ranks[1].leading(1):
        pass


def test_only_who_has_the_token_of_this_world_is_answered(quiet: list[Ranks]) -> None:
    first, second = (world([answer(rank) for rank in range(WORLD)]) for _ in range(2))
    quiet += [*first, *second]
    first[0]._peers[1] = second[1]._peers[1]
    following(second)
    with pytest.raises(SessionError, match="401"):
        first[0].call("describe", {1: {}}, Deadline.after(5))
