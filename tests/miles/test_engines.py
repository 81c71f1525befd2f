"""Servers that another framework has started: how their workers are found, by whom, and who is not believed."""

from __future__ import annotations

import base64
import json
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from weight_sync.errors import ConfigError, RolloutError
from weight_sync_integrations.miles.engines import locate
from weight_sync_integrations.sglang import entry, settings
from weight_sync_integrations.sglang.plugin import MARKER


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Announcements go to a folder of this test."""
    monkeypatch.setattr(settings.tempfile, "gettempdir", lambda: str(tmp_path))
    return tmp_path / f"weight-sync-{os.getuid()}"


def server_args(**changes: Any) -> Any:
    values = {"host": "127.0.0.1", "port": 3000, "dist_init_addr": "10.0.0.1:25000", "custom_weight_loader": [MARKER]}
    return SimpleNamespace(**(values | changes))


def test_a_worker_announces_itself_and_its_own_token_where_only_its_user_can_read(place: Path) -> None:
    made = settings.private(server_args())
    made.announce(0, "127.0.0.1", 4711)
    assert made.token not in repr(made)
    (found,) = settings.announced(settings.engine_key("10.0.0.1:25000", "127.0.0.1", 3000))
    assert found == {"rank": 0, "host": "127.0.0.1", "port": 4711, "pid": os.getpid(), "token": made.token}
    for path in [place, *place.rglob("*")]:
        assert path.stat().st_mode & 0o077 == 0, path
    assert settings.private(server_args()).token != made.token


def test_a_folder_that_others_can_read_is_refused(place: Path) -> None:
    place.mkdir(mode=0o755)
    with pytest.raises(ConfigError, match="nobody else can read"):
        settings.private(server_args())


def test_workers_of_an_engine_that_has_ended_do_not_count() -> None:
    made = settings.private(server_args())
    made.announce(0, "127.0.0.1", 1)
    file = next(made.folder.glob("rank-*.json"))
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    file.write_text(json.dumps(json.loads(file.read_text()) | {"pid": ended.pid}))
    assert settings.announced(made.folder.name) == []
    assert not settings.complete([], 1)


def test_a_wildcard_address_is_not_announced() -> None:
    assert settings.private(server_args(host="0.0.0.0")).bind not in ("0.0.0.0", "")
    assert settings.marked(server_args())
    assert not settings.marked(server_args(custom_weight_loader=None))


class Sglang:
    """An SGLang server's own routes. activate: what a call of our entry point does."""

    def __init__(self, paths: list[str], loader: list[str], activate: Any = None) -> None:
        self.loads: list[dict[str, Any]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                info = {"custom_weight_loader": loader, "tp_size": 2, "pp_size": 1, "dist_init_addr": "10.0.0.1:25000"}
                answers = {"/server_info": info, "/openapi.json": {"paths": {path: {} for path in paths}}}
                self._send(answers.get(self.path))

            def do_POST(self) -> None:
                outer.loads.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                if activate is not None:
                    activate()
                self._send({"success": True})

            def _send(self, content: Any) -> None:
                body = json.dumps(content).encode()
                self.send_response(404 if content is None else 200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def actor(self) -> Any:
        """miles's SGLangEngine in front of it."""
        return SimpleNamespace(server_host="127.0.0.1", server_port=self.server.server_address[1])


@pytest.fixture
def close() -> Iterator[list[Sglang]]:
    made: list[Sglang] = []
    yield made
    for item in made:
        item.server.shutdown()


def two_workers() -> None:
    for rank in range(2):
        settings.private(server_args()).announce(rank, "127.0.0.1", 5000 + rank)


def test_an_engine_with_plugins_is_only_asked_who_it_is(close: list[Sglang]) -> None:
    two_workers()
    close.append(engine := Sglang(["/begin_weight_update"], [MARKER]))
    found = locate(engine.actor, 10)
    assert (found["world"], [place["rank"] for place in found["workers"]]) == (2, [0, 1])
    assert engine.loads == []


def test_an_engine_without_plugins_is_asked_to_call_our_entry_point_with_nothing_to_load(close: list[Sglang]) -> None:
    close.append(engine := Sglang([], [MARKER], two_workers))
    assert len(locate(engine.actor, 10)["workers"]) == 2
    (asked,) = engine.loads
    assert asked["load_format"] == MARKER
    assert [pickle.loads(base64.b64decode(text)) for text in asked["serialized_named_tensors"]] == [[], []]


def test_an_engine_that_was_not_marked_or_whose_workers_are_silent_is_refused_with_what_to_do(close: list[Sglang]) -> None:
    close += [plain := Sglang([], []), silent := Sglang(["/begin_weight_update"], [MARKER])]
    with pytest.raises(RolloutError, match="sglang_custom_weight_loader"):
        locate(plain.actor, 10)
    with pytest.raises(RolloutError, match="SGLANG_PLUGINS"):
        locate(silent.actor, 10)


def test_the_entry_point_finds_the_scheduler_that_calls_it_and_serves_in_its_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[str] = []

    class Worker:
        def __init__(self, scheduler: Any, made: settings.Settings) -> None:
            assert made.announce_token

        def start(self) -> None:
            served.append("start")

        def serve(self) -> None:
            served.append("serve")

    class Scheduler:
        def __init__(self) -> None:
            self.tp_worker, self.server_args = None, server_args()

        def process_input_requests(self, requests: list[int]) -> int:
            return len(requests)

        def update_weights_from_tensor(self) -> None:
            entry.activate(model=None, named_tensors=[])

    monkeypatch.setattr("weight_sync_integrations.sglang.worker.Worker", Worker)
    scheduler = Scheduler()
    scheduler.update_weights_from_tensor()
    scheduler.update_weights_from_tensor()  # once is enough
    assert scheduler.process_input_requests([1, 2]) == 2
    assert served == ["start", "serve"]
