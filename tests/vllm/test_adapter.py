"""The parts of the vLLM adapter around a live engine: what is writable, when the plug-in sleeps, server supervision."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.conftest import build_engine, greedy, greedy_transformers
from tests.vllm.test_live_weights import call
from weight_sync.errors import ConfigError, DeadlineExceeded, ParallelError, RolloutError
from weight_sync.ids import Deadline
from weight_sync_integrations.server import start_server
from weight_sync_integrations.vllm.launch import ServerSpec, command, environment


def _stock(model: Path) -> dict[str, Any]:
    """An engine with vLLM's own CPU kernels: loading is watched, nothing is replaced."""
    from weight_sync_integrations.vllm import cpu

    cpu.apply = lambda: None
    llm = build_engine(model)
    facts = {"tokens": greedy(llm), "replies": [call(llm, "load", {"tensors": {}, "path": str(model)})]}
    facts["live"] = llm.collective_rpc(_not_writable)[0]
    return facts


def _not_writable(worker: Any) -> dict[str, str]:
    from weight_sync_integrations.vllm import live

    return live.inspect(worker.model_runner.get_model()).not_writable


def test_weights_that_stock_cpu_kernels_pack_away_are_named_with_the_reason(checkpoints: Any, forked: Any) -> None:
    facts = forked(_stock, checkpoints("qwen3_moe", num_hidden_layers=1))
    found = facts["live"]
    assert "left it empty" in found["model.layers.0.self_attn.qkv_proj.weight"]
    assert "not what load_weights wrote" in found["model.layers.0.mlp.experts.routed_experts.w13_weight"]
    assert "not what load_weights wrote" in found["model.layers.0.mlp.experts.routed_experts.w2_weight"]
    assert "model.embed_tokens.weight" not in found
    assert "model.norm.weight" not in found
    for (reply,) in facts["replies"]:
        assert not reply["ok"]
        assert reply["error"]["type"] == "BindError"
        assert "qkv_proj" in reply["error"]["message"]


def _without_token(model: Path) -> tuple[list[str], str]:
    import os

    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    del os.environ["WEIGHT_SYNC_TOKEN"]
    llm = build_engine(model, weight_transfer_config=None)
    (reply,) = call(llm, "describe", {})
    return sorted(WeightTransferEngineFactory._registry), reply["error"]["message"]


def test_the_plugin_sleeps_and_workers_refuse_every_call_where_no_token_is_set(checkpoints: Any, forked: Any) -> None:
    registered, message = forked(_without_token, checkpoints("qwen3", num_hidden_layers=1))
    assert "weight_sync" not in registered
    assert "started without WEIGHT_SYNC_TOKEN" in message


def test_a_worker_that_is_missing_or_answers_twice_is_not_taken_for_all_having_done_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from weight_sync_integrations.vllm.client import Client

    client = Client("e0", "http://127.0.0.1:1", "token")
    answers: list[int] = []

    def post(*_: Any, **__: Any) -> Any:
        return {"results": [json.dumps({"rank": rank, "ok": True, "reply": {}}) for rank in answers]}

    monkeypatch.setattr(client, "post", post)
    for wrong in ([], [1], [0, 0]):
        answers[:] = wrong
        with pytest.raises(RolloutError, match=r"engine e0: feed was answered by ranks .*; each of its workers has to, once$"):
            client.workers("feed", {}, Deadline.after(1))
    answers[:] = [1, 0]
    assert sorted(client.workers("feed", {}, Deadline.after(1))) == [0, 1]
    answers[:] = [0]
    with pytest.raises(RolloutError, match=r"answered by ranks \[0\]; each of its workers has to, once \(2 did before\)"):
        client.workers("feed", {}, Deadline.after(1))
    client.close()


def _registered_twice(_: None) -> bool:
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.model_executor.model_loader import base_loader

    from weight_sync_integrations.vllm import plugin

    plugin.register()
    first = base_loader.process_weights_after_loading
    plugin.register()
    return "weight_sync" in WeightTransferEngineFactory._registry and first is base_loader.process_weights_after_loading


def test_registering_the_plugin_twice_changes_nothing_more(forked: Any) -> None:
    assert forked(_registered_twice, None)


def _moved_seam(_: None) -> str:
    from vllm.model_executor.layers import utils

    from weight_sync_integrations.vllm import cpu

    del utils.dispatch_cpu_unquantized_gemm
    with pytest.raises(ConfigError) as caught:
        cpu.apply()
    return str(caught.value)


def test_a_vllm_without_a_replaced_function_is_refused_with_its_name_and_version(forked: Any) -> None:
    assert "no dispatch_cpu_unquantized_gemm in vllm.model_executor.layers.utils" in forked(_moved_seam, None)


def _errors(model: Path) -> list[list[dict[str, Any]]]:
    llm = build_engine(model, tensor_parallel_size=2)
    return [call(llm, "bind", {}), call(llm, "no-such-method", {}), call(llm, "state", {})]


def test_a_failing_call_answers_on_every_rank_and_does_not_shift_later_answers(checkpoints: Any, forked: Any) -> None:
    broken, unknown, state = forked(_errors, checkpoints("qwen3", num_hidden_layers=1))
    assert [reply["error"]["type"] for reply in broken] == ["KeyError", "KeyError"]
    assert all("Traceback" in reply["error"]["trace"] for reply in broken)
    assert [reply["error"]["type"] for reply in unknown] == ["SessionError", "SessionError"]
    assert [(reply["rank"], reply["reply"]["session"]) for reply in state] == [(0, ""), (1, "")]


def _gloo(model: Path) -> list[list[int]]:
    import os

    os.environ["WEIGHT_SYNC_VLLM_GLOO"] = "1"
    return greedy(build_engine(model, tensor_parallel_size=2))


def test_an_engine_whose_ranks_talk_over_gloo_gives_the_same_tokens(checkpoints: Any, forked: Any) -> None:
    model = checkpoints("qwen3")
    assert forked(_gloo, model) == forked(greedy_transformers, model)


def test_fingerprints_tell_moved_blocks_dtypes_and_single_bits_apart_on_any_alignment(vllm_imported: None) -> None:
    import torch

    from weight_sync_integrations.vllm.live import fingerprint

    generator = torch.Generator().manual_seed(0)
    base = torch.randn(33, 7, generator=generator).to(torch.bfloat16)
    swapped = torch.cat([base[16:32], base[:16], base[32:]])
    flipped = base.clone()
    flipped.view(torch.int16)[32, 6] ^= 1
    odd = torch.empty(base.numel() + 1, dtype=torch.bfloat16)[1:].view(33, 7).copy_(base)
    same = [base, base.clone(), odd, base.t().contiguous().t()]
    others = [swapped, flipped, base.t(), base.view(7, 33), base.view(torch.float16), base[:32], base[:0]]
    assert len({fingerprint(tensor) for tensor in same}) == 1
    assert len({fingerprint(tensor) for tensor in [base, *others]}) == 1 + len(others)


# -- launch and supervision --------------------------------------------------------------------------------------------


@pytest.fixture
def spec(checkpoints: Any) -> Callable[..., ServerSpec]:
    model = str(checkpoints("qwen3"))
    return lambda **options: ServerSpec(**{"model": model, "token": "a-secret", "kv_cache_bytes": 1 << 25, **options})


def test_the_command_line_never_holds_the_token_and_the_environment_does(spec: Any) -> None:
    made = spec(tp=2, ep=2, transport={"name": "mooncake", "protocol": "tcp"}, environment={"OMP_NUM_THREADS": "2"})
    words = command(made, 8000)
    assert "a-secret" not in " ".join(words)
    assert "--enable-expert-parallel" in words
    variables = environment(made)
    assert variables["WEIGHT_SYNC_TOKEN"] == "a-secret"
    assert json.loads(variables["WEIGHT_SYNC_TRANSPORT"]) == {"name": "mooncake", "protocol": "tcp"}
    assert variables["OMP_NUM_THREADS"] == "2"
    assert "TORCHDYNAMO_DISABLE" not in environment(spec(device="cuda"))


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"token": ""}, ConfigError, "needs a token"),
        ({"device": "tpu"}, ConfigError, "must be cpu or cuda"),
        ({"model": "no/such/folder"}, ConfigError, "no config.json"),
        ({"kv_cache_bytes": None}, ConfigError, "needs kv_cache_bytes"),
        ({"tp": 4, "ep": 2}, ParallelError, "legal here: 1, 4"),
    ],
)
def test_a_spec_that_cannot_work_is_refused_before_a_process_is_started(
    spec: Any, options: dict[str, Any], kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=words):
        spec(**options)


def test_a_server_that_dies_is_reported_with_its_exit_code_and_the_end_of_its_log(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "print('the last words'); raise SystemExit(3)"]
    with pytest.raises(RolloutError, match=r"(?s)exit code 3.*the last words"):
        start_server("dying", "http://127.0.0.1:9", command, {}, tmp_path / "log", "/health", Deadline.after(30))


def test_a_server_that_never_answers_is_stopped_with_its_children_at_the_deadline(tmp_path: Path) -> None:
    child = "import time; time.sleep(600)"
    script = (
        "import subprocess, sys, pathlib, time\n"
        f"p = subprocess.Popen([sys.executable, '-c', {child!r}])\n"
        f"pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(p.pid))\n"
        "time.sleep(600)\n"
    )
    command = [sys.executable, "-c", script]
    with pytest.raises(DeadlineExceeded, match="not ready within 6 s"):
        start_server("silent", "http://127.0.0.1:9", command, {}, tmp_path / "log", "/health", Deadline.after(6))
    pid = int((tmp_path / "pid").read_text())
    state = Path(f"/proc/{pid}/stat")
    assert not state.exists() or state.read_text().rsplit(")", 1)[1].split()[0] == "Z"


def test_a_request_is_looked_at_only_with_the_jobs_token_and_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    from weight_sync_integrations.vllm import worker

    monkeypatch.setenv(worker.TOKEN_VARIABLE, "secret")
    monkeypatch.setattr(worker, "MAX_REQUEST", 10)

    def error(token: str, request: str) -> dict[str, Any]:
        return json.loads(worker.WeightSyncWorkerExtension().weight_sync_call(token, request))["error"]

    assert "wrong token" in error("another job's", "no JSON at all")["message"]
    assert "11 characters; at most 10" in error("secret", "[" * 11)["message"]
    assert error("secret", "no JSON")["type"] == "JSONDecodeError"
