"""HTTP to a vLLM server: one call, one deadline, one clear error. No retries, and no proxies from the environment."""

from __future__ import annotations

import json
from collections.abc import Mapping
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
    listed,
)
from weight_sync.ids import Deadline
from weight_sync_integrations.server import quiet_client

_SHOWN = 2000
_ERRORS: dict[str, type[WeightSyncError]] = {
    kind.__name__: kind for kind in (BindError, ConfigError, DeadlineExceeded, SessionError, VerifyError)
}
"""What a worker may report by name; every other failure of a worker is a RolloutError that quotes it."""

METHOD = "weight_sync_call"


class Client:
    """Calls one server. engine: its name in error messages. url: scheme, host and port. token: the job's secret."""

    def __init__(self, engine: str, url: str, token: str) -> None:
        self._engine = engine
        self._url = url.rstrip("/")
        self._token = token
        self._workers = 0
        self._client = quiet_client(self._url)

    def close(self) -> None:
        self._client.close()

    def get(self, path: str, deadline: Deadline, **parameters: Any) -> Any:
        """The decoded JSON answer of GET `path`. Raises RolloutError or DeadlineExceeded."""
        return self._send("GET", path, deadline, None, parameters)

    def post(self, path: str, deadline: Deadline, body: Mapping[str, Any] | None = None, **parameters: Any) -> Any:
        """The decoded JSON answer of POST `path`, None when it is empty. Raises RolloutError or DeadlineExceeded."""
        return self._send("POST", path, deadline, body, parameters)

    def workers(
        self,
        method: str,
        payload: Mapping[str, Any],
        deadline: Deadline,
        by_rank: Mapping[int, Mapping[str, Any]] | None = None,
    ) -> dict[int, dict[str, Any]]:
        """Call a method of the worker extension on every worker; replies by rank.

        by_rank: more payload for single ranks. Raises the type that the workers reported (SessionError, BindError, ...),
        with every failing rank's words; RolloutError where they differ or are not ours, and where not every worker has
        answered that ever did, once: who did not answer has not done it.
        """
        request = {"method": method, "payload": payload, "by_rank": by_rank or {}}
        answer = self.post("/collective_rpc", deadline, {"method": METHOD, "args": [self._token, json.dumps(request)]})
        replies = [json.loads(text) for text in answer["results"]]
        failed = [reply for reply in replies if not reply["ok"]]
        if failed:
            types = {reply["error"]["type"] for reply in failed}
            kind = _ERRORS.get(types.pop(), RolloutError) if len(types) == 1 else RolloutError
            words = listed((_words(reply) for reply in failed), limit=4)
            raise kind(f"engine {self._engine}: {method} failed on {len(failed)} of {len(replies)} workers: {words}")
        ranks = sorted(int(reply["rank"]) for reply in replies)
        if ranks != list(range(len(ranks))) or len(ranks) < max(1, self._workers):
            raise RolloutError(
                f"engine {self._engine}: {method} was answered by ranks {ranks}; each of its workers has to, once"
                + (f" ({self._workers} did before)" if self._workers else "")
            )
        self._workers = len(ranks)
        return {int(reply["rank"]): reply["reply"] for reply in replies}

    def _send(
        self, verb: str, path: str, deadline: Deadline, body: Mapping[str, Any] | None, parameters: Mapping[str, Any]
    ) -> Any:
        where = f"engine {self._engine}: {verb} {self._url}{path}"
        left = deadline.check(where)
        try:
            response = self._client.request(verb, path, json=body, params=dict(parameters), timeout=left)
        except httpx.TimeoutException as error:
            # The server may still be at it: the caller must not assume that nothing happened.
            raise DeadlineExceeded(f"{where}: no answer within its {deadline.seconds:g} s deadline") from error
        except httpx.HTTPError as error:
            raise RolloutError(f"{where}: {type(error).__name__}: {error}") from error
        if response.status_code != 200:
            raise RolloutError(f"{where} answered {response.status_code}: {response.text[:_SHOWN]}")
        if not response.content:
            return None
        try:
            return response.json()
        except ValueError as error:
            raise RolloutError(f"{where} answered something that is not JSON: {response.text[:_SHOWN]}") from error


def _words(reply: Mapping[str, Any]) -> str:
    error = reply["error"]
    place = f"\n{error['trace']}" if error["trace"] else ""
    return f"rank {reply['rank']}: {error['type']}: {error['message']}{place}"
