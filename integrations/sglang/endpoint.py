"""A small HTTP endpoint inside a worker process: calls come in on threads, and are run by the thread that owns the model.

POST /call with header `Authorization: Bearer <token>` and JSON {"method": str, "payload": object, "seconds": number}.
200 {"value": object} is the method's result; everything else is {"error": {"type", "message"}} with a 4xx or 5xx status.
JSON only, nothing is unpickled; a body above MAX_BODY is refused unread (the transfer tables of a large model are tens of
MB); a wrong token is refused before the body is read; a connection that says nothing for IDLE_SECONDS is closed. The endpoint
listens on the address it is given and on no other; the token crosses the wire in the clear, so that address belongs on a
private network or the loopback.
"""

from __future__ import annotations

import hmac
import json
import queue
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from weight_sync.errors import WeightSyncError

MAX_BODY = 256 << 20
"""Bytes of one request."""

IDLE_SECONDS = 60.0
"""Longest pause of a caller in the middle of sending; a call that is being worked on is not bounded by it."""

Serve = Callable[[str, dict[str, Any]], dict[str, Any]]


@dataclass(slots=True)
class _Call:
    method: str
    payload: dict[str, Any]
    answer: Future[dict[str, Any]] = field(default_factory=Future)


class WorkerEndpoint:
    """start() opens the port; the owner calls run_pending() often; close() refuses what is still queued."""

    def __init__(self, token: str, host: str, serve: Serve) -> None:
        """`serve(method, payload)` runs on the owner's thread and returns JSON data, or raises."""
        if not token:
            raise ValueError("a worker endpoint needs a token")
        self._token = token
        self._serve = serve
        self._calls: queue.SimpleQueue[_Call] = queue.SimpleQueue()
        self._server = _Server((host, 0), _Handler)
        self._server.endpoint = self
        self.host = host
        self.port: int = self._server.server_address[1]

    def start(self) -> None:
        threading.Thread(target=self._server.serve_forever, name="weight-sync-endpoint", daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def run_pending(self, wait: float) -> int:
        """Run queued calls on this thread, waiting up to `wait` seconds for a first one. Returns how many were run."""
        done = 0
        while True:
            try:
                call = self._calls.get(timeout=wait) if wait and not done else self._calls.get_nowait()
            except queue.Empty:
                return done
            done += 1
            if not call.answer.set_running_or_notify_cancel():
                continue  # its caller gave up before we came to it
            try:
                call.answer.set_result(self._serve(call.method, call.payload))
            except Exception as error:  # noqa: BLE001 - answered to the caller; the engine's own loop must not die of it
                call.answer.set_exception(error)

    def authorised(self, header: str | None) -> bool:
        return hmac.compare_digest((header or "").encode(), f"Bearer {self._token}".encode())

    def submit(self, method: str, payload: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Queue a call and wait for its result. Raises TimeoutError; a call that had not started then never will."""
        call = _Call(method, payload)
        self._calls.put(call)
        try:
            return call.answer.result(timeout=seconds)
        except (FutureTimeout, CancelledError):
            started = not call.answer.cancel()
            state = "is still running" if started else "did not come to it and dropped it"
            raise TimeoutError(f"{method} had {seconds:g} s; the worker {state}") from None


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    endpoint: WorkerEndpoint


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    timeout = IDLE_SECONDS
    # Head and body in one packet, not held back for an acknowledgement: that was 40 ms an answer, a dozen times a sync.
    wbufsize = -1
    disable_nagle_algorithm = True

    def do_POST(self) -> None:
        endpoint = self.server.endpoint
        length = self.headers.get("Content-Length", "")
        if not endpoint.authorised(self.headers.get("Authorization")):
            self._refuse(401, "Unauthorised", "wrong or missing token")
        elif self.path != "/call":
            self._refuse(404, "NotFound", f"there is only POST /call, not {self.path}")
        elif not length.isdigit() or int(length) > MAX_BODY:
            self._refuse(413, "TooLarge", f"Content-Length is {length or 'missing'}; at most {MAX_BODY} is accepted")
        else:
            self._call(endpoint, self.rfile.read(int(length)))

    def _call(self, endpoint: WorkerEndpoint, body: bytes) -> None:
        try:
            request = json.loads(body)
            method, payload, seconds = request["method"], request["payload"], float(request["seconds"])
            if not isinstance(method, str) or not isinstance(payload, dict):
                raise TypeError("method must be a string and payload an object")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            self._refuse(400, "BadRequest", f"{type(error).__name__}: {error}")
            return
        try:
            answer = json.dumps({"value": endpoint.submit(method, payload, seconds)}).encode()
        except TimeoutError as error:
            self._refuse(504, "DeadlineExceeded", str(error))
        except WeightSyncError as error:
            self._answer(409, {"error": {"type": type(error).__name__, "message": str(error)}})
        except Exception as error:  # noqa: BLE001 - a bug in the worker is told to the controller with its place
            place = "".join(traceback.format_exception(error)[-3:])
            self._answer(500, {"error": {"type": type(error).__name__, "message": f"{error}\n{place}"}})
        else:
            self._send(200, answer)

    def _refuse(self, status: int, kind: str, message: str) -> None:
        self.close_connection = True  # the body may still be unread
        self._answer(status, {"error": {"type": kind, "message": message}})

    def _answer(self, status: int, content: dict[str, Any]) -> None:
        self._send(status, json.dumps(content).encode())

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged line by line into the engine's log; failures reach the caller."""
