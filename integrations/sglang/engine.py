"""The rollout side of a session for the official SGLang: weight_sync.session.contracts.RolloutEngine over HTTP.

Two kinds of calls. SGLang's own routes pause and resume generation, open and close its weight update, flush its cache
and stamp the version; what the server offers is read from its /openapi.json, never from its version. Our worker
endpoints (worker.py) describe, receive and digest. Every call is bounded by the deadline it is given; an answer that is
not plain success raises RolloutError with engine, endpoint and answer, and nothing is tried a second time.

Order of one update, and why:
    pause     SGLang answers before its schedulers have paused, so each worker is asked until all say that they are quiet.
    begin     /begin_weight_update first: it may restore packed weights, and only then do the workers check that nothing
              has moved since bind.
    feed      where the weights are taken by SGLang's own loader in each worker (loader.py): then neither that route nor
              /end_weight_update is called, because they would undo or repeat post-processing.
    finish    workers close the session and spoil what depends on weights, /end_weight_update derives it anew, workers prove
              that (settle), the cache is flushed, the version is written and read back, and only then do the workers record
              the commit.
    resume    needs the receipt of what the workers have recorded; nothing else continues generation.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, repeat
from typing import Any

from weight_sync.errors import RolloutError, SessionError, WeightSyncError
from weight_sync.ids import Deadline
from weight_sync.session.contracts import (
    CheckStep,
    EngineDescription,
    PauseMode,
    Receipt,
    describe_from_json,
    engine_state,
)
from weight_sync_integrations.inventory import DraftPolicy
from weight_sync_integrations.sglang.client import Http, Workers
from weight_sync_integrations.sglang.launch import WorkerAddress

_POLLS = 0.002, 0.002, 0.005, 0.01, 0.02
"""Seconds between looks at whether schedulers have paused or gone on, the last one from then on: mostly they take a few
milliseconds, and requests wait."""


class SglangEngine:
    """One engine. Not thread-safe: one session drives it."""

    def __init__(
        self,
        name: str,
        url: str,
        workers: Sequence[WorkerAddress],
        token: str,
        *,
        draft: DraftPolicy = "refuse",
        declare: Mapping[str, str] | None = None,
    ) -> None:
        """No request is made here. `workers`: every worker of the engine, on all its hosts (launch.Server.workers).

        draft, declare: weight_sync.draft and weight_sync.declare, for the inventory that bind() makes.
        """
        self.name = name
        self._http = Http(name, url)
        self._workers = Workers(name, workers, token)
        self._beside = {"draft": draft, "declare": dict(declare or {})}
        self._offers: frozenset[str] | None = None
        self._pauses: tuple[dict[str, Any], bool] | None = None  # sizes, and whether it keeps prefixes: what pause() asks first
        self._mode: PauseMode | None = None
        self._verified = ""
        self._by_loader = False
        self._updating = False  # we opened an update of SGLang's that we have not ended

    def close(self) -> None:
        """Close connections. The server is not touched."""
        self._http.close()
        self._workers.close()

    # -- RolloutEngine ---------------------------------------------------------------------------------------------

    def describe(self, deadline: Deadline) -> EngineDescription:
        """Software also says `suspended: why` while the engine is kept from serving by an aborted session."""
        identities = self._workers.all("identity", {}, deadline)
        first = identities[self._workers.ranks[0]]
        for rank, other in identities.items():
            if (other["model"], other["sizes"]) != (first["model"], first["sizes"]):
                raise RolloutError(
                    f"engine {self.name}: workers disagree on what they serve: rank {self._workers.ranks[0]} has sizes "
                    f"{first['sizes']}, rank {rank} has {other['sizes']}, models equal: {other['model'] == first['model']}"
                )
        sizes = dict(first["sizes"])
        self._pauses = sizes, first["keeps_prefixes"]
        world = sizes["dp"] * sizes["pp"] * sizes["tp"]
        if list(self._workers.ranks) != list(range(world)):
            raise RolloutError(
                f"engine {self.name}: its sizes {sizes} make {world} workers, "
                f"but endpoints of ranks {list(self._workers.ranks)} were given"
            )
        software = dict(first["software"])
        states = self.state(deadline)
        answers = self._workers.all("describe", {}, deadline)
        reasons = {s["aborted"] for s in states.values() if s["aborted"]}
        if reasons:
            software["suspended"] = "; ".join(sorted(reasons))
        return EngineDescription(
            name=self.name,
            kind="sglang",
            model=first["model"],
            sizes=sizes,
            version=self._version(deadline),
            pause_modes=_modes(*self._pauses),
            ranks=tuple(describe_from_json(answers[rank]) for rank in self._workers.ranks),
            software=software,
            state=engine_state(
                self.name,
                any(state["paused"] for state in states.values()),
                # An update of SGLang's that is open may have unpacked weights: no receipt vouches for what is there now.
                {r: s | {"suspect": s["suspect"] or s["update_open"]} for r, s in states.items()},
                (answer["generation"] for answer in answers.values()),
            ),
            refusals=tuple(dict.fromkeys(why for identity in identities.values() for why in identity["refusals"])),
            not_writable={
                f"rank {r} {name}": why for r, one in identities.items() for name, why in one["not_writable"].items()
            },
            no_loader="; ".join(dict.fromkeys(one["no_loader"] for one in identities.values() if one["no_loader"])),
        )

    def claim(self, controller: str, deadline: Deadline) -> None:
        self._workers.all("claim", {"controller": controller}, deadline)

    def pause(self, mode: PauseMode, deadline: Deadline) -> None:
        """Returns when every worker is quiet. Raises SessionError for a mode this engine does not keep."""
        if self._pauses is None:
            identity = self._workers.one(self._workers.ranks[0], "identity", {}, deadline)
            self._pauses = identity["sizes"], identity["keeps_prefixes"]
        sizes, keeps_prefixes = self._pauses
        legal = _modes(sizes, keeps_prefixes)
        if mode not in legal:
            kept = ", with a prefix cache" if keeps_prefixes else ""
            raise SessionError(f"engine {self.name} (pp={sizes['pp']}{kept}) cannot pause with mode {mode!r}; legal: {legal}")
        self._http.post("/pause_generation", {"mode": mode}, deadline)
        if mode == "abort" and sizes["pp"] == 1:
            # "abort" empties the engine but pauses only the front end; this makes the schedulers hold still too.
            self._http.post("/pause_generation", {"mode": "retract"}, deadline)
        self._until(lambda state: state["quiet"], f"pause({mode}) until every worker is quiet", deadline)
        self._mode, self._verified = mode, ""

    def record(self, tensors: Mapping[str, tuple[list[int], str]], deadline: Deadline) -> dict[int, dict[str, Any]]:
        """The second witness, for each rank: the fields of recorder.Recording, and `unexplained` by HF name.

        Writes that come from no HF tensor are in `unexplained` under "parameter <name>".
        """
        specs = {name: {"shape": list(shape), "dtype": dtype} for name, (shape, dtype) in tensors.items()}
        answers = self._workers.all("record", {"tensors": specs} | self._beside, deadline)
        for answer in answers.values():
            answer["unexplained"] = {
                entry["tensor"] or f"parameter {entry['param']}": entry["operation"] for entry in answer["inexpressible"]
            }
        return answers

    def bind(self, tables: Mapping[int, Mapping[str, Any]], deadline: Deadline) -> dict[int, dict[str, Any]]:
        """Raises BindError with a worker's words where the plan does not fit its live parameters."""
        self._require_all_ranks("bind", tables)
        beside = self._beside | {"update_routes": self._recomputes(deadline)}
        self._by_loader = any(table.get("loader") for table in tables.values())
        return self._workers.each("bind", {rank: {**table, **beside} for rank, table in tables.items()}, deadline)

    def begin(self, session: str, version: int, plan: str, epochs: Mapping[int, int], deadline: Deadline) -> None:
        """Raises SessionError if pause() was not called or a worker is not quiet; RolloutError if the server refuses."""
        self._require_all_ranks("begin", epochs)
        states = self._require_paused("begin", deadline)
        left_open = any(state["update_open"] for state in states.values())
        if self._by_loader:
            if left_open:
                raise RolloutError(
                    f"engine {self.name}: a weight update of SGLang's own is open (/begin_weight_update), and to end it would "
                    "post-process weights once more that are post-processed; restart this server"
                )
        elif self._offers_update(deadline):
            if left_open:
                self._end_update(deadline)  # left open by a controller that died
            self._updating = True  # from here on it may be open, whatever is answered
            self._http.post("/begin_weight_update", {}, deadline)
        self._verified = ""
        payload = {"session": session, "version": version, "plan": plan}
        self._workers.each("begin", {rank: {**payload, "epoch": epoch} for rank, epoch in epochs.items()}, deadline)

    def place(self, session: str, round: int, deadline: Deadline) -> None:
        self._workers.all("place", {"session": session, "round": round}, deadline)

    def patch(
        self, session: str, base: Mapping[str, Any], messages: Mapping[int, Sequence[Sequence[int]]], deadline: Deadline
    ) -> dict[int, dict[str, Any]]:
        common = {"session": session, "base": dict(base)}
        return self._workers.each("patch", {rank: common | {"messages": each} for rank, each in messages.items()}, deadline)

    def pull(self, session: str, peers: Mapping[int, Mapping[str, Any]], deadline: Deadline) -> dict[int, dict[str, Any]]:
        self._require_all_ranks("pull", peers)
        seconds = deadline.check(f"engine {self.name}: pull")
        payloads = {rank: {"session": session, "peer": dict(peer), "seconds": seconds} for rank, peer in peers.items()}
        return self._workers.each("pull", payloads, deadline)

    def feed(self, session: str, wave: int, deadline: Deadline) -> None:
        self._workers.all("feed", {"session": session, "wave": wave}, deadline)

    def check(self, session: str, step: CheckStep, deadline: Deadline) -> dict[int, dict[str, Any]]:
        return self._workers.all(step, {"session": session}, deadline)

    def verify(self, session: str, deadline: Deadline, digests: bool = True, wave: int = 0) -> dict[int, str]:
        answers = self._workers.all("verify", {"session": session, "digests": digests, "wave": wave}, deadline)
        self._verified = session
        return {rank: str(answer["digests"]) for rank, answer in answers.items()}

    def finish(self, session: str, version: int, digest: str, deadline: Deadline) -> Receipt:
        """Raises SessionError unless verify() of this session has returned.

        With pause mode in_place the KV cache is kept on purpose, so SGLang's refusal to flush it under running requests
        is accepted; in the other modes it is an error.
        """
        if not session or self._verified != session:
            raise SessionError(f"engine {self.name}: finish({session!r}) before verify({session!r}) returned")
        self._require_paused("finish", deadline)
        ended = self._workers.all("end", {"session": session}, deadline)
        if self._by_loader:
            pass  # each worker's loader has ended with SGLang's post-processing; the route would do it a second time
        elif self._offers_update(deadline):
            self._end_update(deadline)
        elif self._offers_post_process(deadline) and any(answer["derived"] for answer in ended.values()):
            self._http.post("/post_process_weights", {"post_load_weights": True}, deadline)
        self._workers.all("settle", {"session": session}, deadline)
        self._http.post("/flush_cache", None, deadline, also_accept=400 if self._mode == "in_place" else None)
        # SGLang's default would abort the requests that a retract or in_place pause has kept.
        self._http.post("/update_weight_version", {"new_version": str(version), "abort_all_requests": False}, deadline)
        found = self._version(deadline)
        if found != version:
            raise RolloutError(f"engine {self.name}: /update_weight_version accepted {version}, /model_info says {found}")
        commit = {"session": session, "version": version, "digest": digest}
        self._workers.all("commit", commit, deadline)
        self._verified = ""
        return Receipt(engine=self.name, session=session, version=version, digest=digest)

    def resume(self, receipt: Receipt, deadline: Deadline) -> None:
        """Raises SessionError if the receipt is not of what the workers hold, they hold suspect weights, or an update of
        SGLang's is open, which may have unpacked weights."""
        if receipt.engine != self.name:
            raise SessionError(f"engine {self.name}: the receipt is of engine {receipt.engine}")
        want = {"session": receipt.session, "version": receipt.version, "digest": receipt.digest}
        for rank, state in self.state(deadline).items():
            if state["suspect"] or state["committed"] != want:
                held = "suspect weights" if state["suspect"] else f"committed {state['committed'] or 'nothing'}"
                why = f" ({state['aborted']})" if state["aborted"] else ""
                raise SessionError(f"engine {self.name}: receipt {want} does not fit rollout rank {rank}: {held}{why}")
            if state["update_open"]:
                raise SessionError(
                    f"engine {self.name}: receipt {want} does not resume rollout rank {rank}: a weight update of SGLang's own "
                    "is open (/begin_weight_update), which may have unpacked weights; the next sync ends it"
                )
        self._workers.all("admit", {"session": receipt.session}, deadline)
        offered = "torch_empty_cache" in self._openapi(deadline)
        self._http.post("/continue_generation", {"torch_empty_cache": False} if offered else {}, deadline)
        self._until(lambda state: not state["paused"], "resume() until every worker has left the pause", deadline)
        self._mode = None

    def abort(self, session: str, reason: str, deadline: Deadline) -> None:
        """End `session` without commit. A paused engine stays paused, and describe() says why.

        An engine that was never paused keeps serving what it served. Whatever fails here, the remaining workers are
        still told; all failures are reported together. An update of SGLang's that is open is ended only where this controller
        or the session that ends here has begun it: another is somebody else's, and to end it would post-process their weights.
        """
        failures: list[str] = []
        ours, still_open = self._updating, False
        for rank in self._workers.ranks:
            try:
                answer = self._workers.one(rank, "abort", {"session": session, "reason": reason}, deadline)
                ours |= answer["in_update"]
                still_open |= answer["update_open"]
            except WeightSyncError as error:
                failures.append(str(error))
        self._verified = ""
        if failures:
            raise RolloutError(f"engine {self.name}: abort({reason!r}) did not reach every worker: " + "; ".join(failures))
        if ours and still_open and not self._by_loader:
            self._end_update(deadline)

    # -- beside the contract ---------------------------------------------------------------------------------------

    def state(self, deadline: Deadline) -> dict[int, dict[str, Any]]:
        """For each rank what Worker.state() says: paused, quiet, session, suspect, aborted, committed."""
        return self._workers.all("state", {}, deadline)

    def aliases(self, deadline: Deadline) -> dict[int, dict[str, list[str]]]:
        """For each rank, other names of live tensors that describe() lists once (tied weights)."""
        return {rank: answer["aliases"] for rank, answer in self._workers.all("identity", {}, deadline).items()}

    def call(self, method: str, payload: dict[str, Any], deadline: Deadline) -> dict[int, dict[str, Any]]:
        """Any method of TargetAgent in every worker, with one payload for all. Replies by rank."""
        return self._workers.all(method, payload, deadline)

    def inventory(self, expected: Mapping[int, Sequence[str]] | None, deadline: Deadline) -> dict[int, list[dict[str, Any]]]:
        """For each rank, every tensor that generation depends on (inventory.Entry as a dict). Nothing is changed.

        expected: for each rank the parameters that a plan writes; None: all parameters and persistent buffers.
        """
        common = self._beside | {"update_routes": self._recomputes(deadline)}
        payloads = {r: common | ({} if expected is None else {"expected": list(expected[r])}) for r in self._workers.ranks}
        return {rank: answer["entries"] for rank, answer in self._workers.each("inventory", payloads, deadline).items()}

    def generate(self, input_ids: Sequence[int], max_new_tokens: int, deadline: Deadline) -> list[int]:
        """Greedy continuation: exactly max_new_tokens token ids."""
        return self.generate_stamped(input_ids, max_new_tokens, deadline)[0]

    def generate_stamped(
        self, input_ids: Sequence[int], max_new_tokens: int, deadline: Deadline
    ) -> tuple[list[int], list[tuple[str, int, int]]]:
        """The tokens, and (version, first token, one past last) of every stretch that one weight version sampled.

        The version is the text that was stamped: "default" before the first commit. A server that does not report
        stretches (0.5.16) gives one, with the version it held at the end.
        """
        sampling = {"temperature": 0.0, "max_new_tokens": max_new_tokens, "ignore_eos": True}
        answer = self._http.post("/generate", {"input_ids": list(input_ids), "sampling_params": sampling}, deadline)
        tokens = answer.get("output_ids")
        if not isinstance(tokens, list) or len(tokens) != max_new_tokens:
            raise RolloutError(f"engine {self.name}: /generate answered {answer!r}, not {max_new_tokens} output_ids")
        about = answer["meta_info"]
        spans = about.get("weight_versions") or [{"version": about["weight_version"], "start": 0, "end": len(tokens)}]
        return tokens, [(str(span["version"]), int(span["start"]), int(span["end"])) for span in spans]

    def load_from_disk(self, path: str, deadline: Deadline) -> None:
        """Load a checkpoint folder as the server sees it, outside any session; a receipt given before is void after."""
        self._workers.all("forget", {}, deadline)
        body = {"model_path": path, "flush_cache": True, "abort_all_requests": False}
        self._http.post("/update_weights_from_disk", body, deadline)

    # -- pieces ----------------------------------------------------------------------------------------------------

    def _version(self, deadline: Deadline) -> int:
        """-1 until a number was stamped: SGLang starts with the word "default"."""
        text = str(self._http.get("/model_info", deadline).get("weight_version", ""))
        return int(text) if text.isdecimal() else -1

    def _require_all_ranks(self, verb: str, given: Mapping[int, Any]) -> None:
        wrong = sorted(set(given) ^ set(self._workers.ranks))
        if wrong:
            raise SessionError(
                f"engine {self.name}: {verb}() needs an entry for each of the ranks {list(self._workers.ranks)} and no "
                f"other; missing or unknown: {wrong}"
            )

    def _until(self, there: Callable[[Mapping[str, Any]], bool], what: str, deadline: Deadline) -> None:
        """Return once every worker's state is `there`."""
        for seconds in chain(_POLLS, repeat(_POLLS[-1])):
            if all(map(there, self.state(deadline).values())):
                return
            deadline.check(f"engine {self.name}: {what}")
            time.sleep(seconds)

    def _require_paused(self, verb: str, deadline: Deadline) -> dict[int, dict[str, Any]]:
        states = self.state(deadline)
        loud = [rank for rank, state in states.items() if not state["quiet"]]
        if self._mode is None or loud:
            missing = f"rollout ranks {loud} are generating" if loud else "pause() was not called"
            raise SessionError(f"engine {self.name}: {verb}() needs a paused engine, but {missing}")
        return states

    def _openapi(self, deadline: Deadline) -> frozenset[str]:
        """Paths the server offers and the names of request fields it knows."""
        if self._offers is None:
            content = self._http.get("/openapi.json", deadline)
            schemas = content.get("components", {}).get("schemas", {})
            fields = {name for schema in schemas.values() for name in schema.get("properties", {})}
            self._offers = frozenset(content.get("paths", {})) | frozenset(fields)
        return self._offers

    def _end_update(self, deadline: Deadline) -> None:
        self._http.post("/end_weight_update", {}, deadline)
        self._updating = False

    def _offers_update(self, deadline: Deadline) -> bool:
        return {"/begin_weight_update", "/end_weight_update"} <= self._openapi(deadline)

    def _offers_post_process(self, deadline: Deadline) -> bool:
        """The route of miles's fork before it had a weight update (miles-rl 0.0.2). It runs post_load_weights when asked."""
        return {"/post_process_weights", "post_load_weights"} <= self._openapi(deadline)

    def _recomputes(self, deadline: Deadline) -> bool:
        """Whether the server has a route that derives anew what depends on weights."""
        return self._offers_update(deadline) or self._offers_post_process(deadline)


def _modes(sizes: Mapping[str, Any], keeps_prefixes: bool) -> tuple[PauseMode, ...]:
    """What pause() accepts of this engine.

    Schedulers of a pipeline do not look at the paused flag (read in 0.5.16 and 0.5.23), so only an emptied engine is quiet.
    in_place leaves requests running, and then SGLang refuses to flush: KV of old weights would stay in the prefix cache, to
    be found by requests of the new version. So it needs --disable-radix-cache.
    """
    if sizes["pp"] > 1:
        return ("abort",)
    return ("abort", "retract") if keeps_prefixes else ("abort", "retract", "in_place")
