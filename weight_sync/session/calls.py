"""Many calls at once, all of them bounded, all of their errors told."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from weight_sync.errors import BindError, DeadlineExceeded, SessionError, listed
from weight_sync.ids import Deadline
from weight_sync.session.contracts import RolloutEngine, TrainerGroup

K = TypeVar("K")
V = TypeVar("V")

_BLAMED = "weight_sync_engines"
_GRACE = 1.0
"""Seconds beyond the deadline for calls that watch it themselves: their own error says more than ours."""


def together(calls: Mapping[K, Callable[[], V]], deadline: Deadline) -> dict[K, V]:
    """Run all calls at once, wait for all, and return their results; raise the first error with the others as notes.

    Every call is expected to keep the deadline itself. One that does not is left behind in its thread a moment later, and
    counts as failed with DeadlineExceeded.
    """
    results, failed = settled(calls, deadline)
    if failed:
        raise _first(failed)
    return results


def settled(calls: Mapping[K, Callable[[], V]], deadline: Deadline) -> tuple[dict[K, V], dict[K, BaseException]]:
    """As together(), but errors are returned by key, in the order of `calls`."""
    done: queue.SimpleQueue[tuple[K, V | None, BaseException | None]] = queue.SimpleQueue()

    def run(key: K, call: Callable[[], V]) -> None:
        try:
            done.put((key, call(), None))
        except BaseException as error:  # noqa: BLE001 - handed to the caller
            done.put((key, None, error))

    for key, call in calls.items():
        # Daemons: a call that never ends must not keep the process from ending.
        threading.Thread(target=run, args=(key, call), name=f"call {key}", daemon=True).start()
    results: dict[K, Any] = {}
    failed: dict[K, BaseException] = {}
    interrupt: BaseException | None = None
    while len(results) + len(failed) < len(calls):
        try:
            key, result, error = done.get(timeout=deadline.remaining() + _GRACE)
        except queue.Empty:
            late = [key for key in calls if key not in results and key not in failed]
            failed |= {k: DeadlineExceeded(f"{k}: not done within {deadline.seconds:g} s") for k in late}
            break
        except BaseException as error:  # noqa: BLE001 - raised below: what was started must end before anything is cleaned up
            interrupt = error
            continue
        if error is None:
            results[key] = result
        else:
            failed[key] = error
    if interrupt is not None:
        raise interrupt
    return {key: results[key] for key in calls if key in results}, {key: failed[key] for key in calls if key in failed}


class Answered:
    """A TrainerGroup whose word is not taken for it that all have answered: SessionError unless exactly the ranks that were
    asked are among the replies. One that did not write, read back or close its transport must not be taken for one that did.
    """

    def __init__(self, trainers: TrainerGroup) -> None:
        self._trainers = trainers
        self.world = trainers.world

    def call(self, method: str, payloads: Mapping[int, Mapping[str, Any]], deadline: Deadline) -> dict[int, dict[str, Any]]:
        replies = self._trainers.call(method, payloads, deadline)
        if replies.keys() != payloads.keys():
            raise SessionError(
                f"trainer ranks {sorted(payloads)} were asked to {method}, and the trainer group has replies of ranks "
                f"{sorted(replies)}"
            )
        return replies


def on_each(engines: Sequence[RolloutEngine], call: Callable[[int, RolloutEngine], V], deadline: Deadline) -> dict[int, V]:
    """call(index, engine) for all engines at once; results by index. Errors as together() has them."""
    calls = {f"engine {engine.name}": partial(call, i, engine) for i, engine in enumerate(engines)}
    if len(calls) != len(engines):
        raise BindError(f"engines need names of their own, got {listed(engine.name for engine in engines)}")
    results, failed = settled(calls, deadline)
    if failed:
        error = _first(failed)
        error.__dict__[_BLAMED] = tuple(key.removeprefix("engine ") for key in failed)
        raise error
    return dict(enumerate(results.values()))


def blamed(error: BaseException) -> tuple[str, ...]:
    """Names of the engines whose calls on_each() saw fail with this error, and at the same time with it."""
    return error.__dict__.get(_BLAMED, ())


def _first(failed: Mapping[Any, BaseException]) -> BaseException:
    (_, first), *others = failed.items()
    for key, error in others:
        add_error(first, f"also {key}", error)
    return first


def add_error(first: BaseException, what: str, other: BaseException) -> None:
    """Note `other`, with what was noted on it, on the error that will be raised."""
    first.add_note(f"{what}: {type(other).__name__}: {other}")
    for note in list(getattr(other, "__notes__", [])) if other is not first else []:
        first.add_note(f"{what}: {note}")
