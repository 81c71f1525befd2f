"""The state rules of SglangEngine, against a server that answers like SGLang and can be told to misbehave.

Worker, WorkerEndpoint and TargetAgent are the real ones, around a scheduler with a two-parameter model. What only the
real server can show is in test_server.py.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from weight_sync.errors import BindError, DeadlineExceeded, RolloutError, SessionError
from weight_sync.ids import Deadline
from weight_sync.session.contracts import Receipt
from weight_sync.transport.memory import MemoryHub, MemoryTransport
from weight_sync_integrations.sglang import worker as worker_module
from weight_sync_integrations.sglang.engine import SglangEngine
from weight_sync_integrations.sglang.launch import WorkerAddress
from weight_sync_integrations.sglang.worker import Worker

SHAPES = {"a": (4, 3), "b": (5,)}


class Scheduler:
    """What a worker reads of SGLang's scheduler."""

    device = "cpu"
    draft_worker = None

    def __init__(self, model_path: str, model: torch.nn.Module | None = None) -> None:
        if model is None:
            model = torch.nn.Module()
            for name, shape in SHAPES.items():
                model.register_parameter(name, torch.nn.Parameter(torch.zeros(shape)))
        self.tp_worker = SimpleNamespace(model_runner=SimpleNamespace(model=model))
        self.model_config = SimpleNamespace(model_path=model_path)
        self.weight_updater = SimpleNamespace(_session=None, offload_tags=set())
        self.server_args = SimpleNamespace(disable_radix_cache=True)
        self.busy = True
        self._engine_paused = False

    def is_fully_idle(self) -> bool:
        return not self.busy


class Engine:
    """Two workers on threads, and the front end's routes. `answers` overrides a route; `log` holds the routes called.

    ranks: another scheduler and its coordinates for each worker, with the engine's sizes beside what follows from tp and pp.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        folder: Path,
        pp: int = 1,
        session_routes: bool = True,
        ranks: Sequence[tuple[Scheduler, dict[str, int]]] | None = None,
        **sizes: int,
    ) -> None:
        if ranks is None:
            (folder / "config.json").write_text('{"model_type": "tiny"}')
            ranks = [(Scheduler(str(folder)), {"tp": r % (2 // pp), "pp": r // (2 // pp), "rank": r}) for r in range(2)]
        tp = len(ranks) // pp
        self.hub = hub = MemoryHub()
        monkeypatch.setenv("WEIGHT_SYNC_TOKEN", "secret")
        monkeypatch.setenv("WEIGHT_SYNC_RENDEZVOUS", str(folder))
        monkeypatch.setattr(worker_module.Worker, "_open_transport", lambda worker: MemoryTransport(hub))
        self.version = "default"
        self.log: list[str] = []
        self.answers: dict[str, tuple[int, Any]] = {}
        self.pause_delay = 0.0
        self.derive: Callable[[torch.nn.Module], None] = lambda model: None
        self.routes = ["/pause_generation", "/continue_generation", "/flush_cache", "/update_weight_version"]
        self.routes += ["/begin_weight_update", "/end_weight_update"] if session_routes else []
        self.schedulers = [scheduler for scheduler, _ in ranks]
        self._open = True
        self._threads: list[threading.Thread] = []
        self.workers: list[Worker] = []
        sizes = {"tp": tp, "pp": pp, "dp": 1, "attn_tp": tp, "attn_dp": 1, "moe_ep": 1, "moe_tp": tp} | sizes
        for scheduler, coords in ranks:
            monkeypatch.setattr(worker_module, "_placement", lambda scheduler, coords=coords: (coords, sizes))
            made = Worker(scheduler)
            made.start()
            self.workers.append(made)
            self._threads.append(threading.Thread(target=self._loop, args=(made,)))
            self._threads[-1].start()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        found = [json.loads(file.read_text()) for file in sorted(folder.glob("rank-*.json"))]
        self._addresses = [WorkerAddress(entry["rank"], entry["host"], entry["port"]) for entry in found]
        self._adapters: list[SglangEngine] = []
        self.adapter = self.controller()

    def close(self) -> None:
        self._open = False
        for thread in self._threads:
            thread.join()
        self._server.shutdown()
        for adapter in self._adapters:
            adapter.close()

    def controller(self) -> SglangEngine:
        """The adapter as a controller has it that was just started."""
        url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._adapters.append(SglangEngine("e0", url, self._addresses, "secret"))
        return self._adapters[-1]

    def _loop(self, worker: Worker) -> None:
        while self._open:
            worker.serve()
            time.sleep(0.001)

    def route(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path == "/openapi.json":
            return 200, {"paths": {route: {} for route in self.routes}, "components": {"schemas": {}}}
        if path == "/model_info":
            return 200, {"weight_version": self.version}
        self.log.append(path + (f" {body['mode']}" if "mode" in body else ""))
        if path in self.answers:
            return self.answers[path]
        if path not in self.routes:
            return 404, {"detail": "Not Found"}
        if path == "/pause_generation":
            threading.Timer(self.pause_delay, self._pause, args=(body["mode"],)).start()
        for scheduler in self.schedulers:
            if path == "/continue_generation":
                scheduler._engine_paused = False
            elif path in ("/begin_weight_update", "/end_weight_update"):
                scheduler.weight_updater._session = object() if "begin" in path else None
                if "end" in path:
                    self.derive(scheduler.tp_worker.model_runner.model)
        if path == "/update_weight_version":
            assert body["abort_all_requests"] is False
            self.version = body["new_version"]
        return 200, {"success": True}

    def _pause(self, mode: str) -> None:
        for scheduler in self.schedulers:
            scheduler.busy = scheduler.busy and mode != "abort"
            scheduler._engine_paused = scheduler._engine_paused or mode != "abort"

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        engine = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                status, content = engine.route(self.path, json.loads(body or b"{}"))
                data = content.encode() if isinstance(content, str) else json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST

            def log_message(self, format: str, *args: Any) -> None: ...

        return Handler

    # -- a session in the engine's life ----------------------------------------------------------------------------

    def until_verified(self, session: str, version: int = 7, mode: Any = "retract") -> None:
        epochs = self.bind(f"plan of {session}")
        self.adapter.pause(mode, soon())
        self.adapter.begin(session, version, f"plan of {session}", epochs, soon())
        self.adapter.verify(session, soon())

    def bind(self, plan: str, **changes: Any) -> dict[int, int]:
        table = {
            "plan": plan,
            "params": list(SHAPES),
            "start": [0, 0],
            "strides": [[3, 1], [1]],
            "shape": [[4, 3], [5]],
            "expected": {name: [list(shape), "float32"] for name, shape in SHAPES.items()},
            "stage_bytes": 0,
            "rounds": [],
        } | changes
        answers = self.adapter.bind({0: table, 1: table}, soon())
        return {rank: answer["epoch"] for rank, answer in answers.items()}


def soon() -> Deadline:
    return Deadline.after(20)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Engine]:
    engine = Engine(monkeypatch, tmp_path)
    yield engine
    engine.close()


def test_describe_tells_model_sizes_modes_and_both_workers_parameters(engine: Engine) -> None:
    description = engine.adapter.describe(soon())

    assert (description.name, description.kind, description.version) == ("e0", "sglang", -1)
    assert description.model == {"model_type": "tiny"}
    assert description.pause_modes == ("abort", "retract", "in_place")
    assert [rank.coords["tp"] for rank in description.ranks] == [0, 1]
    for rank in description.ranks:
        assert {param.name: param.shape for param in rank.params} == SHAPES
    assert "suspended" not in description.software


def test_a_whole_update_ends_in_a_receipt_that_resumes_and_the_version_is_stamped_last(engine: Engine) -> None:
    engine.until_verified("s1")

    receipt = engine.adapter.finish("s1", 7, "d1", soon())
    engine.adapter.resume(receipt, soon())

    assert receipt == Receipt("e0", "s1", 7, "d1")
    assert engine.log == [
        "/pause_generation retract",
        "/begin_weight_update",
        "/end_weight_update",
        "/flush_cache",
        "/update_weight_version",
        "/continue_generation",
    ]
    assert engine.adapter.describe(soon()).version == 7
    assert not any(state["paused"] for state in engine.adapter.state(soon()).values())


def test_a_server_without_update_routes_is_driven_without_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    engine = Engine(monkeypatch, tmp_path, session_routes=False)
    try:
        engine.until_verified("s1")
        engine.adapter.resume(engine.adapter.finish("s1", 7, "d", soon()), soon())
        assert not any("weight_update" in route for route in engine.log)
    finally:
        engine.close()


def test_pause_returns_only_when_the_schedulers_really_hold_still(engine: Engine) -> None:
    engine.pause_delay = 0.3  # like SGLang, which answers before its schedulers have seen the request
    started = time.monotonic()

    engine.adapter.pause("retract", soon())

    assert time.monotonic() - started >= 0.3
    assert all(state["quiet"] for state in engine.adapter.state(soon()).values())


def test_a_pause_that_never_takes_hold_runs_into_its_deadline(engine: Engine) -> None:
    engine.pause_delay = 60
    with pytest.raises(DeadlineExceeded, match="engine e0"):
        engine.adapter.pause("retract", Deadline.after(1.0))


def test_an_abort_pause_also_holds_the_schedulers(engine: Engine) -> None:
    engine.adapter.pause("abort", soon())

    assert engine.log == ["/pause_generation abort", "/pause_generation retract"]


def test_under_pipeline_parallelism_only_abort_is_offered_and_only_an_idle_engine_is_quiet(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    engine = Engine(monkeypatch, tmp_path, pp=2)
    try:
        assert engine.adapter.describe(soon()).pause_modes == ("abort",)
        with pytest.raises(SessionError, match=r"pp=2.*'retract'.*legal: \('abort',\)"):
            engine.adapter.pause("retract", soon())
        engine.schedulers[1]._engine_paused = True  # the flag alone is not enough there
        assert not engine.adapter.state(soon())[1]["quiet"]
        engine.adapter.pause("abort", soon())
        assert engine.log == ["/pause_generation abort"]
    finally:
        engine.close()


def test_begin_is_refused_by_adapter_and_worker_while_the_engine_generates(engine: Engine) -> None:
    epochs = engine.bind("p")
    with pytest.raises(SessionError, match=r"begin\(\) needs a paused engine"):
        engine.adapter.begin("s", 1, "p", epochs, soon())
    with pytest.raises(SessionError, match="begin refused by rollout rank 0: the engine is generating"):
        engine.adapter.call("begin", {"session": "s", "version": 1, "plan": "p", "epoch": epochs[0]}, soon())
    assert engine.log == []


def test_an_idle_engine_that_was_not_paused_cannot_begin(engine: Engine) -> None:
    for scheduler in engine.schedulers:
        scheduler.busy = False
    with pytest.raises(SessionError, match=r"pause\(\) was not called"):
        engine.adapter.begin("s", 1, "p", engine.bind("p"), soon())


def test_a_plan_for_other_parameters_is_refused_at_bind_with_both_shapes(engine: Engine) -> None:
    with pytest.raises(BindError, match=r"rollout rank 0.*b: planned \[\[6\], 'float32'\], live \[\[5\], 'float32'\]"):
        engine.bind("p", expected={"a": [[4, 3], "float32"], "b": [[6], "float32"]})


def test_tables_that_miss_a_rank_are_refused(engine: Engine) -> None:
    with pytest.raises(SessionError, match=r"ranks \[0, 1\] and no other; missing or unknown: \[1, 2\]"):
        engine.adapter.bind({0: {}, 2: {}}, soon())


def test_finish_before_verify_is_refused(engine: Engine) -> None:
    epochs = engine.bind("p")
    engine.adapter.pause("retract", soon())
    engine.adapter.begin("s1", 7, "p", epochs, soon())
    with pytest.raises(SessionError, match="before verify"):
        engine.adapter.finish("s1", 7, "d", soon())


@pytest.mark.parametrize("route", ["/end_weight_update", "/flush_cache", "/update_weight_version"])
@pytest.mark.parametrize("answer", [(400, "no\n"), (200, {"success": False, "message": "no"}), (500, "no")])
def test_a_step_of_finish_that_fails_commits_nothing_and_leaves_the_engine_paused(
    engine: Engine, route: str, answer: tuple[int, Any]
) -> None:
    engine.until_verified("s1")
    engine.answers[route] = answer

    with pytest.raises(RolloutError, match=rf"engine e0: POST {route} answered {answer[0]}: .*no"):
        engine.adapter.finish("s1", 7, "d", soon())

    for state in engine.adapter.state(soon()).values():
        assert (state["paused"], state["suspect"], state["committed"]) == (True, True, None)
    with pytest.raises(SessionError, match="suspect weights"):
        engine.adapter.resume(Receipt("e0", "s1", 7, "d"), soon())
    assert engine.log.count("/continue_generation") == 0


def test_a_version_that_reads_back_differently_is_no_commit(engine: Engine) -> None:
    engine.until_verified("s1")
    engine.answers["/update_weight_version"] = (200, {"success": True})  # says so, and does nothing

    with pytest.raises(RolloutError, match="accepted 7, /model_info says -1"):
        engine.adapter.finish("s1", 7, "d", soon())

    assert all(state["suspect"] for state in engine.adapter.state(soon()).values())


def test_a_refused_flush_is_accepted_only_where_the_cache_is_kept_on_purpose(engine: Engine) -> None:
    engine.until_verified("s1", mode="in_place")
    engine.answers["/flush_cache"] = (400, "requests are running")

    assert engine.adapter.finish("s1", 7, "d", soon()).version == 7


def test_after_an_abort_the_engine_stays_paused_says_why_and_no_receipt_resumes_it(engine: Engine) -> None:
    engine.until_verified("s1")
    receipt = engine.adapter.finish("s1", 7, "d1", soon())
    engine.adapter.resume(receipt, soon())
    engine.until_verified("s2", version=8)

    engine.adapter.abort("s2", "a transfer failed", soon())

    assert engine.adapter.describe(soon()).software["suspended"] == "a transfer failed"
    assert engine.adapter.describe(soon()).version == 7
    with pytest.raises(SessionError, match=r"suspect weights \(a transfer failed\)"):
        engine.adapter.resume(receipt, soon())
    with pytest.raises(SessionError, match="before verify"):
        engine.adapter.finish("s2", 8, "d", soon())
    assert engine.log[-1] == "/end_weight_update", "the server's own update is closed, so that a later one can open"


def test_a_complete_new_session_brings_a_suspect_engine_back(engine: Engine) -> None:
    engine.until_verified("s1")
    engine.adapter.abort("s1", "a transfer failed", soon())

    engine.until_verified("s2", version=9)
    engine.adapter.resume(engine.adapter.finish("s2", 9, "d", soon()), soon())

    description = engine.adapter.describe(soon())
    assert description.version == 9
    assert "suspended" not in description.software


def test_an_abort_before_any_byte_was_accepted_lets_the_last_receipt_resume(engine: Engine) -> None:
    engine.until_verified("s1")
    receipt = engine.adapter.finish("s1", 7, "d1", soon())
    engine.adapter.resume(receipt, soon())
    engine.adapter.pause("retract", soon())
    engine.adapter.abort("s2", "another engine did not pause", soon())

    engine.adapter.resume(receipt, soon())

    assert not any(state["paused"] for state in engine.adapter.state(soon()).values())


@pytest.mark.parametrize(
    "forged",
    [Receipt("e0", "s1", 8, "d1"), Receipt("e0", "other", 7, "d1"), Receipt("e0", "s1", 7, "d2"), Receipt("e1", "s1", 7, "d1")],
)
def test_a_receipt_of_something_else_does_not_resume(engine: Engine, forged: Receipt) -> None:
    engine.until_verified("s1")
    engine.adapter.finish("s1", 7, "d1", soon())

    with pytest.raises(SessionError, match="receipt"):
        engine.adapter.resume(forged, soon())

    assert "/continue_generation" not in engine.log


def test_an_update_left_open_by_a_controller_that_died_is_closed_before_a_new_one_opens(engine: Engine) -> None:
    for scheduler in engine.schedulers:
        scheduler.weight_updater._session = object()
    epochs = engine.bind("p")
    engine.adapter.pause("retract", soon())

    engine.adapter.begin("s1", 7, "p", epochs, soon())

    assert engine.log[-2:] == ["/end_weight_update", "/begin_weight_update"]


def test_memory_that_moved_since_bind_is_refused_at_begin(engine: Engine) -> None:
    epochs = engine.bind("p")
    model = engine.schedulers[1].tp_worker.model_runner.model
    model.a.data = torch.zeros(64, 3)[:4]
    engine.adapter.pause("retract", soon())

    with pytest.raises(BindError, match="rollout rank 1: memory moved since it was bound"):
        engine.adapter.begin("s1", 7, "p", epochs, soon())


def test_a_server_that_is_gone_is_one_error_that_names_engine_and_route(engine: Engine) -> None:
    gone = SglangEngine("e0", "http://127.0.0.1:9", [WorkerAddress(0, "127.0.0.1", 9)], "secret")
    with pytest.raises(RolloutError, match="engine e0: GET /model_info: ConnectError"):
        gone._version(soon())
    with pytest.raises(RolloutError, match=r"engine e0, rollout rank 0 at 127\.0\.0\.1:9: identity"):
        gone.describe(soon())


def test_workers_that_do_not_add_up_to_the_engine_are_refused(engine: Engine) -> None:
    half = SglangEngine("e0", "http://127.0.0.1:9", [engine.adapter._workers._addresses[0]], "secret")
    with pytest.raises(RolloutError, match=r"make 2 workers, but endpoints of ranks \[0\] were given"):
        half.describe(soon())
