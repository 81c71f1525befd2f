"""Both sides in one process: a trainer group over threads and an engine double, for tests, drills and trying things out.

The double holds plain arrays, not a model. It keeps a real engine's rules: it refuses to begin unless paused, and to resume
without the receipt of its own last finish.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from weight_sync.errors import RolloutError
from weight_sync.ids import ITEMSIZE, Deadline
from weight_sync.layout.table import Layout
from weight_sync.session.calls import together
from weight_sync.session.contracts import (
    CheckStep,
    EngineDescription,
    EngineState,
    PauseMode,
    RankDescription,
    Receipt,
    describe_from_json,
)
from weight_sync.session.memory import describe, epoch_of
from weight_sync.session.source import SourceAgent
from weight_sync.session.target import TargetAgent

_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def arrays_for(layout: Layout, rank: int) -> dict[str, np.ndarray[Any, Any]]:
    """Zeroed arrays for every parameter of a rank. dtypes numpy lacks (bfloat16) are TypedArray views, see below."""
    return {p.name: typed(np.zeros(p.shape, _WORDS[ITEMSIZE[p.dtype]]), p.dtype) for p in layout.rank_params(rank)}


class TypedArray(np.ndarray[Any, Any]):
    """A numpy array of unsigned words that says it holds another dtype (bfloat16, fp8)."""

    label: str

    @property
    def dtype_label(self) -> str:
        return self.label


def typed(array: np.ndarray[Any, Any], dtype: str) -> Any:
    """The same memory, labelled with a torch dtype name."""
    view = array.view(TypedArray)
    view.label = dtype
    return view


@dataclass(slots=True)
class ArraySource:
    """A TrainerSource over arrays."""

    rank: int
    arrays: Mapping[str, Any]
    coords: Mapping[str, int] = field(default_factory=dict[str, int])
    host: str = "localhost"
    shards: list[dict[str, Any]] | None = None
    quiet: bool = False

    def describe(self) -> RankDescription:
        params, storages = describe(self.arrays, f"trainer rank {self.rank}")
        return RankDescription(self.rank, self.host, dict(self.coords), epoch_of(storages), params, storages, None, self.shards)

    def tensors(self) -> Mapping[str, Any]:
        return self.arrays

    def quiesce(self) -> None:
        self.quiet = True

    def release(self) -> None:
        self.quiet = False


class InProcessTrainers:
    """A TrainerGroup over agents in this process; calls run in threads, one for each rank."""

    def __init__(self, agents: Sequence[SourceAgent]) -> None:
        self._agents = {agent.rank: agent for agent in agents}
        self.world = len(self._agents)

    def call(self, method: str, payloads: Mapping[int, Mapping[str, Any]], deadline: Deadline) -> dict[int, dict[str, Any]]:
        deadline.check(f"trainer {method}")
        return together({r: (lambda r=r, p=p: self._agents[r].call(method, p)) for r, p in payloads.items()}, deadline)


class InProcessEngine:
    """A RolloutEngine over agents in this process. model: the HF config it claims to serve. sizes: by axis.

    What it holds and where it stands is kept here, as a real engine keeps it in its own process: any number of controllers may
    come to it one after another.
    """

    def __init__(
        self,
        name: str,
        agents: Sequence[TargetAgent],
        *,
        model: Mapping[str, Any],
        sizes: Mapping[str, int],
        recording: Mapping[int, dict[str, Any]] | None = None,
    ) -> None:
        self.name = name
        self._agents = {agent.rank: agent for agent in agents}
        self._model, self._sizes, self._recording = dict(model), dict(sizes), recording
        self.version = -1
        self.paused = False
        self.reason: str | None = None
        self._receipt: Receipt | None = None
        self._session = ""

    @property
    def serving(self) -> bool:
        return not self.paused

    def _each(self, method: str, payloads: Mapping[int, Mapping[str, Any]], deadline: Deadline) -> dict[int, dict[str, Any]]:
        deadline.check(f"engine {self.name}: {method}")
        return together({r: (lambda r=r, p=p: self._agents[r].call(method, p)) for r, p in payloads.items()}, deadline)

    def _all(self, method: str, deadline: Deadline, **payload: Any) -> dict[int, dict[str, Any]]:
        return self._each(method, dict.fromkeys(self._agents, payload), deadline)

    def describe(self, deadline: Deadline) -> EngineDescription:
        answers = self._all("describe", deadline)
        opened = {answer["session"] for answer in answers.values()} - {None}
        return EngineDescription(
            self.name,
            "in-process",
            dict(self._model),
            dict(self._sizes),
            self.version,
            ("abort", "retract"),
            tuple(describe_from_json(answer) for _, answer in sorted(answers.items())),
            state=EngineState(
                paused=self.paused,
                session=self._session or min(opened, default=""),
                receipt=self._receipt,
                reason=self.reason or "",
                generation=max(answer["generation"] for answer in answers.values()),
            ),
        )

    def claim(self, controller: str, deadline: Deadline) -> None:
        self._all("claim", deadline, controller=controller)

    def record(self, tensors: Mapping[str, tuple[list[int], str]], deadline: Deadline) -> dict[int, dict[str, Any]]:
        if self._recording is None:
            raise RolloutError(f"engine {self.name}: this double has no loader to record")
        return dict(self._recording)

    def bind(self, tables: Mapping[int, Mapping[str, Any]], deadline: Deadline) -> dict[int, dict[str, Any]]:
        return self._each("bind", tables, deadline)

    def pause(self, mode: PauseMode, deadline: Deadline) -> None:
        self.paused, self._receipt = True, None

    def begin(self, session: str, version: int, plan: str, epochs: Mapping[int, int], deadline: Deadline) -> None:
        if not self.paused:
            raise RolloutError(f"engine {self.name}: begin while serving; pause first")
        common = {"session": session, "version": version, "plan": plan}
        self._all("admit", deadline, session=session)  # a controller that is refused must not touch what another one opened
        self._session, self._receipt = session, None
        self._each("begin", {rank: common | {"epoch": epochs[rank]} for rank in self._agents}, deadline)

    def place(self, session: str, round: int, deadline: Deadline) -> None:
        self._all("place", deadline, session=session, round=round)

    def patch(
        self, session: str, base: Mapping[str, Any], messages: Mapping[int, Sequence[Sequence[int]]], deadline: Deadline
    ) -> dict[int, dict[str, Any]]:
        return self._each(
            "patch", {r: {"session": session, "base": base, "messages": m} for r, m in messages.items()}, deadline
        )

    def pull(self, session: str, peers: Mapping[int, Mapping[str, Any]], deadline: Deadline) -> dict[int, dict[str, Any]]:
        seconds = deadline.check(f"engine {self.name}: pull")
        return self._each("pull", {r: {"session": session, "peer": p, "seconds": seconds} for r, p in peers.items()}, deadline)

    def verify(self, session: str, deadline: Deadline, digests: bool = True, wave: int = 0) -> dict[int, str]:
        replies = self._all("verify", deadline, session=session, digests=digests, wave=wave)
        return {rank: reply["digests"] for rank, reply in replies.items()}

    def feed(self, session: str, wave: int, deadline: Deadline) -> None:
        self._all("feed", deadline, session=session, wave=wave)

    def check(self, session: str, step: CheckStep, deadline: Deadline) -> dict[int, dict[str, Any]]:
        return self._all(step, deadline, session=session)

    def finish(self, session: str, version: int, digest: str, deadline: Deadline) -> Receipt:
        self._all("end", deadline, session=session)
        self._session, self.version, self.reason = "", version, None
        self._receipt = Receipt(self.name, session, version, digest)
        return self._receipt

    def resume(self, receipt: Receipt, deadline: Deadline) -> None:
        if self._receipt is None or receipt != self._receipt:
            raise RolloutError(f"engine {self.name}: {receipt} is not the receipt of its last finish; it stays paused")
        self._all("admit", deadline, session=receipt.session)
        self.paused = False

    def abort(self, session: str, reason: str, deadline: Deadline) -> None:
        self._all("admit", deadline, session=session)
        self._session, self._receipt, self.reason = "", None, reason
        self._all("abort", deadline, session=session, reason=reason)
