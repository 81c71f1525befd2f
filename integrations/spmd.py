"""A controller inside trainer rank 0, for training loops that call every rank at once and lend us no other process.

    every rank      ranks = Ranks(rank, world, agent.call, host, gather)     a collective; each opens an endpoint
    rank 0          with ranks.leading(seconds) as group: WeightSync(group, ...).sync(version); group.result = {...}
    other ranks     result = ranks.follow(deadline)                          serves rank 0's calls until it is done

Rank 0 reaches the others over HTTP (the endpoint that engine workers have, and its token), not by collectives: a call is
bounded by its own deadline, a rank that died is an error at once, and what a rank raises comes back as the error it is. A call
runs on the thread that waits in follow(), so that it may itself be a collective of all ranks.
"""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx

from weight_sync import errors
from weight_sync.errors import DeadlineExceeded, SessionError, TransportError, VerifyError, WeightSyncError
from weight_sync.ids import Deadline
from weight_sync_integrations.server import quiet_client
from weight_sync_integrations.sglang.endpoint import WorkerEndpoint

Call = Callable[[str, Mapping[str, Any]], dict[str, Any]]

_OVER = "over"
_POLL = 0.05
_LOOK = 5.0
"""Seconds without a call after which a rank looks whether rank 0 is still there."""
_SLACK = 2.0
"""Seconds that a rank's own deadline ends before rank 0's, so that its explanation arrives."""


class Ranks:
    """A TrainerGroup on rank 0; on the others what serves it."""

    def __init__(self, rank: int, world: int, call: Call, host: str, gather: Callable[[Any], list[Any]]) -> None:
        """A collective of all ranks, twice.

        call: SourceAgent.call of this rank. host: an address of this node that rank 0 reaches; nothing else is listened on.
        gather: every rank's value, in the order of ranks, on every rank (torch.distributed's all_gather_object).
        """
        self.rank, self.world = rank, world
        self.result: dict[str, Any] = {}
        self._call = call
        self._over: dict[str, Any] | None = None
        token = gather(secrets.token_urlsafe(32) if rank == 0 else "")[0]
        self._endpoint = WorkerEndpoint(token, host, self._serve_one)
        self._endpoint.start()
        self._peers: list[tuple[str, int]] = [tuple(place) for place in gather((self._endpoint.host, self._endpoint.port))]
        self._client = quiet_client(*(f"http://{_bracket(h)}:{p}" for h, p in self._peers), token=token)
        self._pool = ThreadPoolExecutor(max_workers=max(1, world), thread_name_prefix="weight-sync-ranks")

    def close(self) -> None:
        self._endpoint.close()
        self._client.close()
        self._pool.shutdown(wait=False)

    # -- rank 0 ----------------------------------------------------------------------------------------------------

    @contextmanager
    def leading(self, seconds: float) -> Iterator[Ranks]:
        """For the time of the block the other ranks serve. What the block left in `result`, or why it failed, ends follow().

        seconds: for telling them, which also happens when the block fails. The block's own error is raised; ranks that could
        not be told are a note on it.
        """
        if self.rank != 0:
            raise SessionError(f"trainer rank {self.rank} cannot lead: the controller is in rank 0")
        self.result = {}
        try:
            yield self
        except BaseException as error:
            try:
                self._end({"error": f"{type(error).__name__}: {error}"}, seconds)
            except WeightSyncError as also:
                error.add_note(f"and not every rank was told: {also}")
            raise
        self._end({"result": self.result}, seconds)

    def call(self, method: str, payloads: Mapping[int, Mapping[str, Any]], deadline: Deadline) -> dict[int, dict[str, Any]]:
        """TrainerGroup.call. This rank's own part runs on the calling thread: it may be a collective with the others."""
        futures = {r: self._pool.submit(self._ask, r, method, dict(p), deadline) for r, p in payloads.items() if r != self.rank}
        replies: dict[int, dict[str, Any]] = {}
        failed: dict[int, BaseException] = {}
        if self.rank in payloads:
            try:
                replies[self.rank] = self._call(method, payloads[self.rank])
            except Exception as error:  # noqa: BLE001 - raised below, after the others have answered
                failed[self.rank] = error
        for rank, future in futures.items():
            if (error := future.exception()) is None:
                replies[rank] = future.result()
            else:
                failed[rank] = error
        if failed:
            (_, first), *others = sorted(failed.items())
            for rank, other in others:
                first.add_note(f"also trainer rank {rank}: {type(other).__name__}: {other}")
            raise first
        return {rank: replies[rank] for rank in sorted(replies)}

    def _end(self, payload: dict[str, Any], seconds: float) -> None:
        deadline = Deadline.after(seconds)
        self.call(_OVER, dict.fromkeys(range(1, self.world), payload), deadline)

    def _ask(self, rank: int, method: str, payload: dict[str, Any], deadline: Deadline) -> dict[str, Any]:
        host, port = self._peers[rank]
        where = f"trainer rank {rank} at {host}:{port}: {method}"
        left = deadline.check(where)
        request = {"method": method, "payload": payload, "seconds": max(left - _SLACK, left / 2)}
        try:
            answer = self._client.post(f"http://{_bracket(host)}:{port}/call", json=request, timeout=left)
        except httpx.TimeoutException as error:
            raise DeadlineExceeded(f"{where}: no answer within its {deadline.seconds:g} s deadline") from error
        except httpx.HTTPError as error:
            raise SessionError(f"{where}: its process does not answer: {type(error).__name__}: {error}") from error
        content = answer.json() if answer.headers.get("content-type", "").startswith("application/json") else {}
        if answer.status_code != 200:
            told = content.get("error", {})
            raise SessionError(
                f"{where} answered {answer.status_code} {told.get('type', '')}: {told.get('message', answer.text)}"
            )
        if "raised" in content["value"]:
            raise _rebuilt(content["value"]["raised"])
        return content["value"]["reply"]

    # -- the other ranks -------------------------------------------------------------------------------------------

    def follow(self, deadline: Deadline) -> dict[str, Any]:
        """Serve rank 0's calls on this thread until it says that it is done; returns its `result`.

        Raises SessionError when rank 0 failed (with its words) or its process is gone; DeadlineExceeded.
        """
        self._over = None
        looked = time.monotonic()
        while self._over is None:
            deadline.check(f"trainer rank {self.rank}: waiting for rank 0")
            if self._endpoint.run_pending(min(_POLL, deadline.remaining())):
                looked = time.monotonic()
            elif time.monotonic() - looked > _LOOK:
                self._look()
                looked = time.monotonic()
        if "error" in self._over:
            raise SessionError(f"trainer rank {self.rank}: the sync failed on rank 0: {self._over['error']}")
        return self._over["result"]

    def _look(self) -> None:
        try:
            socket.create_connection(self._peers[0], timeout=_LOOK).close()
        except OSError as error:
            raise SessionError(
                f"trainer rank {self.rank}: rank 0 at {self._peers[0]} is gone ({error}) in the middle of a sync; engines "
                "that it had paused stay paused"
            ) from error

    def _serve_one(self, method: str, payload: dict[str, Any]) -> dict[str, Any]:
        if method == _OVER:
            self._over = payload
            return {"reply": {}}
        try:
            return {"reply": self._call(method, payload)}
        except WeightSyncError as error:
            return {"raised": _taken_apart(error)}


def _taken_apart(error: WeightSyncError) -> dict[str, Any]:
    """An error as plain data, with what the failure policy reads of it."""
    told: dict[str, Any] = {"type": type(error).__name__, "text": str(error), "notes": list(getattr(error, "__notes__", []))}
    if isinstance(error, TransportError):
        told |= {"endpoint": error.endpoint, "tensor": error.tensor, "range": list(error.byte_range), "code": error.code}
    if isinstance(error, VerifyError):
        told["rollout_ranks"] = list(error.rollout_ranks)
    return told


def _rebuilt(told: Mapping[str, Any]) -> WeightSyncError:
    kind = getattr(errors, told["type"], SessionError)
    if kind is TransportError:
        low, high = told["range"]
        rebuild, arguments = TransportError(
            "", endpoint=told["endpoint"], tensor=told["tensor"], byte_range=(low, high), code=told["code"]
        ).__reduce__()  # type: ignore[misc]
        error = rebuild(told["text"], *arguments[1:])
    elif kind is VerifyError:
        error = VerifyError(told["text"], told["rollout_ranks"])
    else:
        error = kind(told["text"])
    for note in told["notes"]:
        error.add_note(note)
    return error


def _bracket(host: str) -> str:
    return f"[{host}]" if ":" in host else host
