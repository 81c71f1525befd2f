"""A controller that starts on engines and trainer ranks that live already: who was here, what was left, who may call.

Nothing is kept on disk: engines and trainer ranks say themselves what they hold. Whoever starts last has the say (gate.py); a
controller that is only slow, and wakes up, is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from weight_sync.errors import SessionError, listed
from weight_sync.ids import Deadline
from weight_sync.session.calls import on_each, together
from weight_sync.session.contracts import EngineDescription, EngineState, RolloutEngine, TrainerGroup
from weight_sync.session.gate import new_controller

Action = Literal["resumed", "serving", "redo"]


@dataclass(frozen=True, slots=True)
class Recovery:
    """What recover() found and did.

    action: "resumed": every engine held one verified version, and those that still stood were resumed with their receipts.
    "serving": all served one version already. "redo": they do not hold one version; those that stand say so, and the next sync
    brings them back. version: what is committed on all of them (-1: nothing). engines: where each stood, in words.
    """

    action: Action
    version: int
    engines: dict[str, str]


@dataclass(frozen=True, slots=True, eq=False)
class Survey:
    """Everybody's description. trainers: by rank. engines: by place."""

    trainers: dict[int, dict[str, Any]]
    engines: dict[int, EngineDescription]

    @property
    def generation(self) -> int:
        """The highest that anybody has seen."""
        here = [int(d.get("generation", 0)) for d in self.trainers.values()]
        return max([*here, *(e.state.generation for e in self.engines.values() if e.state is not None)], default=0)


def survey(trainers: TrainerGroup, engines: Sequence[RolloutEngine], deadline: Deadline) -> Survey:
    described = trainers.call("describe", {rank: {} for rank in range(trainers.world)}, deadline)
    return Survey(described, on_each(engines, lambda _, engine: engine.describe(deadline), deadline))


def survey_of(server: EngineDescription) -> Survey:
    """One engine alone."""
    return Survey({}, {0: server})


def claim(
    trainers: TrainerGroup | None, engines: Sequence[RolloutEngine], found: Survey, controller: str, deadline: Deadline
) -> str:
    """Shut everybody's door to older controllers. controller: ours, or "" to take the next generation. Returns ours.

    Raises SessionError when a newer controller is here: this one is stale then.
    """
    controller = controller or new_controller(found.generation + 1)
    if trainers is not None:
        trainers.call("claim", {rank: {"controller": controller} for rank in range(trainers.world)}, deadline)
    on_each(engines, lambda _, engine: engine.claim(controller, deadline), deadline)
    return controller


def end_leftovers(
    trainers: TrainerGroup | None, engines: Sequence[RolloutEngine], found: Survey, controller: str, deadline: Deadline
) -> bool:
    """End sessions that are open although no controller is in one: of one that died, or of a call that came after its end.

    Trainer ranks first: what they may still write is closed before anything else, and the trainer may step again. Returns
    whether there were any; then `found` is out of date: an engine whose own loader was at work did not show its weights.
    """
    open_ranks = {rank: d["session"] for rank, d in found.trainers.items() if d.get("session")}
    if trainers is not None and open_ranks:
        reason = f"left open when controller {controller} took over"
        fence = {"reason": reason, "controller": controller}
        trainers.call("fence", dict.fromkeys(range(trainers.world), fence), deadline)
        release = {rank: {"session": session, "controller": controller} for rank, session in open_ranks.items()}
        trainers.call("release", release, deadline)
    standing = {i: e.state for i, e in found.engines.items() if e.state is not None and e.state.session}
    calls = {
        f"engine {engines[i].name}": partial(
            engines[i].abort, controller, f"controller {controller} took over: {state.text()}", deadline
        )
        for i, state in standing.items()
    }
    together(calls, deadline)
    return bool(open_ranks or standing)


def judge(states: Mapping[str, tuple[EngineState, int]]) -> tuple[Action, int]:
    """(what can be done with engines in these states, the version that all of them hold). states: (state, version) by name.

    An engine holds a version for certain if it shows the receipt of it and no session is open. All with receipts of one version
    and one digest: that version was verified everywhere, whether the controller lived to see it or not.
    """
    receipts = [state.receipt for state, _ in states.values()]
    closed = not any(state.session for state, _ in states.values())
    held = {(r.version, r.digest) for r in receipts if r is not None}
    if closed and len(held) == 1 and None not in receipts:
        paused = any(state.paused for state, _ in states.values())
        return ("resumed" if paused else "serving"), next(iter(held))[0]
    versions = {version for _, version in states.values()}
    if closed and len(versions) == 1 and not any(state.paused for state, _ in states.values()):
        return "serving", versions.pop()
    # Whatever the engines hold beyond this was not verified on all of them, so it was never committed.
    return "redo", min(versions, default=-1)


def states_of(found: Survey, engines: Sequence[RolloutEngine]) -> dict[str, tuple[EngineState, int]]:
    silent = [engines[i].name for i, e in found.engines.items() if e.state is None]
    if silent:
        raise SessionError(
            f"engines {listed(silent)} do not say where they stand (their adapter fills in no state), so nothing can be "
            "recovered from them; sync() brings them to a version as ever"
        )
    return {engines[i].name: (e.state, e.version) for i, e in found.engines.items() if e.state is not None}


def take_over(trainers: TrainerGroup, engines: Sequence[RolloutEngine], deadline: Deadline) -> tuple[str, Recovery]:
    """(our name, what was found and done): see WeightSync.recover."""
    found = survey(trainers, engines, deadline)
    states = states_of(found, engines)
    action, _ = judge(states)
    if action == "resumed":  # before the claim: the receipts are of sessions that it shuts out
        calls = {
            f"engine {engine.name}": partial(engine.resume, receipt, deadline)
            for engine in engines
            if states[engine.name][0].paused and (receipt := states[engine.name][0].receipt) is not None
        }
        together(calls, deadline)
    controller = claim(trainers, engines, found, "", deadline)
    # Looked at again: until the claim an older controller may have opened a session or committed another version, and can no
    # more. What it paused after the first look cannot be resumed: the claim shut its receipts out.
    found = survey(trainers, engines, deadline)
    now = states_of(found, engines)
    verdict, version = judge(now)
    if verdict != "serving":
        action, states = "redo", now
    elif action == "redo":  # it finished by itself what it was in
        action, states = "serving", now
    end_leftovers(trainers, engines, found, controller, deadline)
    if action == "redo":
        _abort_standing(engines, now, controller, deadline)
    return controller, Recovery(action, version, {name: state.text() for name, (state, _) in states.items()})


def _abort_standing(
    engines: Sequence[RolloutEngine], states: Mapping[str, tuple[EngineState, int]], controller: str, deadline: Deadline
) -> None:
    """Say on every engine that stands, or has a session open, why: receipts on it are void, only a sync brings it back."""
    calls = {}
    for engine in engines:
        state, _ = states[engine.name]
        if state.paused or state.session:
            reason = f"controller {controller} took over: {state.text()}; the engines do not hold one version"
            calls[f"engine {engine.name}"] = partial(engine.abort, controller, reason, deadline)
    together(calls, deadline)
