"""train.py as a user runs it: bad input is one error and exit code 1 before Ray or any process is started."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from config_support import checkpoint, fake_ray

from weight_sync.transport import preflight

ROOT = Path(__file__).parents[2]


class Run:
    def __init__(self, folder: Path, *arguments: str) -> None:
        marker = folder / "ray-was-started"
        path = fake_ray(folder / "path", marker)
        # The environments of trainer and rollout need not exist for what is tested here.
        pythons = [f"{side}.python={sys.executable}" for side in ("trainer", "rollout")]
        done = subprocess.run(
            [sys.executable, "train.py", f"output_dir={folder / 'outputs'}", *pythons, *arguments],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(path), "CUDA_VISIBLE_DEVICES": ""},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        self.code, self.text = done.returncode, done.stdout + done.stderr
        self.reached_ray = marker.exists()


def test_the_trap_of_these_tests_sees_a_job_that_gets_as_far_as_ray(tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "model")
    run = Run(tmp_path, "+weight_sync=p2p_cma", f"model.path={model}", "weight_sync.observe.wandb=disabled")
    assert run.reached_ray, run.text
    assert run.code == 77


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "no strategy chosen: add +weight_sync=NAME; there are p2p_cma, p2p_ipc, p2p_nixl, p2p_nixl_rdma, p2p_nvlink, "),
        (["++weight_sync=p2p_tcp"], "ConfigError: ++weight_sync=p2p_tcp: a strategy is chosen with one plus"),
        (["+weight_sync=nosuch"], "Could not find 'weight_sync/nosuch'"),
        (
            ["+weight_sync=p2p_cma", "trainer.tp=3"],
            "ParallelError: trainer world of 4 ranks is not a multiple of tp * cp * pp = 3 * 1 * 2 = 6; legal worlds: 6, 12",
        ),
    ],
    ids=["no strategy", "plain string", "no such strategy", "sizes"],
)
def test_bad_input_is_one_error_and_exit_code_1(arguments: list[str], said: str, tmp_path: Path) -> None:
    run = Run(tmp_path, *arguments)
    assert run.code == 1
    assert said in run.text
    assert "Traceback" not in run.text
    assert not run.reached_ray


def test_a_strategy_this_machine_cannot_do_is_refused_with_what_was_looked_for_and_what_works(tmp_path: Path) -> None:
    verdicts = preflight.reachable(preflight.facts(gpus=False))
    if verdicts["p2p_rdma"] is None:
        pytest.skip("this machine has RDMA")
    run = Run(tmp_path, "+weight_sync=p2p_rdma")
    assert run.code == 1
    assert "Traceback" not in run.text
    assert not run.reached_ray
    first, *rest = [line for line in run.text.splitlines() if line]
    assert first == f"ConfigError: p2p_rdma cannot work on this machine: {verdicts['p2p_rdma']}"
    found = "\n".join(rest)
    assert "RDMA devices in /sys/class/infiniband" in found
    works = next(line for line in rest if "would work here: " in line)
    assert "p2p_cma" in works
    assert "p2p_rdma" not in works


def test_an_interpreter_that_is_not_there_is_refused_before_ray_starts(tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "model")
    run = Run(tmp_path, "+weight_sync=p2p_cma", f"model.path={model}", "rollout.python=no/such/python")
    assert run.code == 1
    assert "ConfigError: rollout.python=no/such/python: no such interpreter" in run.text
    assert not run.reached_ray
