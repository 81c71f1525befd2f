"""The run on disk: complete after every sync, never half-written."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
from observe_support import failed_record, record, recorded

from weight_sync.errors import ConfigError
from weight_sync.observe.report import Report, write_atomic


def read(root: Path) -> dict:
    return json.loads((root / "latest" / "report.json").read_text())


def test_the_report_holds_the_agreed_keys_after_three_syncs(tmp_path: Path) -> None:
    with Report(tmp_path, strategy="p2p_tcp", run="demo", about={"hosts": ["a"], "path": Path("x")}) as report:
        for version in (1, 2, 3):
            report.add(record(version).with_tokens_match(True))
    data = read(tmp_path)
    assert data["strategy"] == "p2p_tcp"
    assert data["committed_version"] == 3
    assert data["error"] is None
    assert data["finished"] is True
    assert data["about"] == {"hosts": ["a"], "path": "x"}
    assert [sync["version"] for sync in data["syncs"]] == [1, 2, 3]
    for sync in data["syncs"]:
        assert {"version", "bytes", "gathered_bytes", "seconds", "phases", "verified", "tokens_match"} <= sync.keys()
        assert (sync["bytes"], sync["gathered_bytes"], sync["verified"], sync["tokens_match"]) == (4_000_000_000, 0, True, True)
        assert sync["phases"]["write"] == 2.0


def test_a_run_that_has_not_synced_yet_already_has_a_truthful_report(tmp_path: Path) -> None:
    Report(tmp_path, strategy="disk", committed_version=7)
    data = read(tmp_path)
    assert (data["syncs"], data["committed_version"], data["error"], data["finished"]) == ([], 7, None, False)


def test_a_failed_sync_leaves_the_version_where_it_was_and_its_error_in_the_report(tmp_path: Path) -> None:
    report = Report(tmp_path, strategy="p2p_tcp")
    report.add(record(1))
    report.add(failed_record(2))
    data = read(tmp_path)
    assert data["committed_version"] == 1
    assert data["error"] == data["syncs"][1]["error"] == "write: OSError: endpoint 10.0.0.1:5 refused"
    assert data["syncs"][1]["verified"] is False
    report.add(record(2, session="again", started=3000.0))
    assert (read(tmp_path)["error"], read(tmp_path)["committed_version"]) == (None, 2)
    assert len(read(tmp_path)["syncs"]) == 3


def test_a_retry_under_the_same_session_name_does_not_erase_the_failure(tmp_path: Path) -> None:
    report = Report(tmp_path, strategy="p2p_tcp")
    report.add(failed_record(2))
    report.add(record(2, session="failed2", started=3000.0))
    assert [sync["error"] is None for sync in read(tmp_path)["syncs"]] == [False, True]


def test_completing_a_record_replaces_it_in_place(tmp_path: Path) -> None:
    report = Report(tmp_path, strategy="p2p_tcp")
    first = record(1)
    report.add(first)
    report.add(record(2))
    report.add(first.with_tokens_match(False))
    assert [(s["version"], s["tokens_match"]) for s in read(tmp_path)["syncs"]] == [(1, False), (2, None)]
    assert read(tmp_path)["committed_version"] == 2


def test_an_exception_between_syncs_is_the_runs_error(tmp_path: Path) -> None:
    def run() -> None:
        with Report(tmp_path, strategy="p2p_tcp") as report:
            report.add(record(1))
            raise RuntimeError("trainer died")

    with pytest.raises(RuntimeError, match="trainer died"):
        run()
    assert read(tmp_path)["error"] == "RuntimeError: trainer died"


def test_spans_are_appended_one_json_line_each(tmp_path: Path) -> None:
    report = Report(tmp_path, strategy="p2p_tcp")
    for version in (1, 2):
        made = recorded(version, session=f"s{version}")
        report.add(made.record(), made.spans)
        report.add(made.record().with_tokens_match(True))
    lines = [json.loads(line) for line in (tmp_path / "latest" / "spans.jsonl").read_text().splitlines()]
    assert len(lines) == 2 * (7 + 2)
    mine = [line for line in lines if line["version"] == 2 and line["rank"] == "trainer 0"]
    assert mine == [
        {
            "version": 2,
            "session": "s2",
            "rank": "trainer 0",
            "phase": "write",
            "start": 7.0,
            "end": 9.0,
            "wall": 1000.375,
            "nbytes": 3_000_000_000,
        }
    ]


def test_latest_always_points_at_the_newest_run_by_a_relative_link(tmp_path: Path) -> None:
    for run in ("one", "two"):
        Report(tmp_path, strategy="p2p_tcp", run=run)
        assert os.readlink(tmp_path / "latest") == run
    tmp_path.joinpath("latest").unlink()
    tmp_path.joinpath("latest").symlink_to("gone")
    Report(tmp_path, strategy="p2p_tcp", run="three")
    assert read(tmp_path)["run"] == "three"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "one", "three", "two"], "no draft is left behind"


def test_what_stands_in_the_way_is_refused_and_left_alone(tmp_path: Path) -> None:
    Report(tmp_path, strategy="p2p_tcp", run="one")
    with pytest.raises(ConfigError, match="choose another run name"):
        Report(tmp_path, strategy="p2p_tcp", run="one")
    for name in ("latest", "a/b", "..", ""):
        with pytest.raises(ConfigError, match="one folder name"):
            Report(tmp_path, strategy="p2p_tcp", run=name)
    other = tmp_path / "other"
    (other / "latest").mkdir(parents=True)
    (other / "latest" / "precious").touch()
    with pytest.raises(ConfigError, match="not a symbolic link"):
        Report(other, strategy="p2p_tcp", run="one")
    assert (other / "latest" / "precious").exists()


def test_a_write_that_fails_leaves_the_old_text_and_no_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "report.json"
    write_atomic(target, "old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_atomic(target, "new")
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_a_reader_never_sees_half_a_report(tmp_path: Path) -> None:
    report = Report(tmp_path, strategy="p2p_tcp")
    stop = threading.Event()
    seen: list[int] = []
    broken: list[str] = []

    def poll() -> None:
        while not stop.is_set():
            text = report.path.read_text()
            try:
                seen.append(len(json.loads(text)["syncs"]))
            except ValueError:
                broken.append(text)

    reader = threading.Thread(target=poll)
    reader.start()
    for version in range(1, 41):
        report.add(record(version, session=f"s{version}", started=float(version)))
    stop.set()
    reader.join(timeout=20)
    assert broken == []
    assert seen == sorted(seen)


def test_a_killed_process_leaves_every_sync_it_had_finished(tmp_path: Path) -> None:
    program = textwrap.dedent(
        """
        import os, signal, sys
        from pathlib import Path
        from observe_support import record
        from weight_sync.observe.report import Report
        report = Report(Path(sys.argv[1]), strategy="p2p_tcp", run="killed")
        report.add(record(1)); report.add(record(2))
        os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
        timeout=60,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL
    data = read(tmp_path)
    assert (data["committed_version"], len(data["syncs"]), data["finished"]) == (2, 2, False)
