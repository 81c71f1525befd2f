"""Makes commands_support importable under its own name: tests are no package."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from commands_support import JOB, Said, caller, config_file

from weight_sync.commands.common import job_of
from weight_sync.plan.schedule import Schedule


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Callable[..., Said]:
    return caller(capsys)


@pytest.fixture(scope="session")
def job(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Overrides of a small job on nodes of 8."""
    return (f"model.config={config_file(tmp_path_factory.mktemp('model'))}", "plan.gpus_per_node=8", *JOB)


@pytest.fixture(scope="session")
def schedule(job: tuple[str, ...]) -> Schedule:
    """What that job plans. Composing takes a quarter of a second: once is enough."""
    return job_of(job).inputs.schedule()
