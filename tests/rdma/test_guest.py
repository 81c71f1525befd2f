"""The guest itself: what it promises about commands that end, fail, hang or bring the machine down. Boots it three times."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import rdma_guest
from rdma_guest import REPOSITORY, RdmaGuest, Unavailable, prepare


@pytest.fixture(scope="module")
def store() -> rdma_guest.Store:
    try:
        return prepare()
    except Unavailable as reason:
        pytest.skip(f"the RDMA guest cannot be run: {reason}")


@pytest.mark.timeout(400)
def test_a_command_runs_among_the_hosts_files_with_two_rdma_devices_and_leaves_only_what_is_in_its_share(
    store: rdma_guest.Store, tmp_path: Path
) -> None:
    heard: list[str] = []
    witness = REPOSITORY / "outputs" / "written-by-the-guest"
    command = f"""
pwd; rdma link; uname -r
mkdir -p outputs; echo one >{witness}; cat {witness}
.venv/bin/python -c 'import sys; print(sys.prefix)'
echo artefact >/share/artefact
exit 7
"""
    result = RdmaGuest(store, share=tmp_path, listen=heard.append).run(command, seconds=100)
    assert result.code == 7, result.explain()
    assert result.failure is None
    lines = result.output.splitlines()
    assert lines[:2] == ["guest-ready", str(REPOSITORY)]
    assert sum("state ACTIVE" in line for line in lines) == 2
    assert "one" in lines
    assert str(REPOSITORY / ".venv") in lines
    assert "".join(heard) == result.output
    assert (tmp_path / "artefact").read_text() == "artefact\n"
    assert not witness.exists(), "the host's files are as they were"


@pytest.mark.timeout(400)
def test_a_command_that_hangs_is_killed_at_its_deadline_and_shows_what_it_had_said(
    store: rdma_guest.Store, tmp_path: Path
) -> None:
    began = time.monotonic()
    result = RdmaGuest(store, share=tmp_path).run("echo begun; sleep 1000", seconds=5)
    assert time.monotonic() - began < rdma_guest.BOOT_SECONDS + 15
    assert (result.code, result.failure) == (None, "the command did not end within 5 s; the guest was killed")
    assert "begun" in result.explain()
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert str(tmp_path) not in listed, "nothing of it is left running"


@pytest.mark.timeout(400)
def test_a_guest_that_goes_down_is_reported_with_its_console(store: rdma_guest.Store, tmp_path: Path) -> None:
    result = RdmaGuest(store, share=tmp_path).run("echo c >/proc/sysrq-trigger; sleep 60", seconds=100)
    assert result.code is None
    assert (result.failure or "").startswith("the guest ended")
    assert "sysrq triggered crash" in result.explain().lower()


def test_a_guest_that_does_not_come_up_is_killed_and_reported(store: rdma_guest.Store, tmp_path: Path) -> None:
    result = RdmaGuest(store, share=tmp_path).run("true", seconds=100, boot_seconds=1.0)
    assert (result.code, result.failure) == (None, "the guest did not come up within 1 s; it was killed")


def test_where_the_packages_cannot_be_had_the_reason_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Unavailable, match="there is no apt-get here"):
        prepare(tmp_path / "store")
