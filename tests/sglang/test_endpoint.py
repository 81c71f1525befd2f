"""The endpoint inside a worker, without an engine around it."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Iterator
from http.client import HTTPConnection
from typing import Any

import httpx
import pytest

from weight_sync.errors import BindError, DeadlineExceeded, RolloutError, SessionError
from weight_sync.ids import Deadline
from weight_sync_integrations.sglang import endpoint
from weight_sync_integrations.sglang.client import Http, Workers
from weight_sync_integrations.sglang.endpoint import MAX_BODY, WorkerEndpoint
from weight_sync_integrations.sglang.launch import WorkerAddress


class Owner:
    """Runs an endpoint's calls on its own thread, as a scheduler does, until closed."""

    def __init__(self) -> None:
        self.threads: set[int] = set()
        self.held = threading.Event()
        self.endpoint = WorkerEndpoint("secret", "127.0.0.1", self.serve)
        self.endpoint.start()
        self._open = True
        self.thread = threading.Thread(target=self.loop)
        self.thread.start()

    def loop(self) -> None:
        while self._open:
            if not self.held.is_set():
                self.endpoint.run_pending(0.01)

    def serve(self, method: str, payload: dict[str, Any]) -> dict[str, Any]:
        self.threads.add(threading.get_ident())
        if method == "echo":
            return payload
        if method == "refuse":
            raise SessionError("not now")
        if method == "misfit":
            raise BindError("does not fit")
        raise ZeroDivisionError("a bug")

    def close(self) -> None:
        self._open = False
        self.thread.join()
        self.endpoint.close()


@pytest.fixture
def owner() -> Iterator[Owner]:
    owner = Owner()
    yield owner
    owner.close()


def test_head_and_body_of_an_answer_leave_in_one_packet(owner: Owner) -> None:
    body = b'{"method": "echo", "payload": {"a": 1}, "seconds": 10}'
    head = f"POST /call HTTP/1.1\r\nAuthorization: Bearer secret\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with socket.create_connection((owner.endpoint.host, owner.endpoint.port), timeout=60) as connection:
        for _ in range(5):  # apart, the body would wait until the head is acknowledged
            connection.sendall(head + body)
            answer = connection.recv(1 << 16)
            assert answer.startswith(b"HTTP/1.1 200")
            assert answer.endswith(b'{"value": {"a": 1}}')


def workers(owner: Owner, token: str = "secret") -> Workers:
    return Workers("e", [WorkerAddress(0, "127.0.0.1", owner.endpoint.port)], token)


def test_a_call_runs_on_the_owners_thread_and_large_payloads_come_back_whole(owner: Owner) -> None:
    payload = {"start": list(range(1_000_000)), "name": "ä"}

    assert workers(owner).all("echo", payload, Deadline.after(60)) == {0: payload}
    assert owner.threads == {owner.thread.ident}


@pytest.mark.parametrize("token", ["wrong", "secre", "secrets", "SECRET"])
def test_a_wrong_token_is_refused_and_nothing_is_run(owner: Owner, token: str) -> None:
    with pytest.raises(RolloutError, match=r"rollout rank 0 at .*: echo answered 401 Unauthorised"):
        workers(owner, token).all("echo", {}, Deadline.after(10))
    assert not owner.threads


def test_a_request_without_any_token_is_refused(owner: Owner) -> None:
    connection = HTTPConnection("127.0.0.1", owner.endpoint.port, timeout=10)
    connection.request("POST", "/call", b'{"method": "echo", "payload": {}, "seconds": 1}')
    assert connection.getresponse().status == 401
    assert not owner.threads


def test_errors_keep_their_kind_and_a_bug_says_where_it_was(owner: Owner) -> None:
    with pytest.raises(SessionError, match=r"engine e, rollout rank 0 .* not now"):
        workers(owner).all("refuse", {}, Deadline.after(10))
    with pytest.raises(BindError, match="does not fit"):
        workers(owner).all("misfit", {}, Deadline.after(10))
    with pytest.raises(RolloutError, match=r"(?s)500 ZeroDivisionError: a bug.*test_endpoint.py"):
        workers(owner).all("crash", {}, Deadline.after(10))
    assert workers(owner).all("echo", {}, Deadline.after(10)) == {0: {}}, "the owner's loop survived"


def test_a_call_that_its_owner_does_not_reach_in_time_is_dropped_and_never_run_later(owner: Owner) -> None:
    owner.held.set()
    with pytest.raises(DeadlineExceeded, match="echo"):
        workers(owner).all("echo", {}, Deadline.after(0.5))
    owner.held.clear()
    assert workers(owner).all("echo", {"second": 1}, Deadline.after(10)) == {0: {"second": 1}}
    assert owner.endpoint.run_pending(0.0) == 0


def test_a_deadline_that_has_passed_sends_nothing(owner: Owner) -> None:
    with pytest.raises(DeadlineExceeded):
        workers(owner).all("echo", {}, Deadline.after(0))
    assert not owner.threads


@pytest.mark.parametrize(
    ("path", "length", "body", "status"),
    [
        ("/call", str(MAX_BODY + 1), b"", 413),
        ("/call", None, b"not json", 400),
        ("/call", None, b'{"method": 1, "payload": {}, "seconds": 1}', 400),
        ("/call", None, b'{"method": "echo", "payload": {}}', 400),
        ("/call", None, b"[" * 200_000, 400),
        ("/call", "1e3", b"{}", 413),
        ("/call", "-1", b"{}", 413),
        ("/other", None, b"{}", 404),
    ],
)
def test_requests_that_are_too_large_or_malformed_are_refused(
    owner: Owner, path: str, length: str | None, body: bytes, status: int
) -> None:
    connection = HTTPConnection("127.0.0.1", owner.endpoint.port, timeout=10)
    connection.request("POST", path, body, {"Authorization": "Bearer secret", "Content-Length": length or str(len(body))})
    assert connection.getresponse().status == status
    assert not owner.threads


def test_a_worker_that_is_gone_is_one_error_that_names_it(owner: Owner) -> None:
    port = owner.endpoint.port
    gone = Workers("e", [WorkerAddress(3, "127.0.0.1", port)], "secret")
    owner.endpoint.close()
    with pytest.raises(RolloutError, match=rf"rollout rank 3 at 127.0.0.1:{port}: echo"):
        gone.all("echo", {}, Deadline.after(5))
    owner.endpoint = WorkerEndpoint("secret", "127.0.0.1", owner.serve)
    owner.endpoint.start()


def test_a_caller_that_stops_in_the_middle_of_its_request_is_cut_off(owner: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint._Handler, "timeout", 0.3)
    with socket.create_connection(("127.0.0.1", owner.endpoint.port), timeout=10) as slow:
        slow.sendall(b"POST /call HTTP/1.1\r\nAuthorization: Bearer secret\r\nContent-Length: 100\r\n\r\n{")
        assert slow.recv(100) == b""
    assert not owner.threads


def test_no_other_interface_than_the_one_it_was_given_is_listened_on(owner: Owner) -> None:
    assert owner.endpoint._server.server_address[0] == "127.0.0.1"
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.2", owner.endpoint.port), timeout=5)


def test_neither_address_nor_token_is_logged_at_info(owner: Owner, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "httpx"):
        assert workers(owner).all("echo", {}, Deadline.after(10)) == {0: {}}
        Http("e", f"http://127.0.0.1:{owner.endpoint.port}")._client.get("/nothing")
        other = WorkerEndpoint("secret", "127.0.0.1", owner.serve)
        other.start()
        httpx.get(f"http://127.0.0.1:{other.port}/somebody-elses")
        other.close()
    logged = [record.getMessage() for record in caplog.records]
    assert [line for line in logged if "somebody-elses" in line], "another user of httpx keeps its lines"
    assert not [line for line in logged if str(owner.endpoint.port) in line or "secret" in line]


def test_an_endpoint_without_a_token_cannot_be_made() -> None:
    with pytest.raises(ValueError, match="token"):
        WorkerEndpoint("", "127.0.0.1", lambda method, payload: {})
