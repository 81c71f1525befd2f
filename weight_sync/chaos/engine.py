"""An engine that computes with tensors derived from its live parameters: stale or half-written bytes show in what it serves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from weight_sync.chaos.case import CONFIG, Case, Values, derived, engine_params, engine_shapes
from weight_sync.chaos.network import Network, Process
from weight_sync.chaos.trainer import Block, DrillTransport, Twist, die
from weight_sync.ids import Deadline
from weight_sync.layout.parallel import EngineDims
from weight_sync.session.contracts import Receipt
from weight_sync.session.inprocess import InProcessEngine
from weight_sync.session.target import TargetAgent


class Worker:
    """One worker process: live parameters, what was derived from them, the agent. Looks like a TargetAgent to the engine."""

    def __init__(
        self, local: int, place: str, tp: int, network: Network, noise: np.random.Generator,
        open_: Callable[[], DrillTransport], on_disk: Values,
    ) -> None:  # fmt: skip
        self.rank, self.place, self._tp, self._network, self._noise = local, place, tp, network, noise
        self.process = Process(place)
        self.twist: Twist = lambda method, payload: payload
        self.block = Block(engine_shapes(tp), noise)
        self.transports: list[DrillTransport] = []
        self._open = open_
        self.load(on_disk)
        self.agent = TargetAgent(
            rank=local, host="localhost", coords=EngineDims(tp=tp).coords(local), tensors=lambda: self.block.arrays,
            transport=self._opened,
        )  # fmt: skip

    def _opened(self) -> DrillTransport:
        self.transports.append(self._open())
        return self.transports[-1]

    def load(self, values: Values) -> None:
        """As from disk: in place, with everything derived."""
        self.block.fill(engine_params(values, self._tp, self.rank, self.block.blank))
        self.derive()

    def derive(self) -> None:
        self.derived = derived(self.block.words)

    def call(self, method: str, payload: Mapping[str, Any]) -> dict[str, Any]:
        return self.process.run(lambda: self._network.inside(self.place, method, lambda: self._call(method, payload)))

    def _call(self, method: str, payload: Mapping[str, Any]) -> dict[str, Any]:
        reply = self.agent.call(method, self.twist(method, payload))
        if method == "end":
            self.derive()
        return reply

    def move(self, *, empty: bool) -> None:
        self.block = self.block.moved(self._noise, empty=empty)

    def wrong(self, values: Values) -> str | None:
        """How what this worker computes with differs from what `values` give; None when every byte is right."""
        want = engine_params(values, self._tp, self.rank, self.block.blank)
        if self.block.bytes.tobytes() != self.block.with_(want).tobytes():
            names = [n for n, view in self.block.words.items() if not np.array_equal(view, want[n])]
            return f"{self.place}: live {', '.join(names) or 'guard bytes'}"
        off = [name for name, value in derived(want).items() if not np.array_equal(value, self.derived[name])]
        return f"{self.place}: derived {', '.join(off)}" if off else None

    def die(self) -> None:
        die(self.transports)
        self.process.kill()


class DrillEngine(InProcessEngine):
    """One server with its workers. boot() starts it, or starts it anew with the weights on its disk.

    finished: receipt of the last finish() of this incarnation, None if it serves what it loaded. had: versions whose bytes it
    was right to claim when it finished them, in any incarnation.
    """

    def __init__(
        self, index: int, case: Case, network: Network, noise: np.random.Generator,
        open_: Callable[[int], DrillTransport], on_disk: Values,
    ) -> None:  # fmt: skip
        self.index, self._case, self._network, self._noise, self._open = index, case, network, noise, open_
        self.on_disk = on_disk
        self.had: set[int] = set()
        self.on_finish: Callable[[DrillEngine], None] = lambda engine: None
        self.on_resume: Callable[[DrillEngine], None] = lambda engine: None
        self.boot()

    def boot(self) -> None:
        width = self._case.engine_tp
        self.workers = [
            Worker(i, f"worker {self.index * width + i}", width, self._network, self._noise,
                   lambda rank=self.index * width + i: self._open(rank), self.on_disk)
            for i in range(width)
        ]  # fmt: skip
        sizes = EngineDims(tp=width, engines=self._case.engines).sizes
        super().__init__(f"e{self.index}", self.workers, model=CONFIG, sizes=sizes)  # type: ignore[arg-type]
        self.process = Process(f"engine {self.name}")
        self.finished: Receipt | None = None

    def reload(self) -> None:
        """Somebody has it load its weights from disk again, in place."""
        for worker in self.workers:
            worker.load(self.on_disk)
        self.version, self.finished = -1, None

    def kill(self) -> None:
        self.process.kill()
        for worker in self.workers:
            worker.die()

    def finish(self, session: str, version: int, digest: str, deadline: Deadline) -> Receipt:
        receipt = super().finish(session, version, digest, deadline)
        self.finished = receipt
        self.on_finish(self)
        return receipt

    def resume(self, receipt: Receipt, deadline: Deadline) -> None:
        super().resume(receipt, deadline)
        self.on_resume(self)

    @property
    def inside(self) -> bool:
        """Whether one of its processes is in the middle of a call."""
        return self.process.inside or any(worker.process.inside for worker in self.workers)

    @property
    def serving(self) -> bool:
        return not self.paused and self.process.state != "dead"
