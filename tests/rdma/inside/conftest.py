"""For machines with RDMA devices: the guest that tests/rdma/run.py starts, and real ones. Elsewhere all of it is skipped."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from weight_sync.transport import preflight

TESTS = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(Path(__file__).parent), str(TESTS / "transport"), str(TESTS / "session")]
pytest.register_assert_rewrite("transport_conformance", "session_support")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = [item for item in items if Path(__file__).parent in item.path.parents]
    if here and (reason := preflight.reachable(preflight.facts(gpus=False))["p2p_rdma"]):
        for item in here:
            item.add_marker(pytest.mark.skip(reason=f"p2p_rdma cannot work on this machine: {reason}"))


@pytest.fixture(scope="session", autouse=True)
def _peers_start_at_once() -> None:
    import rdma_support

    rdma_support.warm()
