"""All observers behind one call: what a training loop leaves behind, in good runs and bad ones."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from weight_sync.errors import ConfigError, SessionError, VerifyError
from weight_sync.observe.observer import Observer, open_observer
from weight_sync.observe.recorder import SpanLog


def open_quiet(root: Path, stream: io.StringIO, **options: object) -> Observer:
    return open_observer(root, strategy="memory", run="run", wandb_mode="disabled", stream=stream, **options)  # type: ignore[arg-type]


def read(root: Path) -> dict:
    return json.loads((root / "latest" / "report.json").read_text())


def one_sync(observer: Observer, version: int, *, corrupt: bool = False) -> None:
    with observer.sync(version, f"session {version}", nbytes=2_000_000) as recorder:
        with recorder.phase("pause"):
            pass
        with recorder.phase("write"):
            for rank in range(2):
                log = SpanLog(f"trainer {rank}")
                with log.span("write", nbytes=1_000_000):
                    observer.on_bytes(log.rank, 1_000_000, 1_000_000)
                recorder.add_spans(log.rank, log.take())
        with recorder.phase("verify"):
            if corrupt:
                raise VerifyError("layer 0 differs")
            recorder.mark_verified()
        with recorder.phase("commit"):
            recorder.mark_committed()
        with recorder.phase("resume"):
            pass


def test_three_good_syncs_leave_report_spans_pictures_lines_and_table(tmp_path: Path) -> None:
    stream = io.StringIO()
    with open_quiet(tmp_path, stream, config={"tp": 2}, limit=1e9) as observer:
        for version in (1, 2, 3):
            one_sync(observer, version)
            observer.tokens_match(True)
        observer.step_seconds(60.0)
        observer.print_table()
    data = read(tmp_path)
    assert (data["committed_version"], data["error"], data["finished"]) == (3, None, True)
    assert data["about"]["config"] == {"tp": 2}
    assert [(s["bytes"], s["verified"], s["tokens_match"]) for s in data["syncs"]] == [(2_000_000, True, True)] * 3
    assert data["syncs"][0]["bubble_share"] is None
    assert 0 < data["syncs"][2]["bubble_share"] < 1
    assert len((tmp_path / "run" / "spans.jsonl").read_text().splitlines()) == 3 * 7
    assert sorted(path.name for path in (tmp_path / "run").glob("*.svg")) == [f"timeline-{v}.svg" for v in (1, 2, 3)]
    text = stream.getvalue()
    assert "\x1b" not in text
    assert text.count(": committed, verified, 2.00 MB in ") == 3
    assert text.count("total (verified)") == 3
    assert "3 syncs" in text


def test_a_failing_sync_raises_its_own_error_and_is_on_disk_by_then(tmp_path: Path) -> None:
    stream = io.StringIO()
    on_disk: list[dict] = []

    def run() -> None:
        with open_quiet(tmp_path, stream) as observer:
            one_sync(observer, 1)
            try:
                one_sync(observer, 2, corrupt=True)
            finally:
                on_disk.append(read(tmp_path))

    with pytest.raises(VerifyError, match="layer 0 differs"):
        run()
    assert on_disk[0]["finished"] is False
    for data in (on_disk[0], read(tmp_path)):
        assert data["committed_version"] == 1
        assert data["error"] == "verify: VerifyError: layer 0 differs"
        assert [sync["verified"] for sync in data["syncs"]] == [True, False]
    assert "version 2: failed after" in stream.getvalue()


def test_a_full_disk_does_not_hide_why_the_sync_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    observer = open_quiet(tmp_path, io.StringIO())

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(observer.report, "add", full)
    with pytest.raises(VerifyError) as caught:
        one_sync(observer, 1, corrupt=True)
    assert any("No space left" in note for note in caught.value.__notes__)
    with pytest.raises(OSError, match="No space"):
        one_sync(observer, 2)


def test_tokens_cannot_match_before_a_sync(tmp_path: Path) -> None:
    with pytest.raises(SessionError, match="no sync"):
        open_quiet(tmp_path, io.StringIO()).tokens_match(True)


def test_a_refused_option_leaves_a_closed_report_that_says_why(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="slime"):
        open_quiet(tmp_path, io.StringIO(), keys="slime")
    assert "slime" in read(tmp_path)["error"]
    assert read(tmp_path)["finished"] is True
