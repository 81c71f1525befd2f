"""Imported by the fork server of rdma_support once: what peers and agents would otherwise each import. Opens nothing."""

import agent_process  # noqa: F401
import rdma_support  # noqa: F401
import transport_peer  # noqa: F401

import weight_sync.transport.mooncake  # noqa: F401
from weight_sync.transport import preflight

preflight.load_mooncake()
