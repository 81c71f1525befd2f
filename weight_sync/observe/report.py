"""The run on disk: outputs/<run>/report.json, spans.jsonl, and the link outputs/latest.

report.json is written when the run begins and again after every sync, each time whole, beside its place and then renamed
over it: whoever reads it, also after a crash, reads a complete account of what had happened by then.

    strategy            the strategy asked for
    committed_version   the version the rollout side holds, -1 if it never got one
    syncs               one entry a sync: version, bytes, gathered_bytes, seconds, phases {name: seconds}, verified,
                        tokens_match, and the other fields of SyncRecord.to_json()
    error               null, or what the run stands failed with; a later sync that commits clears it
    format, run, started, updated, finished, about
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from weight_sync.errors import ConfigError
from weight_sync.observe.records import Span, SyncRecord

FORMAT = 1
REPORT, SPANS, LATEST = "report.json", "spans.jsonl", "latest"


class Report:
    """One run's report. One process writes it.

    root: the outputs folder, made if absent. run: the folder's name, by default time and process id.
    committed_version: what the rollout side holds before the first sync. about: anything that tells runs apart
    (configuration, hosts, software versions); values JSON does not know are stored as text.

    Raises ConfigError if the folder already holds a report, if `run` is not one plain folder name, or if `latest` is
    something that is not a link.
    """

    def __init__(
        self,
        root: Path | str,
        *,
        strategy: str,
        run: str | None = None,
        committed_version: int = -1,
        about: dict[str, Any] | None = None,
    ) -> None:
        name = run if run is not None else f"{datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}"
        if name in ("", ".", "..", LATEST) or Path(name).name != name:
            raise ConfigError(
                f"run name {name!r}: must be one folder name, and not {LATEST!r}, which is the link to the newest run"
            )
        self.run = name
        self.strategy = strategy
        self.directory = Path(root) / name
        self.path = self.directory / REPORT
        self.spans_path = self.directory / SPANS
        if self.path.exists():
            raise ConfigError(f"{self.path} exists: a run never overwrites another run's report, choose another run name")
        self._before = committed_version
        self._about: dict[str, Any] = json.loads(json.dumps(about or {}, default=str))
        self._syncs: list[SyncRecord] = []
        self._error: str | None = None
        self._finished = False
        self._started = time.time()
        self.directory.mkdir(parents=True, exist_ok=True)
        self._write()
        replace_link(Path(root) / LATEST, name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            self.fail(error)
        self.close()

    @property
    def records(self) -> tuple[SyncRecord, ...]:
        return tuple(self._syncs)

    @property
    def committed_version(self) -> int:
        return next((record.version for record in reversed(self._syncs) if record.committed), self._before)

    def add(self, record: SyncRecord, spans: Iterable[Span] = ()) -> None:
        """Append a sync, spans first, so that no report names a sync whose spans are missing.

        A later record of the same sync replaces the earlier one in place (after tokens were compared, say); its spans,
        already on disk, are then not given again.
        """
        lines = [
            json.dumps({"version": record.version, "session": record.session, **span.to_json()}, allow_nan=False)
            for span in spans
        ]
        if lines:
            with self.spans_path.open("a", encoding="utf-8") as file:
                file.write("".join(line + "\n" for line in lines))
        known = next((i for i, other in enumerate(self._syncs) if other.identity == record.identity), None)
        if known is None:
            self._syncs.append(record)
            self._error = record.error
        else:
            self._syncs[known] = record
        self._write()

    def fail(self, error: BaseException | str) -> None:
        """Note why the run failed, where no sync's own record says it better. The first reason stays."""
        if self._error is None:
            self._error = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        self._write()

    def note(self, **about: Any) -> None:
        """Add to `about`."""
        self._about.update(json.loads(json.dumps(about, default=str)))
        self._write()

    def close(self) -> None:
        """The run ended in an orderly way, well or badly. Without this call the report keeps finished = false."""
        self._finished = True
        self._write()

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "run": self.run,
            "strategy": self.strategy,
            "committed_version": self.committed_version,
            "syncs": [record.to_json() for record in self._syncs],
            "error": self._error,
            "finished": self._finished,
            "started": self._started,
            "updated": time.time(),
            "about": self._about,
        }

    def _write(self) -> None:
        write_atomic(self.path, json.dumps(self.to_json(), indent=2, allow_nan=False) + "\n")


def write_atomic(path: Path, text: str) -> None:
    """Replace `path` by `text`, so that no reader and no crash ever sees half of it. OSError leaves `path` as it was."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with draft.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())  # otherwise a power cut can leave the new name on an empty file
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def replace_link(link: Path, target: str) -> None:
    """Point `link` at `target`, a name beside it, in one step. Raises ConfigError if `link` is not a link."""
    if link.exists() and not link.is_symlink():
        raise ConfigError(f"{link} is not a symbolic link: move it away, its place is needed for the link to the newest run")
    draft = link.with_name(f".{link.name}.{secrets.token_hex(4)}")
    draft.symlink_to(target)
    try:
        draft.replace(link)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
