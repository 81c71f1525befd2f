"""What is made of RDMA devices as the kernel shows them: recorded trees of /sys, /dev and /proc, one "path:content" a line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from weight_sync.commands.host import checks
from weight_sync.errors import ConfigError, TransportError
from weight_sync.ids import Deadline
from weight_sync.transport import preflight, rdma
from weight_sync.transport.base import Endpoint
from weight_sync.transport.mooncake import MooncakeTransport
from weight_sync.transport.rdma import check_published, chosen, transmitted, wanted_gid

RECORDED = Path(__file__).parent / "sysfs"


def tree(root: Path, name: str) -> Path:
    """A recorded machine as files below `root`."""
    for line in (RECORDED / f"{name}.txt").read_text().splitlines():
        if line.startswith("#"):
            continue
        path, _, content = line.partition(":")
        file = root / path
        if path.endswith("/"):
            file.mkdir(parents=True, exist_ok=True)
            continue
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content + "\n")
    return root


def ports(tmp_path: Path, name: str) -> tuple[rdma.RdmaPort, ...]:
    return rdma.ports(tree(tmp_path, name) / "sys/class/infiniband")


def test_soft_devices_are_told_from_real_ones_and_their_gids_are_read_as_addresses(tmp_path: Path) -> None:
    near, far = ports(tmp_path, "rxe")
    assert (near.device, near.port, near.state, near.link_layer, near.parent) == ("rxe0", 1, "4: ACTIVE", "Ethernet", "v0")
    assert [(gid.index, gid.address, gid.kind, gid.netdev) for gid in near.gids] == [
        (0, "fe80::d4c5:58ff:fe39:f1c7", "RoCE v2", "v0"),
        (1, "10.77.0.1", "RoCE v2", "v0"),
    ]
    assert near.usable
    assert far.gids[1].address == "10.77.0.2"
    assert str(near) == (
        "rxe0 port 1 4: ACTIVE Ethernet, in software on v0, GIDs 0: fe80::d4c5:58ff:fe39:f1c7 (RoCE v2), 1: 10.77.0.1 (RoCE v2)"
    )


def test_cards_are_read_with_both_kinds_of_gids_and_those_without_a_cable_are_not_usable(tmp_path: Path) -> None:
    found = ports(tmp_path, "mlx5")
    assert [(port.device, port.link_layer, port.usable, port.parent) for port in found] == [
        ("mlx5_0", "Ethernet", True, ""),
        ("mlx5_1", "Ethernet", False, ""),
        ("mlx5_2", "InfiniBand", True, ""),
    ]
    assert [gid.index for gid in found[0].gids if gid.kind == "RoCE v2" and gid.address == "10.20.1.2"] == [3]


@pytest.mark.parametrize(
    ("name", "reason"), [("rxe", None), ("mlx5", None), ("gpu_without_nic", "no RDMA device in /sys/class/infiniband")]
)
def test_doctor_and_preflight_judge_recorded_machines_alike(name: str, reason: str | None, tmp_path: Path) -> None:
    root = tree(tmp_path, name)
    found = preflight.facts(root, gpus=False)
    # Whether memory may be locked is this process's own, not the recorded machine's.
    verdict = preflight.reachable(_replace(found, memlock=None))["p2p_rdma"]
    assert verdict == reason
    looked = {check.name: check for check in checks(_replace(found, memlock=None), root)}
    assert looked["RDMA ports"].ok is (reason is None)
    assert looked["verbs devices"].ok is (reason is None)
    assert looked["RDMA GIDs"].ok is (None if reason else True)
    assert ("rxe0" if name == "rxe" else "mlx5_2" if name == "mlx5" else "none") in looked["RDMA ports"].found


@pytest.mark.parametrize(
    ("name", "peermem", "found"),
    [
        ("mlx5", True, "nvidia_peermem is loaded"),
        ("gpu_without_nic", True, "dma-buf (open kernel modules)"),
        ("rxe", False, ""),
    ],
)
def test_gpudirect_is_found_by_the_same_files_everywhere(name: str, peermem: bool, found: str, tmp_path: Path) -> None:
    root = tree(tmp_path, name)
    seen = _replace(preflight.facts(root, gpus=False), gpus=("NVIDIA H200",))
    check = {check.name: check for check in checks(seen, root)}["GPUDirect RDMA"]
    assert check.ok is peermem
    assert found in check.found


def _replace(found: preflight.Facts, **changes: Any) -> preflight.Facts:
    import dataclasses

    return dataclasses.replace(found, environment={}, **changes)


def test_an_empty_filter_takes_what_is_usable_and_a_name_takes_that(tmp_path: Path) -> None:
    found = ports(tmp_path, "mlx5")
    assert [port.device for port in chosen(found, "", {})] == ["mlx5_0", "mlx5_2"]
    assert [port.device for port in chosen(found, " mlx5_2 ,", {})] == ["mlx5_2"]


@pytest.mark.parametrize(
    ("devices", "environment", "says"),
    [
        ("mlx5_0, mlx5_9", {}, "names mlx5_9, which this machine does not have; RDMA devices here: mlx5_0, mlx5_1, mlx5_2"),
        ("mlx5_1", {}, "port 1 of mlx5_1 cannot be used: mlx5_1 port 1 1: DOWN"),
        ("", {"MC_IB_PORT": "2"}, "port 2 of every RDMA device cannot be used"),
    ],
)
def test_a_filter_that_leaves_a_device_out_is_refused_with_what_there_is(
    devices: str, environment: dict[str, str], says: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=says):
        chosen(ports(tmp_path, "mlx5"), devices, environment)


def test_a_gid_index_must_exist_on_every_port_that_is_used(tmp_path: Path) -> None:
    found = chosen(ports(tmp_path, "mlx5"), "mlx5_0", {})
    assert wanted_gid(found, {}) is None
    assert wanted_gid(found, {"NCCL_IB_GID_INDEX": "3"}) == 3, "Mooncake looks at NCCL's variable too"
    assert wanted_gid(found, {"NCCL_IB_GID_INDEX": "9", "MC_GID_INDEX": "0"}) == 0, "and at its own first"
    for value in ("4", "-1", "", "3.0", "three"):
        with pytest.raises(ConfigError, match=rf"MC_GID_INDEX={value}: no such GID on mlx5_0 port 1"):
            wanted_gid(found, {"MC_GID_INDEX": value})


def segment(**gids: str) -> dict[str, Any]:
    return {"protocol": "rdma", "devices": [{"name": name, "lid": 0, "gid": gid} for name, gid in gids.items()]}


IPV4 = "00:00:00:00:00:00:00:00:00:00:ff:ff:0a:4d:00:01"
LOCAL = "fe:80:00:00:00:00:00:00:d4:c5:58:ff:fe:39:f1:c7"


def test_what_an_engine_publishes_is_compared_with_what_it_was_asked_for(tmp_path: Path) -> None:
    found = ports(tmp_path, "rxe")
    both = segment(rxe0=IPV4, rxe1=IPV4.replace("01", "02"))
    assert check_published(both, found, "", None) == ("rxe0", "rxe1")
    assert check_published(both, found, "rxe0,rxe1", 1) == ("rxe0", "rxe1")
    assert check_published(segment(rxe0=LOCAL), found[:1], "rxe0", 0) == ("rxe0",)
    with pytest.raises(ConfigError, match="the engine uses RDMA devices rxe0; asked for: rxe0, rxe1"):
        check_published(segment(rxe0=IPV4), found, "rxe0, rxe1", None)
    with pytest.raises(ConfigError, match="uses RDMA devices none; asked for: all that are usable"):
        check_published({"protocol": "rdma"}, found, "", None)
    with pytest.raises(ConfigError, match=r"GID 0 \(fe80::d4c5.*\) was asked for on rxe0, the engine uses 10.77.0.1"):
        check_published(segment(rxe0=IPV4), found[:1], "rxe0", 0)


def test_only_counters_of_sent_packets_are_read_and_drivers_without_any_give_none(tmp_path: Path) -> None:
    devices = tree(tmp_path / "a", "mlx5") / "sys/class/infiniband"
    assert transmitted(["mlx5_0", "mlx5_2"], devices) == {
        "mlx5_0/1 port_xmit_packets": 918273645,
        "mlx5_2/1 port_xmit_packets": 55,
    }
    soft = tree(tmp_path / "b", "rxe") / "sys/class/infiniband"
    assert transmitted(["rxe1"], soft) == {"rxe1/1 sent_pkts": 0}
    (soft / "rxe1/ports/1/hw_counters/sent_pkts").unlink()
    assert transmitted(["rxe1"], soft) == {}


@pytest.mark.parametrize(
    ("counts", "peer_host", "counters", "refused"),
    [
        ([5], "10.0.0.2", True, True),
        ([5, 5, 5, 9], "10.0.0.2", True, False),
        ([5], "127.0.0.1", True, False),
        ([5], "10.0.0.2", False, False),
        ([], "10.0.0.2", True, False),
    ],
    ids=["none moved", "one moved", "own address", "told not to", "no counters"],
)
def test_a_probe_must_show_in_the_counters_of_a_device_where_it_can(
    counts: list[int], peer_host: str, counters: bool, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport = MooncakeTransport(protocol="tcp", host="127.0.0.1", counters=counters)
    seen = iter(counts)
    last = counts[-1] if counts else 0
    monkeypatch.setattr(rdma, "transmitted", lambda _: {"mlx5_0/1 port_xmit_packets": next(seen, last)} if counts else {})
    endpoint = Endpoint("mooncake", "rdma", f"{peer_host}:1", 1)
    before = transport._packets()
    if refused:
        with pytest.raises(TransportError, match="no RDMA device of this side has sent a packet for it") as caught:
            transport._on_the_wire(endpoint, peer_host, before, Deadline.after(0.1))
        assert caught.value.code == "not on the wire"
        with pytest.raises(TransportError, match="poisoned"):
            transport.describe()
    else:
        transport._on_the_wire(endpoint, peer_host, before, Deadline.after(0.1))
        transport.describe()
    assert transport.proofs == ({endpoint: {"mlx5_0/1 port_xmit_packets": 4}} if counts == [5, 5, 5, 9] else {})
    transport.close()
