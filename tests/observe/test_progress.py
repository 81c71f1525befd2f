"""Bars on a real pseudo-terminal, plain lines everywhere else."""

from __future__ import annotations

import io
import os
import re
import threading
from collections.abc import Callable

import pytest
from observe_support import Clock, failed_record, record

from weight_sync.observe.progress import LineProgress, LiveProgress, SyncProgress, open_progress
from weight_sync.observe.recorder import Recorder

ESCAPE = "\x1b"


def test_without_a_terminal_there_is_one_plain_line_per_phase_and_one_outcome() -> None:
    stream, clock = io.StringIO(), Clock()
    progress = LineProgress(stream, clock=clock)
    progress.begin(3, nbytes=4_000_000_000)
    recorder = Recorder(3, "s", on_phase=progress.on_phase, clock=clock, wall=Clock())
    with recorder:
        with recorder.phase("pause"):
            clock.tick(0.125)
        with recorder.phase("write"):
            for done in (0, 500_000_000, 1_500_000_000):
                progress.on_bytes("trainer 0", done, 1_500_000_000)
                progress.on_bytes("trainer 1", done, 2_500_000_000)
            progress.on_bytes("trainer 1", 2_500_000_000, 2_500_000_000)
            clock.tick(2.0)
        with recorder.phase("verify"):
            clock.tick(0.5)
        recorder.count(bytes=4_000_000_000)
        recorder.mark_verified()
        recorder.mark_committed()
    progress.end(recorder.record())
    assert stream.getvalue().splitlines() == [
        "version 3: pause 125.0 ms",
        "version 3: write 2.000 s, 4.00 GB from 2 ranks, 2.00 GB/s",
        "version 3: verify 500.0 ms",
        "version 3: committed, verified, 4.00 GB in 2.625 s, 1.52 GB/s over the sync",
    ]


def test_a_stream_that_is_no_terminal_gets_lines_without_escape_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    stream = io.StringIO()
    progress = open_progress(stream)
    progress.begin(1)
    progress.on_phase("write")
    progress.on_bytes("trainer 0", 1, 2)
    progress.end(record())
    progress.close()
    assert isinstance(progress, LineProgress)
    assert ESCAPE not in stream.getvalue()
    assert "\r" not in stream.getvalue()


def test_staging_rounds_of_the_same_phase_stay_one_line() -> None:
    stream, clock = io.StringIO(), Clock()
    progress = LineProgress(stream, clock=clock)
    progress.begin(1)
    for _ in range(3):
        progress.on_phase("write")
        clock.tick(1.0)
    progress.on_phase("verify")
    assert stream.getvalue() == "version 1: write 3.000 s\n"


def test_a_failed_sync_ends_with_its_error_and_claims_no_finished_phase() -> None:
    stream = io.StringIO()
    progress = LineProgress(stream)
    progress.begin(2)
    progress.on_phase("write")
    progress.end(failed_record(2))
    assert stream.getvalue() == "version 2: failed after 1.500 s: write: OSError: endpoint 10.0.0.1:5 refused\n"


@pytest.mark.parametrize(("done", "total"), [(3, 2), (-1, 2)])
def test_impossible_byte_counts_are_refused(done: int, total: int) -> None:
    progress = LineProgress(io.StringIO())
    progress.begin(1)
    with pytest.raises(ValueError, match="trainer 0"):
        progress.on_bytes("trainer 0", done, total)


def test_reports_from_many_threads_lose_nothing_and_never_run_backwards() -> None:
    stream, clock = io.StringIO(), Clock()
    progress = LineProgress(stream, clock=clock)
    progress.begin(1)
    progress.on_phase("write")

    def send(rank: int) -> None:
        for done in (10, 1000, 500):  # the last report is a late one
            progress.on_bytes(f"trainer {rank}", done, 1000)

    threads = [threading.Thread(target=send, args=(rank,)) for rank in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=10)
    clock.tick(1.0)
    progress.on_phase("verify")
    assert stream.getvalue() == "version 1: write 1.000 s, 16.00 KB from 16 ranks, 16.00 KB/s\n"


def on_a_terminal(drive: Callable[[SyncProgress], None], monkeypatch: pytest.MonkeyPatch) -> str:
    """Everything that reaches a real pseudo-terminal while `drive` runs."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("LINES", "40")
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    master, slave = os.openpty()
    seen: list[bytes] = []

    def read() -> None:
        while True:
            try:
                chunk = os.read(master, 65536)
            except OSError:  # EIO: the last writer closed the terminal
                return
            if not chunk:
                return
            seen.append(chunk)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    with os.fdopen(slave, "w", encoding="utf-8") as stream:
        progress = open_progress(stream)
        assert isinstance(progress, LiveProgress)
        drive(progress)
        progress.close()
    reader.join(timeout=10)
    os.close(master)
    return b"".join(seen).decode()


def refresh(progress: SyncProgress) -> None:
    assert isinstance(progress, LiveProgress)
    progress._bars.refresh()


def test_a_terminal_shows_phase_bytes_rate_and_a_bar_for_each_of_few_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def drive(progress: SyncProgress) -> None:
        progress.begin(1, nbytes=4_000_000_000)
        progress.on_phase("pause")
        refresh(progress)
        progress.on_phase("write")
        progress.on_bytes("trainer 0", 500_000_000, 1_000_000_000)
        progress.on_bytes("trainer 1", 1_000_000_000, 3_000_000_000)
        refresh(progress)
        progress.end(record())

    text = on_a_terminal(drive, monkeypatch)
    assert ESCAPE in text
    assert "version 1  pause" in text
    assert "version 1  write" in text
    assert "1.50 GB / 4.00 GB" in text
    assert re.search(r"1\.50 GB / 4\.00 GB  [\d.]+ [KMGT]?B/s", text)
    assert "trainer 0" in text
    assert "1.00 GB / 3.00 GB" in text
    assert text.rstrip().endswith("version 1: committed, verified, 4.00 GB in 3.500 s, 1.14 GB/s over the sync")


def test_more_than_eight_ranks_fold_into_one_bar_that_names_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    def drive(progress: SyncProgress) -> None:
        progress.begin(1)
        progress.on_phase("write")
        for rank in range(12):
            progress.on_bytes(f"trainer {rank}", 100 if rank == 5 else 900, 1000)
        refresh(progress)
        progress.on_phase("verify")
        refresh(progress)

    text = on_a_terminal(drive, monkeypatch)
    assert "12 ranks, last is trainer 5" in text
    after = text[text.rindex("12 ranks") :]
    assert "version 1  verify" in after
    assert "trainer 5" not in after.split("version 1  verify")[1]


def test_a_terminal_is_usable_again_after_a_sync_that_never_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def drive(progress: SyncProgress) -> None:
        progress.begin(1)
        progress.on_phase("write")
        refresh(progress)

    text = on_a_terminal(drive, monkeypatch)
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1, "the cursor is shown again"
