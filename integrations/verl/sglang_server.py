"""verl's SGLang server as an engine of a weight_sync job."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from verl.workers.rollout.sglang_rollout.async_sglang_server import SGLangHttpServer

from weight_sync.ids import Deadline
from weight_sync_integrations.sglang.client import Workers
from weight_sync_integrations.sglang.launch import WorkerAddress
from weight_sync_integrations.sglang.plugin import TOKEN_VARIABLE
from weight_sync_integrations.sglang.worker import BIND_VARIABLE, RENDEZVOUS_VARIABLE, TRANSPORT_VARIABLE
from weight_sync_integrations.verl.job import settings_from
from weight_sync_integrations.verl.plugin import BACKEND
from weight_sync_integrations.verl.servers import address, require_verified, url_of


class WeightSyncSglangServer(SGLangHttpServer):
    """weight_sync_token: set by servers.remote_class."""

    weight_sync_token: str

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        settings = settings_from(config.checkpoint_engine.engine_kwargs[BACKEND])
        super().__init__(config, *args, **kwargs)
        self._seconds = settings.sync.timeouts.abort
        self._rendezvous = tempfile.TemporaryDirectory(prefix="weight-sync-")
        os.environ[TOKEN_VARIABLE] = self.weight_sync_token
        os.environ[TRANSPORT_VARIABLE] = json.dumps(settings.transport)
        os.environ[RENDEZVOUS_VARIABLE] = self._rendezvous.name
        os.environ[BIND_VARIABLE] = self._server_address
        given = self.config.engine_kwargs.setdefault("sglang", {})
        # verl turns the memory saver on, whose memory a transport cannot register. Whoever sets it by hand is refused at bind.
        given.setdefault("enable_memory_saver", False)

    async def resume_generation(self) -> None:
        """verl's, refused while this engine holds bytes that nobody has verified."""
        if self.node_rank == 0:
            require_verified(self.replica_rank, await asyncio.to_thread(self._states))
        await super().resume_generation()

    def _states(self) -> list[dict[str, Any]]:
        """What the workers on all nodes say, each asked for itself. Not on the event loop: this server answers address()."""
        found = address("sglang", self.replica_rank, self._seconds)
        workers = Workers(found["name"], [WorkerAddress(*place) for place in found["workers"]], self.weight_sync_token)
        try:
            return list(workers.all("state", {}, Deadline.after(self._seconds)).values())
        finally:
            workers.close()

    async def weight_sync_address(self) -> dict[str, Any]:
        """This node's part of what servers.address() answers. Goes through Ray only."""
        found = [json.loads(file.read_text()) for file in sorted(Path(self._rendezvous.name).glob("rank-*.json"))]
        workers = [[entry["rank"], entry["host"], entry["port"]] for entry in found]
        name = f"sglang-{self.replica_rank}"
        url = url_of(*self.get_server_address()) if self.node_rank == 0 else ""  # the other nodes serve no HTTP
        return {"name": name, "url": url, "workers": workers, "token": self.weight_sync_token, "nodes": self.nnodes}
