"""What preflight makes of machines that we do not have: trees of files that look like their /sys, /dev and /proc."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from weight_sync.errors import ConfigError
from weight_sync.transport import preflight
from weight_sync.transport.preflight import Facts, MooncakeBuild, NixlBuild, facts, reachable, report, require
from weight_sync.transport.rdma import Gid, RdmaPort

GOOD_PORT = RdmaPort("mlx5_0", 1, "4: ACTIVE", "Ethernet", (Gid(0, "fe80::1"), Gid(3, "::ffff:10.0.0.1", "RoCE v2", "eth0")))
BOX = Facts(
    rdma_ports=(GOOD_PORT,),
    verbs_devices=("uverbs0",),
    memlock=None,
    gpus=("NVIDIA H200", "NVIDIA H200"),
    nvlink=True,
    mooncake=MooncakeBuild("mooncake-transfer-engine", "0.3.14", True, None),
    ptrace_scope=0,
    may_ptrace=False,
    linux=True,
    environment={},
    nixl=NixlBuild("nixl-cu12", "1.5.1"),
    driven=("mlx5_0",),
)


def device(root: Path, name: str, state: str, gids: list[str]) -> None:
    port = root / "sys/class/infiniband" / name / "ports/1"
    (port / "gids").mkdir(parents=True)
    (port / "state").write_text(state + "\n")
    (port / "link_layer").write_text("InfiniBand\n")
    for number, gid in enumerate(gids):
        (port / "gids" / str(number)).write_text(gid + "\n")


def test_rdma_devices_are_read_from_sysfs_with_their_state_and_gids(tmp_path: Path) -> None:
    zero = ":".join(["0000"] * 8)
    device(tmp_path, "mlx5_1", "1: DOWN", [zero])
    device(tmp_path, "mlx5_0", "4: ACTIVE", ["fe80:0000:0000:0000:0202:c9ff:fe00:0001", zero])
    (tmp_path / "dev/infiniband").mkdir(parents=True)
    (tmp_path / "dev/infiniband/uverbs0").touch()
    (tmp_path / "dev/infiniband/rdma_cm").touch()
    (tmp_path / "proc/sys/kernel/yama").mkdir(parents=True)
    (tmp_path / "proc/sys/kernel/yama/ptrace_scope").write_text("1\n")
    found = facts(tmp_path, gpus=False)
    assert found.rdma_ports == (
        RdmaPort("mlx5_0", 1, "4: ACTIVE", "InfiniBand", (Gid(0, "fe80:0000:0000:0000:0202:c9ff:fe00:0001"),)),
        RdmaPort("mlx5_1", 1, "1: DOWN", "InfiniBand", ()),
    )
    assert found.verbs_devices == ("uverbs0",)
    assert (found.ptrace_scope, found.gpus) == (1, None)
    assert [port.usable for port in found.rdma_ports] == [True, False]


def test_gpus_are_found_without_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    gpu = tmp_path / "proc/driver/nvidia/gpus/0000:19:00.0"
    gpu.mkdir(parents=True)
    (gpu / "information").write_text("Model: \t\t NVIDIA H200\nIRQ:   13\n")
    found = facts(tmp_path)
    assert found.gpus == ("NVIDIA H200",)
    assert found.nvlink is None


def test_nvidia_smi_is_believed_about_names_and_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    smi = tmp_path / "nvidia-smi"
    smi.write_text('#!/bin/sh\n[ "$1" = nvlink ] && echo " Link 0: 26.562 GB/s" && exit\necho "NVIDIA A"; echo "NVIDIA B"\n')
    smi.chmod(0o755)
    found = facts(tmp_path)
    assert (found.gpus, found.nvlink) == (("NVIDIA A", "NVIDIA B"), True)
    smi.write_text("#!/bin/sh\nexit 9\n")
    assert facts(tmp_path).gpus == ()


def test_an_empty_machine_has_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    found = facts(tmp_path)
    assert (found.rdma_ports, found.verbs_devices, found.gpus, found.ptrace_scope) == ((), (), (), None)


def test_everything_works_on_a_box_with_everything() -> None:
    assert reachable(BOX) == dict.fromkeys(
        ["p2p_ipc", "p2p_nvlink", "p2p_rdma", "p2p_nixl_rdma", "p2p_cma", "p2p_tcp", "p2p_nixl"]
    )
    for strategy in reachable(BOX):
        require(strategy, BOX)


@pytest.mark.parametrize(
    ("strategy", "change", "reason"),
    [
        ("p2p_rdma", {"rdma_ports": ()}, "no RDMA device"),
        ("p2p_rdma", {"rdma_ports": (dataclasses.replace(GOOD_PORT, state="1: DOWN"),)}, "mlx5_0 port 1 1: DOWN"),
        ("p2p_rdma", {"rdma_ports": (dataclasses.replace(GOOD_PORT, gids=()),)}, "GIDs none"),
        ("p2p_rdma", {"verbs_devices": ()}, "no uverbs device"),
        ("p2p_rdma", {"environment": {"MC_FORCE_TCP": "0"}}, "MC_FORCE_TCP"),
        ("p2p_rdma", {"memlock": 65536}, "only 65536 bytes may be pinned"),
        ("p2p_nvlink", {"gpus": ()}, "no NVIDIA GPU"),
        ("p2p_ipc", {"gpus": ()}, "no NVIDIA GPU"),
        ("p2p_nvlink", {"nvlink": False}, "NVLink"),
        ("p2p_nvlink", {"mooncake": MooncakeBuild("m", "1", False, None)}, "built without nvlink_intra"),
        ("p2p_tcp", {"mooncake": None}, "not installed"),
        ("p2p_rdma", {"mooncake": None}, "not installed"),
        ("p2p_tcp", {"mooncake": MooncakeBuild("m", "1", None, "libibverbs.so.1: no such file")}, "libibverbs.so.1"),
        ("p2p_nixl", {"nixl": None}, "NIXL is not installed"),
        ("p2p_nixl_rdma", {"nixl": None}, "NIXL is not installed"),
        ("p2p_nixl", {"environment": {"UCX_TLS": "all"}}, "UCX_TLS=all is set"),
        ("p2p_nixl_rdma", {"rdma_ports": (), "driven": None}, "no RDMA device"),
        ("p2p_nixl_rdma", {"memlock": 65536}, "only 65536 bytes may be pinned"),
        ("p2p_nixl_rdma", {"driven": ()}, "libibverbs has no driver for mlx5_0"),
        ("p2p_nixl_rdma", {"driven": None}, "libibverbs is not there"),
        ("p2p_cma", {"ptrace_scope": 3, "may_ptrace": True}, "ptrace_scope is 3"),
        ("p2p_cma", {"ptrace_scope": 2}, "ptrace_scope is 2"),
        ("p2p_cma", {"linux": False}, "Linux only"),
    ],
)
def test_a_missing_part_rules_out_its_strategy_and_the_error_lists_what_would_work(
    strategy: str, change: dict[str, object], reason: str
) -> None:
    found = dataclasses.replace(BOX, **change)
    assert reason in (reachable(found)[strategy] or "")
    with pytest.raises(ConfigError, match=f"{strategy} cannot work on this machine") as caught:
        require(strategy, found)
    working = [name for name, why in reachable(found).items() if why is None]
    assert reason in str(caught.value)
    assert f"would work here: {', '.join(working)}" in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [{"ptrace_scope": 2, "may_ptrace": True}, {"ptrace_scope": 1}, {"nvlink": None}, {"gpus": ("one",), "nvlink": False}],
)
def test_what_is_not_known_to_fail_is_not_ruled_out(change: dict[str, object]) -> None:
    assert set(reachable(dataclasses.replace(BOX, **change)).values()) == {None}


def test_an_unknown_strategy_lists_the_known_ones() -> None:
    with pytest.raises(
        ConfigError, match="preflight knows p2p_ipc, p2p_nvlink, p2p_rdma, p2p_nixl_rdma, p2p_cma, p2p_tcp, p2p_nixl"
    ):
        require("p2p_smoke_signal", BOX)


def test_the_report_names_everything_that_was_looked_at() -> None:
    text = report(dataclasses.replace(BOX, memlock=65536, environment={"MC_FORCE_TCP": "1"}))
    for part in ("mlx5_0 port 1 4: ACTIVE", "uverbs0", "65536 bytes", "NVIDIA H200", "0.3.14", "MC_FORCE_TCP=1"):
        assert part in text


def test_this_machine_can_be_looked_at() -> None:
    found = facts()
    assert reachable(found)["p2p_tcp"] is None
    assert "would work here" in report(found)


def test_mooncakes_log_level_is_set_for_its_import_only(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    monkeypatch.delenv("MC_LOG_LEVEL", raising=False)
    preflight.load_mooncake()
    assert "MC_LOG_LEVEL" not in os.environ
