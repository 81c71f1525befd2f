"""Imported by the fork server of rdma_support once: what peers and agents would otherwise each import. Opens nothing."""

import agent_process  # noqa: F401
import rdma_support  # noqa: F401
import transport_peer  # noqa: F401

import weight_sync.transport.mooncake
import weight_sync.transport.nixl  # noqa: F401
from weight_sync.transport import nixl_agent, preflight

preflight.load_mooncake()
nixl_agent.load_nixl()
