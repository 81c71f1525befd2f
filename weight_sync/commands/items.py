"""What Python costs for each parameter and each transfer, measured by syncs of thousands of small tensors.

Bytes are so few there that what is left is the agents' work for each of them, as the simulator takes it (Cluster.python).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from weight_sync.commands.linkpeer import Remote
from weight_sync.config import engine_yaml, family_yaml
from weight_sync.ids import Deadline
from weight_sync.session.connect import SyncSpec
from weight_sync.session.inprocess import InProcessEngine
from weight_sync.session.inputs import Declared, dims_of
from weight_sync.session.session import WeightSync
from weight_sync.session.silent import SilentObserver

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 64, "num_hidden_layers": 12, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 64, "vocab_size": 512, "num_experts": 128,
    "moe_intermediate_size": 32, "decoder_sparse_step": 1, "mlp_only_layers": [], "tie_word_embeddings": False,
    "dtype": "bfloat16",
}  # fmt: skip
"""Some 3,000 parameters of the trainer, 5,000 transfers of 4 KB."""


@dataclass(frozen=True, slots=True)
class Seconds:
    """check: a parameter of a trainer rank. write: a transfer's share of the call that writes all, its bytes included. receive,
    compare: a transfer on its worker, and on the controller with its two digests' way there."""

    check: float
    write: float
    receive: float
    compare: float
    nbytes: float
    """Of a transfer."""
    per_transfer: float
    """Parameters of the trainer's rank for each transfer."""


class _Timed:
    """Calls to one side, with the seconds they took there by method."""

    def __init__(self, remote: Remote) -> None:
        self.remote, self.seconds = remote, dict[str, list[float]]()

    def __call__(self, method: str, payload: Mapping[str, Any]) -> dict[str, Any]:
        seconds, reply = self.remote.call("agent", method, dict(payload))
        self.seconds.setdefault(method, []).append(seconds)
        return reply


class _Trainers:
    world = 1

    def __init__(self, side: _Timed) -> None:
        self._side = side

    def call(self, method: str, payloads: Mapping[int, Mapping[str, Any]], deadline: Deadline) -> dict[int, dict[str, Any]]:
        return {rank: self._side(method, payload) for rank, payload in payloads.items()}


class _Rank:
    rank = 0


class _Engine(InProcessEngine):
    def __init__(self, side: _Timed, **facts: Any) -> None:
        super().__init__("engine", [_Rank()], **facts)  # type: ignore[list-item]
        self._side = side

    def _each(self, method: str, payloads: Mapping[int, Mapping[str, Any]], deadline: Deadline) -> dict[int, dict[str, Any]]:
        return {rank: self._side(method, payload) for rank, payload in payloads.items()}


class _Phases(SilentObserver):
    def __init__(self) -> None:
        self.verify: list[float] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        if name == "verify":
            self.verify.append(time.perf_counter() - began)


def measure_items(trainer: Remote, rollout: Remote, call: float, rounds: int = 5) -> Seconds:
    """Run small syncs from one process to the other; medians after one to warm up. call: seconds of an empty call to one."""
    family = family_yaml("qwen3_moe")
    source = Declared(family, CONFIG, {"ranks": 1}, None, {"vocab_multiple": 128})
    target = Declared(family, CONFIG, {"tp": 1}, engine_yaml("sglang"))
    params = trainer.call("begin", source, True)
    rollout.call("begin", target, False)
    here, there, watch = _Timed(trainer), _Timed(rollout), _Phases()
    engine = _Engine(there, model=CONFIG, sizes=dict(dims_of(target, "rollout").sizes))
    sync = WeightSync(_Trainers(here), [engine], SyncSpec(source, target, witness=False), observer=watch)
    plan = sync.connect().plan
    sync.sync(1)
    for seconds in (here.seconds, there.seconds):
        seconds.clear()
    watch.verify.clear()
    for version in range(2, rounds + 2):
        sync.sync(version)
    median, count = statistics.median, len(plan)
    verify = median(there.seconds["verify"])
    return Seconds(
        check=median(here.seconds["quiesce"]) / params,
        write=median(here.seconds["write"]) / count,
        receive=verify / count,
        compare=max(0.0, median(watch.verify) - verify - call) / count,
        nbytes=float(plan.nbytes.sum()) / count,
        per_transfer=params / count,
    )
