"""Everything a training loop holds to observe its syncs: progress, report, spans, timeline and wandb behind one call.

with open_observer(...) as observer:
    for version in ...:
        with observer.sync(version, session, nbytes=plan_bytes) as recorder:
            ...                                     # phases, spans, counts; observer.on_bytes for progress
        observer.tokens_match(same)                 # once generations were compared
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from rich.console import Console

from weight_sync.errors import SessionError
from weight_sync.observe.progress import SyncProgress, open_progress
from weight_sync.observe.recorder import Recorder
from weight_sync.observe.records import SyncRecord
from weight_sync.observe.report import Report
from weight_sync.observe.table import table, table_text
from weight_sync.observe.timeline import write_timeline
from weight_sync.observe.wandb_sink import WandbMode, WandbSink, open_wandb


class Observer:
    """Feeds one run's syncs to all observers. limit: bytes per second the wire can do, None if unknown."""

    def __init__(
        self,
        report: Report,
        progress: SyncProgress,
        wandb: WandbSink,
        *,
        limit: float | None = None,
        stream: TextIO | None = None,
    ) -> None:
        self.report = report
        self.progress = progress
        self.wandb = wandb
        self._limit = limit
        self._stream = stream
        self._last: SyncRecord | None = None
        self._failed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            self._failed = True
            self.report.fail(error)
        self.close()

    @contextmanager
    def sync(self, version: int, session: str, *, nbytes: int | None = None) -> Iterator[Recorder]:
        """Observe one sync. Its record is on disk before an exception of the block goes on its way.

        Should recording a failed sync fail as well (a full disk), the sync's own exception still is the one raised, with
        a note about the other.
        """
        recorder = Recorder(version, session, limit=self._limit, on_phase=self.progress.on_phase, on_say=self.progress.say)
        self.progress.begin(version, nbytes)
        try:
            with recorder:
                yield recorder
        except BaseException as error:
            try:
                self._publish(recorder)
            except OSError as second:
                error.add_note(f"and the failed sync could not be recorded: {type(second).__name__}: {second}")
            raise
        self._publish(recorder)

    def on_bytes(self, rank: str, done: int, total: int) -> None:
        """A source rank's progress, for the bars. Callable from any thread."""
        self.progress.on_bytes(rank, done, total)

    def tokens_match(self, match: bool) -> SyncRecord:
        """Complete the last sync's record everywhere, after generations were compared."""
        return self._amend(self._latest("tokens_match").with_tokens_match(match))

    def step_seconds(self, seconds: float) -> SyncRecord:
        """Complete the last sync's record everywhere, after the training step it belongs to ended."""
        return self._amend(self._latest("step_seconds").with_step_seconds(seconds))

    def print_table(self) -> None:
        """The table over all syncs so far: coloured on a terminal, plain elsewhere."""
        stream = sys.stdout if self._stream is None else self._stream
        if stream.isatty():
            Console(file=stream).print(table(self.report.records))
        else:
            stream.write(table_text(self.report.records))
            stream.flush()

    def close(self) -> None:
        """End all observers. The table is the caller's to print."""
        self.progress.close()
        self.wandb.close(failed=self._failed)
        self.report.close()

    def _publish(self, recorder: Recorder) -> None:
        record = self._last = recorder.record()
        self._failed = record.error is not None
        self.progress.end(record)
        self.report.add(record, recorder.spans)  # before the rest: what is on disk survives whatever happens next
        if recorder.spans:
            write_timeline(self.report.directory, record, recorder.spans)
        self.wandb.log(record)

    def _amend(self, record: SyncRecord) -> SyncRecord:
        self._last = record
        self.report.add(record)
        self.wandb.log(record)
        return record

    def _latest(self, verb: str) -> SyncRecord:
        if self._last is None:
            raise SessionError(f"{verb}: no sync was observed yet")
        return self._last


def open_observer(
    root: Path | str,
    *,
    strategy: str,
    run: str | None = None,
    committed_version: int = -1,
    config: Mapping[str, Any] | None = None,
    limit: float | None = None,
    wandb_mode: WandbMode = "offline",
    wandb_project: str = "weight_sync",
    keys: str | Iterable[str] = (),
    stream: TextIO | None = None,
) -> Observer:
    """Make the run's folder and everything in it. config is stored in the report (under about.config) and in wandb.

    Raises ConfigError for whatever Report and open_wandb refuse; nothing is left open then.
    """
    report = Report(root, strategy=strategy, run=run, committed_version=committed_version, about={"config": dict(config or {})})
    try:
        sink = open_wandb(
            wandb_mode,
            directory=report.directory,
            project=wandb_project,
            name=report.run,
            config={"strategy": strategy, **(config or {})},
            keys=keys,
        )
    except BaseException as error:
        report.fail(error)
        report.close()
        raise
    return Observer(report, open_progress(stream), sink, limit=limit, stream=stream)
