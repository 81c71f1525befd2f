"""One vLLM server as the session sees it (weight_sync.session.contracts.RolloutEngine), over HTTP.

What happens on the server at each verb (routes need VLLM_SERVER_DEV_MODE=1; seen in vLLM 0.32.0):

    describe   every worker: describe; /weight_info
    record     every worker: record
    bind       every worker: bind
    pause      /pause?mode=..., confirmed by /is_paused
    begin      /start_weight_update (the workers' own record that an update is active), then every worker: begin
    place      every worker: place
    pull       every worker: pull
    feed       every worker: feed, after verify, where live weights are not the checkpoint's (loader.py)
    check      every worker: snapshot, scramble or compare
    verify     every worker: verify
    finish     every worker: end (derive anew what depends on weights, prove the rest untouched); /reset_prefix_cache;
               /finish_weight_update {weight_version}; version read back;
               only then every worker: commit
    resume     needs the receipt of what the workers have committed; /resume, confirmed by /is_paused
    abort      every worker: abort; /finish_weight_update without a version; the engine stays paused

Every worker is asked in one collective call (worker.py), in which one text travels to all of them. The calls run in the
engine's main loop: nothing is generated while one lasts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from weight_sync.errors import RolloutError, SessionError
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
from weight_sync_integrations.vllm.client import Client

_VLLM_MODE: dict[PauseMode, str] = {"abort": "abort", "wait": "wait", "retract": "keep", "keep": "keep"}
PAUSE_MODES: tuple[PauseMode, ...] = tuple(_VLLM_MODE)
"""retract and keep are one: requests stop between two steps and stay queued. vLLM clears its prefix cache all or nothing
and never under running requests, so at the commit they are requeued and their KV is computed again with the new weights;
keeping it would leave the old weights' KV in the cache for everybody."""


class VllmEngine:
    """One server is one engine; its ranks are pipeline stage * tp + tensor rank. Not thread-safe: one session drives it.

    name: how messages and receipts call it. url: of the server. token: the job's secret the server was started with.
    """

    def __init__(
        self, name: str, url: str, token: str, *, draft: DraftPolicy = "refuse", declare: Mapping[str, str] | None = None
    ) -> None:
        """No request is made here. draft, declare: weight_sync.draft and .declare, for the inventory that bind() makes."""
        self.name = name
        self._http = Client(name, url, token)
        self._beside = {"draft": draft, "declare": dict(declare or {})}
        self._verified = ""

    def close(self) -> None:
        """Close connections. The server is not touched."""
        self._http.close()

    # -- RolloutEngine ---------------------------------------------------------------------------------------------

    def describe(self, deadline: Deadline) -> EngineDescription:
        """Software also says `suspended: why` while the engine is kept from serving by an aborted session.

        Raises: RolloutError (unreachable, wrong token, data parallelism inside the server).
        """
        replies = self._http.workers("describe", {}, deadline)
        world = int(self._http.get("/get_world_size", deadline, include_dp=False)["world_size"])
        if sorted(replies) != list(range(world)):
            raise RolloutError(f"engine {self.name}: tp * pp is {world}, but ranks {sorted(replies)} answered")
        first = replies[0]
        if first["internal_dp"]:
            raise RolloutError(
                f"engine {self.name} runs {first['sizes']['dp']} data-parallel replicas behind one address, and vLLM's "
                "/collective_rpc returns the first replica's answers only; start one server for each replica "
                "(--data-parallel-rank, external load balancing) and list them as engines"
            )
        software = dict(first["software"])
        if reasons := sorted({r["state"]["aborted"] for r in replies.values()} - {""}):
            software["suspended"] = "; ".join(reasons)
        return EngineDescription(
            name=self.name,
            kind="vllm",
            model=first["model"],
            sizes=first["sizes"],
            version=self.version(deadline),
            pause_modes=PAUSE_MODES,
            ranks=tuple(describe_from_json(replies[rank]) for rank in range(world)),
            software=software,
            state=engine_state(
                self.name,
                self.is_paused(deadline),
                {rank: reply["state"] for rank, reply in replies.items()},
                (reply["generation"] for reply in replies.values()),
            ),
            refusals=tuple(dict.fromkeys(why for reply in replies.values() for why in reply["refusals"])),
            not_writable={f"rank {rank} {name}": why for rank, r in replies.items() for name, why in r["not_writable"].items()},
            no_loader="; ".join(dict.fromkeys(reply["no_loader"] for reply in replies.values() if reply["no_loader"])),
        )

    def claim(self, controller: str, deadline: Deadline) -> None:
        self._http.workers("claim", {"controller": controller}, deadline)

    def record(self, tensors: Mapping[str, tuple[list[int], str]], deadline: Deadline) -> dict[int, dict[str, Any]]:
        """The second witness, for each rank: the fields of recorder.Recording, and `unexplained` by HF name.

        Writes that come from no HF tensor are in `unexplained` under "parameter <name>".
        """
        plain = {name: [list(shape), dtype] for name, (shape, dtype) in tensors.items()}
        replies = self._http.workers("record", {"tensors": plain} | self._beside, deadline)
        for reply in replies.values():
            reply["unexplained"] = {
                entry["tensor"] or f"parameter {entry['param']}": entry["operation"] for entry in reply["inexpressible"]
            }
        return replies

    def bind(self, tables: Mapping[int, Mapping[str, Any]], deadline: Deadline) -> dict[int, dict[str, Any]]:
        """Raises BindError with the workers' words where the plan does not fit their live parameters."""
        return self._each("bind", self._beside, tables, deadline)

    def pause(self, mode: PauseMode, deadline: Deadline) -> None:
        """Returns when nothing runs. Raises SessionError for a mode vLLM does not have."""
        if mode not in _VLLM_MODE:
            raise SessionError(f"engine {self.name} cannot pause with mode {mode!r}; legal: {PAUSE_MODES}")
        # clear_cache: nothing is certain yet; an update that is given up must not have cost the cache.
        self._http.post("/pause", deadline, mode=_VLLM_MODE[mode], clear_cache=False)
        if not self.is_paused(deadline):
            raise RolloutError(f"engine {self.name}: answered /pause with success, but is not paused")
        self._verified = ""

    def begin(self, session: str, version: int, plan: str, epochs: Mapping[int, int], deadline: Deadline) -> None:
        """Raises SessionError if the engine is not paused or another session is open."""
        if not self.is_paused(deadline):
            raise SessionError(f"engine {self.name}: begin() needs a paused engine")
        states = self.state(deadline)
        if open_session := next((s["session"] for s in states.values() if s["session"]), ""):
            raise SessionError(f"engine {self.name}: begin of session {session} while {open_session} is open; abort it first")
        if any(state["update_active"] for state in states.values()):
            self._http.post("/finish_weight_update", deadline, {"weight_version": None})  # left by a controller that died
        self._http.post("/start_weight_update", deadline)
        self._verified = ""
        payload = {"session": session, "version": version, "plan": plan}
        self._each("begin", payload, {rank: {"epoch": epoch} for rank, epoch in epochs.items()}, deadline)

    def place(self, session: str, round: int, deadline: Deadline) -> None:
        self._http.workers("place", {"session": session, "round": round}, deadline)

    def patch(
        self, session: str, base: Mapping[str, Any], messages: Mapping[int, Sequence[Sequence[int]]], deadline: Deadline
    ) -> dict[int, dict[str, Any]]:
        common = {"session": session, "base": dict(base)}
        return self._each("patch", common, {rank: {"messages": each} for rank, each in messages.items()}, deadline)

    def pull(self, session: str, peers: Mapping[int, Mapping[str, Any]], deadline: Deadline) -> dict[int, dict[str, Any]]:
        seconds = deadline.check(f"engine {self.name}: pull")
        return self._each(
            "pull",
            {"session": session, "seconds": seconds},
            {rank: {"peer": dict(peer)} for rank, peer in peers.items()},
            deadline,
        )

    def feed(self, session: str, wave: int, deadline: Deadline) -> None:
        """Raises RolloutError or VerifyError with the workers' words; the weights are a mixture then."""
        self._http.workers("feed", {"session": session, "wave": wave}, deadline)

    def check(self, session: str, step: CheckStep, deadline: Deadline) -> dict[int, dict[str, Any]]:
        return self._http.workers(step, {"session": session}, deadline)

    def verify(self, session: str, deadline: Deadline, digests: bool = True, wave: int = 0) -> dict[int, str]:
        replies = self._http.workers("verify", {"session": session, "digests": digests, "wave": wave}, deadline)
        self._verified = session
        return {rank: str(reply["digests"]) for rank, reply in replies.items()}

    def finish(self, session: str, version: int, digest: str, deadline: Deadline) -> Receipt:
        """Raises SessionError unless verify() of this session has returned; RolloutError if a cache or version is not taken."""
        if not session or self._verified != session:
            raise SessionError(f"engine {self.name}: finish({session!r}) before verify({session!r}) returned")
        if not self.is_paused(deadline):
            raise SessionError(f"engine {self.name}: finish() needs a paused engine; somebody resumed it during the session")
        self._http.workers("end", {"session": session}, deadline)
        # First the cache: no token may ever carry the new version and come from the old weights' KV.
        self._clear_cache(f"writing version {version}", deadline)
        self._http.post("/finish_weight_update", deadline, {"weight_version": str(version)})
        found = self.version(deadline)
        if found != version:
            raise RolloutError(f"engine {self.name}: version {version} was set, /weight_info says {found}")
        self._http.workers("commit", {"session": session, "version": version, "digest": digest}, deadline)
        self._verified = ""
        return Receipt(engine=self.name, session=session, version=version, digest=digest)

    def resume(self, receipt: Receipt, deadline: Deadline) -> None:
        """Raises SessionError if the receipt is not of what the workers hold, or they hold suspect weights."""
        if receipt.engine != self.name:
            raise SessionError(f"engine {self.name}: the receipt is of engine {receipt.engine}")
        want = {"session": receipt.session, "version": receipt.version, "digest": receipt.digest}
        for rank, state in self.state(deadline).items():
            if state["suspect"] or state["committed"] != want:
                held = "suspect weights" if state["suspect"] else f"committed {state['committed'] or 'nothing'}"
                why = f" ({state['aborted']})" if state["aborted"] else ""
                raise SessionError(f"engine {self.name}: receipt {want} does not fit rollout rank {rank}: {held}{why}")
        self._http.workers("admit", {"session": receipt.session}, deadline)
        self._http.post("/resume", deadline)
        if self.is_paused(deadline):
            raise RolloutError(f"engine {self.name}: answered /resume with success, but is still paused")

    def abort(self, session: str, reason: str, deadline: Deadline) -> None:
        """End `session` without commit. A paused engine stays paused, and describe() says why.

        An engine that was never paused keeps serving what it served.
        """
        self._verified = ""
        replies = self._http.workers("abort", {"session": session, "reason": reason}, deadline)
        if any(state["update_active"] for state in replies.values()):
            self._http.post("/finish_weight_update", deadline, {"weight_version": None})

    # -- beside the contract ---------------------------------------------------------------------------------------

    def state(self, deadline: Deadline) -> dict[int, dict[str, Any]]:
        """For each rank: update_active (vLLM's word), session, suspect, aborted (why), committed (receipt or None)."""
        return self._http.workers("state", {}, deadline)

    def aliases(self, deadline: Deadline) -> dict[int, dict[str, str]]:
        """For each rank, other names of live tensors that describe() lists once: alias -> listed name (tied weights)."""
        return {rank: reply["aliases"] for rank, reply in self._http.workers("describe", {}, deadline).items()}

    def inventory(self, expected: Mapping[int, Sequence[str]] | None, deadline: Deadline) -> dict[int, list[dict[str, Any]]]:
        """For each rank, every tensor that generation depends on (inventory.Entry as a dict). Nothing is changed.

        expected: for each rank the parameters that a plan writes; None: all parameters and persistent buffers.
        """
        by_rank = None if expected is None else {rank: {"expected": list(names)} for rank, names in expected.items()}
        replies = self._http.workers("inventory", self._beside, deadline, by_rank)
        return {rank: reply["entries"] for rank, reply in replies.items()}

    def generate(self, input_ids: Sequence[int], max_new_tokens: int, deadline: Deadline) -> list[int]:
        """Greedy continuation: exactly max_new_tokens token ids."""
        return self.generate_stamped(input_ids, max_new_tokens, deadline)[0]

    def generate_stamped(
        self, input_ids: Sequence[int], max_new_tokens: int, deadline: Deadline
    ) -> tuple[list[int], list[tuple[str, int, int]]]:
        """The tokens, and (version, first token, one past last) of every stretch that one weight version sampled.

        The version is the text that was stamped: "default" before the first commit.
        """
        sampling = {"temperature": 0, "max_tokens": max_new_tokens, "ignore_eos": True, "detokenize": False}
        body = {"token_ids": list(input_ids), "sampling_params": sampling}
        (choice,) = self._http.post("/inference/v1/generate", deadline, body)["choices"]
        tokens = list(choice["token_ids"])
        if len(tokens) != max_new_tokens:
            reason = choice.get("finish_reason")
            raise RolloutError(f"engine {self.name}: /inference/v1/generate gave {len(tokens)} of {max_new_tokens}: {reason}")
        return tokens, [(str(s["version"]), int(s["start"]), int(s["end"])) for s in choice["weight_versions"]]

    def load_from_disk(self, path: str, deadline: Deadline) -> None:
        """Load a checkpoint folder through the model's own load_weights: the reference a sync is compared with.

        Outside any session; a receipt given before is void after. The version is not changed. A running engine is paused
        (requests are aborted) and goes on afterwards, a paused one stays paused. If loading fails the weights are suspect
        and the engine stays paused.
        """
        was_paused = self.is_paused(deadline)
        if not was_paused:
            self._http.post("/pause", deadline, mode="abort")
        self._http.workers("load", {"path": path}, deadline)
        self._clear_cache(f"loading {path}", deadline)
        if not was_paused:
            self._http.post("/resume", deadline)

    def is_paused(self, deadline: Deadline) -> bool:
        return bool(self._http.get("/is_paused", deadline)["is_paused"])

    def version(self, deadline: Deadline) -> int:
        """-1 until a number was stamped: vLLM starts with the word "default"."""
        text = str(self._http.get("/weight_info", deadline)["weight_version"])
        return int(text) if text.isdecimal() else -1

    # -- pieces ----------------------------------------------------------------------------------------------------

    def _each(
        self, method: str, payload: Mapping[str, Any], by_rank: Mapping[int, Mapping[str, Any]], deadline: Deadline
    ) -> dict[int, dict[str, Any]]:
        world = int(self._http.get("/get_world_size", deadline, include_dp=False)["world_size"])
        wrong = sorted(set(by_rank) ^ set(range(world)))
        if wrong:
            raise SessionError(
                f"engine {self.name}: {method}() needs an entry for each of its {world} ranks and no other; "
                f"missing or unknown: {wrong}"
            )
        return self._http.workers(method, payload, deadline, by_rank)

    def _clear_cache(self, after: str, deadline: Deadline) -> None:
        # Neither a weight update nor a new version touches the prefix cache, whose KV is of the old weights; nor what an
        # encoder made of images, nor what a KV connector keeps elsewhere (vLLM refuses to reset one that is not there).
        external = any(state["kv_connector"] for state in self.state(deadline).values())
        parameters = {"reset_running_requests": True} | ({"reset_external": True} if external else {})
        cleared = self._http.post("/reset_prefix_cache", deadline, **parameters)
        if not cleared.get("success"):
            raise RolloutError(
                f"engine {self.name}: /reset_prefix_cache after {after} did not clear it: blocks are still in use, or the KV "
                "connector refused; new requests would continue from the old weights' KV"
            )
        self._http.post("/reset_encoder_cache", deadline)
