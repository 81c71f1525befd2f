"""HTTP as the SGLang adapter uses it: bounded by deadlines, one error for every answer that is not success."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from weight_sync.errors import (
    BindError,
    ConfigError,
    DeadlineExceeded,
    RolloutError,
    SessionError,
    VerifyError,
    WeightSyncError,
)
from weight_sync.ids import Deadline
from weight_sync_integrations.server import quiet_client
from weight_sync_integrations.sglang.launch import WorkerAddress

_ERRORS: dict[str, type[WeightSyncError]] = {
    kind.__name__: kind for kind in (BindError, ConfigError, DeadlineExceeded, SessionError, VerifyError)
}
"""What a worker may report by name; every other failure of a worker is a RolloutError that quotes it."""

_ANSWER_SHOWN = 600
_SLACK = 2.0  # seconds a worker's own deadline ends before ours, so that its explanation arrives


class Http:
    """One engine's own routes. Proxies from the environment are not used: engines are on the local network."""

    def __init__(self, engine: str, url: str) -> None:
        self._engine = engine
        self._client = quiet_client(url)

    def close(self) -> None:
        self._client.close()

    def get(self, path: str, deadline: Deadline) -> dict[str, Any]:
        return self._send("GET", path, None, deadline, None)

    def post(
        self, path: str, body: dict[str, Any] | None, deadline: Deadline, also_accept: int | None = None
    ) -> dict[str, Any]:
        """The answer's JSON object, or {} for text. `also_accept`: one status beside 2xx that is not an error here.

        Raises: RolloutError for any other status or {"success": false}; DeadlineExceeded.
        """
        return self._send("POST", path, body, deadline, also_accept)

    def _send(
        self, verb: str, path: str, body: dict[str, Any] | None, deadline: Deadline, also_accept: int | None
    ) -> dict[str, Any]:
        where = f"engine {self._engine}: {verb} {path}"
        left = deadline.check(where)
        try:
            answer = self._client.request(verb, path, json=body, timeout=left)
        except httpx.TimeoutException as error:
            raise DeadlineExceeded(f"{where}: no answer within its {deadline.seconds:g} s deadline") from error
        except httpx.HTTPError as error:
            raise RolloutError(f"{where}: {type(error).__name__}: {error}") from error
        content = _json(answer)
        refused = isinstance(content, dict) and content.get("success") is False
        if (not answer.is_success or refused) and answer.status_code != also_accept:
            raise RolloutError(f"{where} answered {answer.status_code}: {answer.text[:_ANSWER_SHOWN]}")
        return content if isinstance(content, dict) else {}


class Workers:
    """Our endpoints in the workers of one engine. Calls to several go out at once; the first failure is raised."""

    def __init__(self, engine: str, workers: Sequence[WorkerAddress], token: str) -> None:
        self._engine = engine
        self._addresses = {worker.rank: worker for worker in workers}
        self.ranks = tuple(sorted(self._addresses))
        if not workers or len(self._addresses) != len(workers):
            raise RolloutError(f"engine {engine}: need one endpoint for each worker, got ranks {[w.rank for w in workers]}")
        self._client = quiet_client(*(f"http://{w.host}:{w.port}" for w in workers), token=token)
        self._pool = ThreadPoolExecutor(max_workers=len(workers), thread_name_prefix=f"weight-sync-{engine}")

    def close(self) -> None:
        self._pool.shutdown()
        self._client.close()

    def all(self, method: str, payload: dict[str, Any], deadline: Deadline) -> dict[int, dict[str, Any]]:
        """The same call to every worker. Replies by rank."""
        return self.each(method, dict.fromkeys(self.ranks, payload), deadline)

    def each(self, method: str, payloads: Mapping[int, dict[str, Any]], deadline: Deadline) -> dict[int, dict[str, Any]]:
        """One payload for each rank. Raises the error of the lowest rank that failed, after all have answered."""
        futures = {rank: self._pool.submit(self.one, rank, method, payload, deadline) for rank, payload in payloads.items()}
        errors = {rank: error for rank, future in futures.items() if (error := future.exception()) is not None}
        if errors:
            raise errors[min(errors)]
        return {rank: future.result() for rank, future in futures.items()}

    def one(self, rank: int, method: str, payload: dict[str, Any], deadline: Deadline) -> dict[str, Any]:
        """Call one worker.

        Raises: the worker's own SessionError, BindError, ConfigError or VerifyError; RolloutError for every other
        failure; DeadlineExceeded. All name the engine, the rank, the method and the answer.
        """
        worker = self._addresses[rank]
        where = f"engine {self._engine}, rollout rank {rank} at {worker.host}:{worker.port}: {method}"
        left = deadline.check(where)
        request = {"method": method, "payload": payload, "seconds": max(left - _SLACK, left / 2)}
        try:
            own = {} if worker.token is None else {"Authorization": f"Bearer {worker.token}"}
            answer = self._client.post(f"http://{worker.host}:{worker.port}/call", json=request, timeout=left, headers=own)
        except httpx.TimeoutException as error:
            raise DeadlineExceeded(f"{where}: no answer within its {deadline.seconds:g} s deadline") from error
        except httpx.HTTPError as error:
            raise RolloutError(f"{where}: {type(error).__name__}: {error}") from error
        content = _json(answer)
        if answer.status_code == 200 and isinstance(content, dict) and "value" in content:
            return content["value"]
        told = content.get("error", {}) if isinstance(content, dict) else {}
        kind, message = told.get("type", ""), told.get("message", answer.text[:_ANSWER_SHOWN])
        raise _ERRORS.get(kind, RolloutError)(f"{where} answered {answer.status_code} {kind}: {message}")


def _json(answer: httpx.Response) -> Any:
    try:
        return answer.json()
    except ValueError:
        return None
