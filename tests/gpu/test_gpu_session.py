"""The session between live parameters on GPUs. Needs CUDA, torch, triton and cuda-bindings: run by hand, not in CI.

python -m pytest tests/gpu        one GPU is enough; with two, trainer and engine are on different ones
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="tests/gpu needs torch with CUDA")
if not torch.cuda.is_available():
    pytest.skip("tests/gpu needs a CUDA device", allow_module_level=True)

from gpu_support import Job  # noqa: E402

from weight_sync.config import engine_yaml, family_yaml, quant_yaml  # noqa: E402
from weight_sync.delta.spec import DeltaSpec  # noqa: E402
from weight_sync.errors import DeltaError, TransportError, VerifyError, WeightSyncError  # noqa: E402
from weight_sync.plan.schedule import Budget, CostModel  # noqa: E402
from weight_sync.quant.emission import Quantisation  # noqa: E402
from weight_sync.quant.published import Excludes  # noqa: E402
from weight_sync.quant.scheme import load_scheme  # noqa: E402
from weight_sync.session.delta import Reason  # noqa: E402
from weight_sync.session.inputs import Declared  # noqa: E402
from weight_sync.session.landing import Landing, To  # noqa: E402
from weight_sync.session.state import State  # noqa: E402
from weight_sync.session.verify import Level  # noqa: E402
from weight_sync.transport import ipc_copies  # noqa: E402

MOE = {
    "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 16, "intermediate_size": 96, "vocab_size": 250, "num_experts": 8,
    "moe_intermediate_size": 48, "decoder_sparse_step": 1, "mlp_only_layers": [], "tie_word_embeddings": False,
    "dtype": "bfloat16",
}  # fmt: skip
GLM45 = {
    "architectures": ["Glm4MoeForCausalLM"], "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96,
    "moe_intermediate_size": 32, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "vocab_size": 250,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "use_qk_norm": True, "attention_bias": True,
    "num_nextn_predict_layers": 1, "dtype": "bfloat16",
}  # fmt: skip
IPC = {"name": "cuda_ipc"}
EVERYTHING_DIRECT = CostModel(seconds_per_write=0.0)
EVERYTHING_STAGED = CostModel(seconds_per_write=1.0)


def sides(config: dict[str, Any] = MOE, trainer: Any = None, rollout: Any = None) -> tuple[Declared, Declared]:
    family = family_yaml("glm45" if config is GLM45 else "qwen3_moe")
    ours = trainer or {"ranks": 2, "tp": 2, "ep": 2}
    source = Declared(family, config, ours, None, {"vocab_multiple": 8 * ours.get("tp", 1)})
    return source, Declared(family, config, rollout or {"tp": 2, "remainder": "last"}, engine_yaml("sglang"))


BY_ALL = pytest.mark.parametrize("copy_from", [1024, 1 << 40], ids=["copy engines", "kernel"], indirect=True)
"""Most contiguous ranges by copy engines, or everything by the kernel."""


@pytest.fixture
def copy_from(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(ipc_copies, "COPY_FROM", request.param)
    return int(request.param)


@pytest.fixture
def job() -> Iterator[Callable[..., Job]]:
    made: list[Job] = []

    def make(*arguments: Any, **named: Any) -> Job:
        made.append(Job(*(arguments or (sides(), IPC)), **named))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize(
    ("trainer", "rollout"),
    [
        ({"ranks": 2, "tp": 2, "ep": 2}, {"tp": 2, "remainder": "last"}),
        ({"ranks": 4, "tp": 4, "etp": 4}, {"tp": 1, "remainder": "last"}),
        ({"ranks": 1}, {"tp": 4, "remainder": "last"}),
        ({"ranks": 4, "tp": 2, "pp": 2}, {"tp": 2, "moe_ep": 2, "remainder": "last"}),
    ],
    ids=["tp2ep2 to tp2", "tp4 to tp1", "tp1 to tp4", "tp2pp2 to tp2ep2"],
)
@pytest.mark.parametrize("costs", [EVERYTHING_DIRECT, EVERYTHING_STAGED], ids=["direct", "staged"])
@BY_ALL
def test_every_byte_arrives_whatever_the_cuts_and_the_way(
    job: Any, trainer: Any, rollout: Any, costs: CostModel, copy_from: int
) -> None:
    made = job(sides(MOE, trainer, rollout), IPC, costs=costs, budget=Budget(1 << 16, 1 << 16))
    made.commit(1)
    made.step()
    made.commit(2)


def test_a_declared_cast_is_carried_out_on_the_gpu(job: Any) -> None:
    made = job(sides(GLM45), IPC, costs=EVERYTHING_DIRECT)
    assert made.sync.connect().plan.casts.any()
    made.commit(1)


@pytest.mark.parametrize("level", [Level.FULL, Level.CHECK_WEIGHT_EQUAL])
def test_the_stricter_levels_of_verification_work_on_gpus(job: Any, level: Level) -> None:
    made = job(sides(), IPC, level=level)
    made.commit(1)


STAGING = 1 << 18
"""Large enough for a GPU to encode: records of whole programs."""


@pytest.mark.parametrize("snapshot", ["host", "device"])
@pytest.mark.parametrize("staging", [STAGING, 1 << 16], ids=["by the GPU", "by the host"])
@pytest.mark.parametrize(
    ("config", "trainer", "rollout"),
    [
        (MOE, None, None),
        (GLM45, None, None),
        (MOE, {"ranks": 4, "tp": 4, "etp": 4}, {"tp": 1, "remainder": "last"}),
        (MOE, {"ranks": 1}, {"tp": 4, "remainder": "last"}),
    ],
    ids=["as it lies", "some of it cast", "tp4 to tp1", "tp1 to tp4"],
)
def test_a_delta_leaves_every_byte_as_a_complete_session_would(
    job: Any, snapshot: Any, staging: int, config: Any, trainer: Any, rollout: Any
) -> None:
    made = job(sides(config, trainer, rollout), IPC, delta=DeltaSpec(snapshot=snapshot, staging=staging, max_share=1.0))
    made.commit(1)
    by_gpu = [len(agent._delta._device.numbers) for agent in made.source_agents]
    assert all(by_gpu) == (staging == STAGING), by_gpu
    for version, share in enumerate((0.02, 0.0, 0.3), 2):
        made.nudge(share)
        want = made.expected(made.engine.remote("content"))
        outcome = made.sync.sync(version)
        made.check(made.engine, want)
        assert outcome.delta is not None
        assert outcome.delta.used, outcome.delta.text
        assert (outcome.bytes == 0) == (share == 0.0)


@pytest.mark.parametrize("snapshot", ["host", "device"])
def test_a_delta_of_weights_that_are_quantised_is_what_a_second_look_makes_of_them(job: Any, snapshot: Any) -> None:
    quant = Quantisation(load_scheme("fp8_block", quant_yaml, {"group": [16, 16]}), Excludes("fp8")).to_json()
    both = tuple(replace(side, quant=quant) for side in sides(MOE, {"ranks": 1}, {"tp": 1, "remainder": "last"}))
    # At this level every byte is read back and compared with what is made of the weights anew, piece by piece.
    made = job(both, IPC, delta=DeltaSpec(snapshot=snapshot, staging=STAGING, max_share=1.0), level=Level.FULL)
    weights = made.sources[0].live
    for tensor in weights.values():
        tensor.normal_(0, 0.02)
    assert made.sync.sync(1).delta.reason == Reason.FIRST
    plan = made.source_agents[0]._bound.schedule.plan
    by_gpu = made.source_agents[0]._delta._device.numbers
    some = [i for i, row in enumerate(made.source_agents[0]._delta._regions.first.tolist()) if plan.computed[row]]
    assert some
    assert bool(by_gpu & set(some)) == (snapshot == "device")
    for version in (2, 3):
        for tensor in weights.values():
            flat = tensor.view(-1)
            flat[version::97] *= 1.5
        outcome = made.sync.sync(version)
        assert outcome.delta.used, outcome.delta.text
        assert 0 < outcome.bytes < outcome.delta.complete / 2


def test_a_message_that_did_not_arrive_as_it_was_sent_is_not_applied_by_a_gpu(job: Any) -> None:
    made = job(sides(), IPC, delta=DeltaSpec(snapshot="device", staging=STAGING, max_share=1.0))
    made.commit(1)
    made.nudge(0.05)
    before = made.engine.remote("content")
    made.engine.before["patch"] = lambda: made.engine.remote("flip_staged", 1, 4000)
    with pytest.raises(DeltaError, match="not those that were sent"):
        made.sync.sync(2)
    after = made.engine.remote("content")
    assert all(np.array_equal(before[1][name], after[1][name]) for name in before[1]), "worker 1 applied none of it"
    assert (made.sync.version, made.engine.version, made.engine.serving) == (1, 1, False)
    made.commit(2)


@pytest.mark.parametrize("costs", [EVERYTHING_DIRECT, EVERYTHING_STAGED], ids=["direct", "staged"])
def test_a_loader_that_is_still_reading_when_it_returns_gets_every_wave_whole(job: Any, costs: CostModel) -> None:
    made = job(sides(), IPC, costs=costs, budget=Budget(1 << 16, 1 << 16), landing=Landing(To.LOADER, 1 << 16))
    for version in (1, 2):
        made.commit(version)
        made.step()
    assert len(made.sync.connect().schedule.waves) > 3


def test_a_byte_damaged_after_the_write_is_found_and_the_next_sync_repairs_it(job: Any) -> None:
    made = job()
    made.commit(1)
    made.step()
    made.engine.before["verify"] = lambda: made.engine.remote("flip", 0, "model.norm.weight", 5)
    with pytest.raises(VerifyError, match=r"model\.norm\.weight"):
        made.sync.sync(2)
    assert (made.sync.version, made.sync.state, made.engine.serving) == (1, State.FAILED, False)
    made.commit(2)


def test_full_comparison_finds_what_changes_after_the_digests(job: Any) -> None:
    made = job(sides(), IPC, level=Level.FULL)
    call = made.engine.verify

    def verify(*arguments: Any, **named: Any) -> Any:
        found = call(*arguments, **named)
        made.engine.remote("flip", 1, "model.norm.weight", 7)
        return found

    made.engine.verify = verify
    with pytest.raises(VerifyError, match=r"first byte that differs is 7 of the parameter"):
        made.sync.sync(1)
    assert (made.sync.version, made.engine.serving) == (-1, False)


def test_a_joiner_reads_its_weights_from_a_ready_replicas_gpu(job: Any) -> None:
    made = job()
    made.commit(1)
    other = made.start("e1", 3)
    want = made.expected(other.remote("content"))  # what no HF tensor fills stays the joiner's own
    made.sync.join(other, pull=True)
    made.check(other, want)
    assert (other.version, other.serving) == (1, True)
    made.step()
    want = made.expected(other.remote("content"))
    made.commit(2)
    made.check(other, want)


def test_an_engine_process_that_dies_fails_the_sync_and_names_it(job: Any) -> None:
    made = job()
    made.commit(1)

    def die() -> None:
        made.engine.remote.process.kill()
        made.engine.remote.process.join(20)

    made.engine.before["verify"] = die
    with pytest.raises((WeightSyncError, OSError, EOFError)):
        made.sync.sync(2)
    assert (made.sync.version, made.engine.serving) == (1, False)


@BY_ALL
def test_a_transport_whose_peer_closed_writes_nothing(job: Any, copy_from: int) -> None:
    made = job()
    made.commit(1)
    held = made.engine.remote("content")
    made.step()
    agent = made.trainers._agents[0]
    bound, transport = agent._bound, agent._transport
    made.engine.remote("call", 0, "abort", {"session": f"{made.sync._controller}-0", "reason": "the fence"})
    batch = next(batch for _, batch in bound.batches if bound.targets[0].endpoint["address"] == batch.endpoint.address)
    from weight_sync.ids import Deadline

    with pytest.raises(TransportError, match="closed"):
        transport.wait(transport.write(batch), Deadline.after(20))
    made.check(made.engine, held)


@BY_ALL
def test_what_is_asked_of_the_gpu_behind_a_write_does_not_reach_the_bytes_that_it_reads(job: Any, copy_from: int) -> None:
    """Staging buffers are filled again without waiting on the host: the order is the device's."""
    from weight_sync.ids import Deadline

    made = job()
    made.commit(1)
    held = made.engine.remote("content")
    agent = made.trainers._agents[0]
    bound, transport = agent._bound, agent._transport
    batch = next(batch for _, batch in bound.batches if bound.targets[0].endpoint["address"] == batch.endpoint.address)
    tickets = [transport.write(batch) for _ in range(20)]
    transport.follow(tickets[-1])
    made.step()
    for ticket in tickets:
        transport.wait(ticket, Deadline.after(20))
    made.check(made.engine, held)
