"""A real offline wandb run, read back from its file; and the doors that stay shut."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from observe_support import failed_record, record
from wandb_file import contents

from weight_sync.errors import ConfigError, SessionError
from weight_sync.observe import wandb_sink
from weight_sync.observe.metrics import metrics
from weight_sync.observe.records import PHASES
from weight_sync.observe.wandb_sink import logged_in, open_wandb, panels


@pytest.fixture(autouse=True)
def _no_login(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whoever runs the tests may be logged in; the tests never are."""
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_DIR", "WANDB_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("HOME", str(tmp_path))


def test_an_offline_run_can_be_read_back_with_metrics_config_and_summary(tmp_path: Path) -> None:
    sink = open_wandb(directory=tmp_path / "new", config={"strategy": "p2p_tcp"}, keys=["verl", "miles"])
    assert sink.mode == "offline"
    first, second = record(1), record(2)
    sink.log(first)
    sink.log(first.with_tokens_match(True))
    sink.log(second)
    assert Path(sink.location).is_relative_to(tmp_path / "new")
    sink.close()
    rows, summary, config, code = contents(tmp_path / "new")
    assert set(rows) == {1, 2}
    expected = {1: metrics(first.with_tokens_match(True), ["verl", "miles"]), 2: metrics(second, ["verl", "miles"])}
    for step, flat in expected.items():
        assert flat.items() <= rows[step].items()
    assert "weight_sync/tokens_match" not in rows[2]
    assert config["strategy"] == "p2p_tcp"
    assert summary["weight_sync/summary/syncs"] == 2
    assert summary["weight_sync/summary/committed_version"] == 2
    assert summary["weight_sync/summary/all_verified"] == 1
    assert summary["weight_sync/summary/all_tokens_match"] == 1
    assert summary["weight_sync/summary/gb_per_s_mean"] == 2.0
    assert code == 0


def test_a_failed_run_is_marked_as_failed(tmp_path: Path) -> None:
    sink = open_wandb(directory=tmp_path)
    sink.log(record(1))
    sink.log(failed_record(2))
    with pytest.raises(SessionError, match="version 1 after version 2"):
        sink.log(record(1))
    sink.close(failed=True)
    sink.close(failed=True)
    rows, summary, _, code = contents(tmp_path)
    assert rows[2]["weight_sync/failed"] == 1
    assert (summary["weight_sync/summary/failed"], summary["weight_sync/summary/committed_version"]) == (1, 1)
    assert summary["weight_sync/summary/all_verified"] == 0
    assert code == 1


def test_auto_stays_offline_for_a_user_who_is_not_logged_in(tmp_path: Path) -> None:
    sink = open_wandb("auto", directory=tmp_path)
    sink.close()
    assert sink.mode == "offline"
    assert list(tmp_path.glob("wandb/offline-run-*"))


def test_a_login_is_found_by_asking_wandb_without_a_prompt() -> None:
    asked: list[dict] = []

    def login(*, prompt: bool = True) -> bool:
        asked.append({"prompt": prompt})
        return True

    assert logged_in(SimpleNamespace(login=login)) is True
    assert asked == [{"prompt": False}]
    older = SimpleNamespace(login=lambda key=None: pytest.fail("would prompt"), api=SimpleNamespace(api_key=None))
    assert logged_in(older) is False


def test_online_only_when_asked_or_logged_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[str] = []

    class Run:
        url, dir = "https://example.invalid/run", str(tmp_path / "files")

        def define_metric(self, *names: str, **options: object) -> None: ...

    def init(*, mode: str, **others: object) -> Run:
        modes.append(mode)
        return Run()

    fake = SimpleNamespace(init=init, Settings=lambda **options: options, login=lambda prompt=True: True)
    monkeypatch.setattr(wandb_sink, "import_wandb", lambda mode: fake)
    for mode in ("offline", "online", "auto"):
        open_wandb(mode, directory=tmp_path)
    assert modes == ["offline", "online", "online"]
    assert open_wandb("auto", directory=tmp_path).location == "https://example.invalid/run"


def test_a_missing_wandb_is_one_clear_error_unless_disabled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    for mode in ("offline", "online", "auto"):
        with pytest.raises(ConfigError, match=rf"'{mode}' needs wandb.*pip install 'weight_sync\[wandb\]'"):
            open_wandb(mode, directory=tmp_path)
    sink = open_wandb("disabled", directory=tmp_path)
    sink.log(record(1))
    sink.close()
    assert sink.location == ""
    assert list(tmp_path.iterdir()) == []


def test_a_folder_called_wandb_does_not_pass_for_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", type(sys)("wandb"))
    with pytest.raises(ConfigError, match="not installed"):
        open_wandb(directory=tmp_path)


def test_bad_options_are_refused_before_anything_is_opened(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'on'.*offline, online, auto, disabled"):
        open_wandb("on", directory=tmp_path)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="'slime'"):
        open_wandb(directory=tmp_path, keys="slime")
    assert list(tmp_path.iterdir()) == []


def test_observing_imports_neither_wandb_nor_torch_until_a_run_is_opened() -> None:
    program = (
        "import sys, weight_sync.observe.observer as o\n"
        "loaded = {'wandb', 'torch', 'ray', 'sglang', 'vllm', 'mooncake'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
        "inside = {m for m in sys.modules if m.startswith('weight_sync.')}\n"
        "outside = {m for m in inside if not m.startswith('weight_sync.observe')} - {'weight_sync.errors', 'weight_sync.ids'}\n"
        "assert not outside, outside\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_panels_only_plot_keys_that_exist() -> None:
    full = record(1, seconds=dict.fromkeys(PHASES, 1.0)).with_tokens_match(True).with_step_seconds(100.0)
    known = metrics(full).keys()
    for panel in panels():
        assert {panel["x"], *panel["keys"]} <= known, panel["title"]
