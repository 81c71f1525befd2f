"""miles's engine actors in front of running servers, and what of its rollout manager a trainer actor calls."""

from __future__ import annotations

import os
import pickle
import signal
from pathlib import Path
from typing import Any


class Manager:
    """Those methods of miles's RolloutManager that trainer actors and the train script call about engines. A Ray actor."""

    def __init__(self) -> None:
        self._args: Any = None
        self._urls: list[str] = []
        self._pids: list[int] = []
        self._all: list[Any] = []
        self._engines: list[Any] = []
        self._new = 0

    def start(self, file: str, urls: list[str], pids: list[int]) -> None:
        """One of miles's SGLangEngine actors for each server, initialised as it does for external engines."""
        import ray
        from miles.backends.sglang_utils.sglang_engine import SGLangEngine

        self._args = pickle.loads(Path(file).read_bytes())
        self._args.rollout_external, self._args.env_report = True, None
        self._urls, self._pids = urls, pids
        actor = ray.remote(num_cpus=0)(SGLangEngine)
        self._all = [actor.remote(self._args, rank=0, base_gpu_id=0) for _ in urls]
        ports = [int(url.rsplit(":", 1)[1]) for url in urls]
        ray.get([a.init.remote("127.0.0.1:1", p, 2, host="127.0.0.1") for a, p in zip(self._all, ports, strict=True)])
        self.serve([0, 1])

    def serve(self, numbers: list[int]) -> None:
        self._engines, self._new = [self._all[n] for n in numbers], len(numbers)

    def stop_second(self) -> None:
        """The second engine's whole process group stands still: nothing answers, nothing is refused."""
        os.killpg(self._pids[1], signal.SIGSTOP)

    def replace_second(self) -> None:
        """What fault tolerance does: the dead engine's processes are killed, another one is listed in its place."""
        os.killpg(self._pids[1], signal.SIGKILL)
        self._engines, self._new = [self._all[0], self._all[2]], 1

    # -- as miles's trainer actors call it -------------------------------------------------------------------------

    def set_train_parallel_config(self, config: Any) -> None:
        self.train_parallel_config = config

    def get_updatable_engines_and_lock(self) -> tuple[Any, ...]:
        return self._engines, None, self._new, [1] * len(self._engines), list(range(len(self._engines)))

    def clear_updatable_num_new_engines(self) -> None:
        self._new = 0

    def check_weights(self, action: str) -> Any:
        import ray

        return ray.get([engine.check_weights.remote(action=action) for engine in self._engines])
