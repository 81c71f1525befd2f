"""The worker extension of a vLLM engine that verl starts: verl's own and ours, for vLLM takes one class."""

from __future__ import annotations

from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

from weight_sync_integrations.vllm.worker import WeightSyncWorkerExtension


class Extension(WeightSyncWorkerExtension, vLLMColocateWorkerExtension):
    """verl's methods stay as they are: stepping down the ladder uses them."""
