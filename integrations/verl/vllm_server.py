"""verl's vLLM server as an engine of a weight_sync job: its hooks, and where it is."""

from __future__ import annotations

import json
import os
from typing import Any

from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer

from weight_sync.errors import ConfigError
from weight_sync_integrations.verl.job import settings_from
from weight_sync_integrations.verl.plugin import BACKEND
from weight_sync_integrations.verl.servers import require_verified, url_of
from weight_sync_integrations.vllm.plugin import BACKEND as TRANSFER
from weight_sync_integrations.vllm.plugin import TOKEN_VARIABLE
from weight_sync_integrations.vllm.transport import TRANSPORT_VARIABLE

EXTENSION = "weight_sync_integrations.verl.vllm_worker.Extension"


class WeightSyncVllmServer(vLLMHttpServer):
    """weight_sync_token: set by servers.remote_class."""

    weight_sync_token: str

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        settings = settings_from(config.checkpoint_engine.engine_kwargs[BACKEND])
        # Before anything of vLLM starts: its processes inherit them, and its plug-ins look for the token.
        os.environ[TOKEN_VARIABLE] = self.weight_sync_token
        os.environ[TRANSPORT_VARIABLE] = json.dumps(settings.transport)
        os.environ["VLLM_SERVER_DEV_MODE"] = "1"  # the control routes
        super().__init__(config, *args, **kwargs)

    def _get_worker_extension_cls(self) -> str:
        return EXTENSION

    def _preprocess_engine_kwargs(self, engine_kwargs: dict[str, Any]) -> None:
        super()._preprocess_engine_kwargs(engine_kwargs)
        taken = {key: engine_kwargs[key] for key in ("worker_extension_cls", "weight_transfer_config") if key in engine_kwargs}
        if taken:
            raise ConfigError(f"rollout.engine_kwargs.vllm: weight_sync sets {', '.join(taken)} itself; remove {taken}")
        engine_kwargs["weight_transfer_config"] = {"backend": TRANSFER}

    async def resume_engine_generation(self) -> None:
        """verl's, refused while this engine holds bytes that nobody has verified."""
        if self.node_rank == 0:
            request = json.dumps({"method": "state", "payload": {}})
            replies = await self.engine.collective_rpc("weight_sync_call", args=(self.weight_sync_token, request))
            states = [json.loads(reply) for reply in replies]
            silent = {"suspect": True, "aborted": ""}
            require_verified(self.replica_rank, [{**(s["reply"] if s["ok"] else silent), "rank": s["rank"]} for s in states])
        await super().resume_engine_generation()

    async def weight_sync_address(self) -> dict[str, Any]:
        """What servers.address() answers. Goes through Ray only."""
        url = url_of(*self.get_server_address())
        return {"name": f"vllm-{self.replica_rank}", "url": url, "workers": [], "token": self.weight_sync_token, "nodes": 1}
