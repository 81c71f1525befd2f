"""Inference servers as Ray actors: an actor sits where the server shall run, starts it and ends it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from weight_sync.errors import ConfigError
from weight_sync.ids import Deadline


class EngineActor:
    """Owns one server process tree. The tree ends with stop(), or with the actor's process."""

    def __init__(self) -> None:
        self._server: Any = None

    def start(self, kind: str, spec: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """Start a server of `kind` and wait until it is ready. spec: ServerSpec's fields; host "auto" is this node's address.

        Returns {"name", "url", "workers"}: what the engine adapter needs.
        """
        values = dict(spec)
        if values.get("host") == "auto":
            import ray

            values["host"] = ray.util.get_node_ip_address()
        deadline = Deadline.after(seconds)
        if kind == "sglang":
            from weight_sync_integrations.sglang import launch as sglang

            values["worker_host"] = values["host"]
            self._server = sglang.start(_spec(sglang.ServerSpec, kind, values), deadline)
            workers = [[w.rank, w.host, w.port] for w in self._server.workers]
            return {"name": self._server.name, "url": self._server.url, "workers": workers}
        if kind == "vllm":
            from weight_sync_integrations.vllm import launch as vllm

            del values["attn_dp"]
            self._server = vllm.start(_spec(vllm.ServerSpec, kind, values), deadline)
            return {"name": self._server.name, "url": self._server.url, "workers": []}
        raise ConfigError(f"rollout.kind={kind!r}: must be sglang or vllm")

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop()
            self._server = None

    def tail(self) -> str:
        return "" if self._server is None else self._server.tail()


def connect_engine(kind: str, started: Mapping[str, Any], token: str, **beside: Any) -> Any:
    """The RolloutEngine adapter for a server that an EngineActor started. beside: its draft and declare."""
    if kind == "sglang":
        from weight_sync_integrations.sglang.engine import SglangEngine
        from weight_sync_integrations.sglang.launch import WorkerAddress

        workers = [WorkerAddress(rank, host, port) for rank, host, port in started["workers"]]
        return SglangEngine(started["name"], started["url"], workers, token, **beside)
    from weight_sync_integrations.vllm.engine import VllmEngine

    return VllmEngine(started["name"], started["url"], token, **beside)


def read_config(folder: str) -> dict[str, Any]:
    """A checkpoint's HF config, after checking that the folder is complete.

    Raises ConfigError for a missing folder, a missing or broken config.json, no weights, or a truncated safetensors file.
    """
    path = Path(folder)
    if not path.is_dir():
        raise ConfigError(f"model.path={folder}: no such folder")
    try:
        config = json.loads((path / "config.json").read_text())
    except FileNotFoundError:
        raise ConfigError(f"model.path={folder}: no config.json in it") from None
    except ValueError as error:
        raise ConfigError(f"model.path={folder}: config.json is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"model.path={folder}: config.json must hold an object, not {type(config).__name__}")
    files = sorted(path.glob("*.safetensors"))
    index = path / "model.safetensors.index.json"
    if index.is_file():
        try:
            wanted = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{index}: no index of a checkpoint: {type(error).__name__}: {error}") from None
        if missing := [name for name in wanted if not (path / name).is_file()]:
            raise ConfigError(f"model.path={folder}: the index names {', '.join(missing)}, which are not there")
    if not files:
        raise ConfigError(f"model.path={folder}: no *.safetensors in it")
    for file in files:
        check_safetensors(file)
    return config


def check_safetensors(file: Path) -> None:
    """Raise ConfigError unless the file is as long as its header says (format: 8-byte length, JSON header, data)."""
    size = file.stat().st_size
    with file.open("rb") as handle:
        length = int.from_bytes(handle.read(8), "little")
        if size < 8 or length > size - 8:
            raise ConfigError(f"{file}: truncated: {size} bytes, its header alone needs {8 + length}")
        try:
            header = json.loads(handle.read(length))
            end = max((int(entry["data_offsets"][1]) for name, entry in header.items() if name != "__metadata__"), default=0)
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise ConfigError(f"{file}: not a safetensors file: {type(error).__name__}: {error}") from None
    if size != 8 + length + end:
        raise ConfigError(f"{file}: {size} bytes, but its header describes {8 + length + end}: truncated or damaged")


def _spec(made_by: Any, kind: str, values: Mapping[str, Any]) -> Any:
    known = {field.name for field in fields(made_by)}
    if unknown := sorted(set(values) - known):
        raise ConfigError(f"rollout.options: {kind} servers have no {', '.join(unknown)}; there are {', '.join(sorted(known))}")
    return made_by(**values)
