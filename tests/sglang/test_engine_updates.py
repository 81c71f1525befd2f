"""Whose update of SGLang's own (/begin_weight_update) an abort ends, as SglangEngine and its workers decide it."""

from __future__ import annotations

import pytest
from test_engine import Engine, engine, soon

from weight_sync.errors import BindError, SessionError

__all__ = ["engine"]  # a fixture


@pytest.mark.parametrize("bound", [False, True])
def test_an_abort_leaves_an_update_open_that_no_session_has_opened(engine: Engine, bound: bool) -> None:
    if bound:
        engine.bind("p")
    for scheduler in engine.schedulers:
        scheduler.weight_updater._session = object()  # somebody's own /begin_weight_update

    (engine.adapter if bound else engine.controller()).abort("9-ab", "it has left the job", soon())

    assert engine.log == []
    assert all(state["update_open"] for state in engine.adapter.state(soon()).values())


def test_a_receipt_from_before_an_update_that_is_open_neither_counts_nor_resumes(engine: Engine) -> None:
    """Of a controller that died between /begin_weight_update and the workers' begin: that route may have unpacked weights."""
    engine.until_verified("s1")
    receipt = engine.adapter.finish("s1", 7, "d1", soon())
    after = engine.controller()
    for shown, update in ((receipt, None), (None, object())):
        engine.schedulers[1].weight_updater._session = update
        state = after.describe(soon()).state
        assert state is not None
        assert (state.receipt, state.paused) == (shown, True)
    with pytest.raises(SessionError, match=r"rollout rank 1: a weight update of SGLang's own is open"):
        after.resume(receipt, soon())

    assert "/continue_generation" not in engine.log


def test_a_controller_that_takes_over_closes_the_update_of_the_session_that_it_ends(engine: Engine) -> None:
    engine.until_verified("s1")

    engine.controller().abort("9-ab", "its controller died", soon())

    assert engine.log[-1] == "/end_weight_update"


def test_a_controller_that_takes_over_does_not_post_process_once_more_what_an_engines_own_loader_has_made(
    engine: Engine,
) -> None:
    engine.until_verified("s1")
    for worker in engine.workers:
        worker._loader = object()  # then begin() has opened no update, and refuses one that is open
    before = list(engine.log)

    engine.controller().abort("9-ab", "its controller died", soon())

    assert engine.log == before


def test_an_update_whose_session_no_worker_has_begun_is_closed_by_the_controller_that_opened_it(engine: Engine) -> None:
    epochs = engine.bind("p")
    engine.adapter.pause("retract", soon())
    stale = {rank: epoch + 1 for rank, epoch in epochs.items()}
    with pytest.raises(BindError):
        engine.adapter.begin("s1", 7, "p", stale, soon())

    engine.adapter.abort("s1", "begin was refused", soon())

    assert engine.log[-2:] == ["/begin_weight_update", "/end_weight_update"]
