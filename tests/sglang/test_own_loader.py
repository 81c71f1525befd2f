"""Engines whose live tensors are not the checkpoint's: what a sync brings is placed by SGLang's own loader (loader.py).

The adapter, the workers and the session are the real ones, and so are the models, their load_weights and their post-processing:
replicas that SGLang's own loader has loaded, in the place of a scheduler's model. Post-processing is that of a GPU
(as_on_a_gpu); the kernels that it calls and a CPU lacks are stand-ins, each with its name. Two trainer ranks hold the rows of
each HF tensor; what comes out must be what a replica holds that loaded it from disk.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from families_support import CHANNEL, TENSOR, YARN
from own_loader_support import trainer_ranks
from test_engine import Engine, Scheduler

from weight_sync.config import engine_yaml, family_for, family_yaml, quant_yaml
from weight_sync.errors import WeightSyncError
from weight_sync.ids import Deadline
from weight_sync.quant.emission import Quantisation
from weight_sync.quant.published import from_hf
from weight_sync.session.connect import SyncSpec
from weight_sync.session.contracts import Receipt
from weight_sync.session.inprocess import InProcessTrainers
from weight_sync.session.inputs import Declared
from weight_sync.session.landing import Landing, To
from weight_sync.session.session import Timeouts, WeightSync
from weight_sync.session.source import SourceAgent
from weight_sync.session.verify import Level
from weight_sync.transport.memory import MemoryTransport
from weight_sync_integrations.fingerprint import fingerprint
from weight_sync_integrations.quantised import quantise_checkpoint
from weight_sync_integrations.sglang import live
from weight_sync_integrations.sglang import tensors as known
from weight_sync_integrations.sglang.loader import SglangLoader
from weight_sync_integrations.sglang.replica import EngineSizes, Replica, as_on_a_gpu, build_replica, read_checkpoint

Make = Callable[..., Path]
TP1, TP2EP2 = EngineSizes(), EngineSizes(tp=2, ep=2)
ONE_AT_A_TIME = threading.RLock()
"""SGLang takes one rank for its own in a process."""


def compressed(form: str, ignore: list[str], weights: dict[str, Any], dynamic: str | None = "token") -> dict[str, Any]:
    inputs = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": dynamic, "dynamic": True} if dynamic else None
    group = {"targets": ["Linear"], "weights": weights | {"symmetric": True, "dynamic": False}, "input_activations": inputs}
    return CHANNEL | {"format": form, "ignore": ["lm_head", "re:.*mlp.gate$", *ignore], "config_groups": {"group_0": group}}


INT4 = compressed(
    "pack-quantized", ["re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"],
    {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}, None,
)  # fmt: skip


@contextmanager
def as_one_rank(replica: Replica) -> Iterator[None]:
    """SGLang's context of this rank, its post-processing that of a GPU, and stand-ins for kernels of it that a CPU lacks."""
    from sglang.srt.layers.quantization import utils
    from sglang.srt.layers.quantization.compressed_tensors.schemes import compressed_tensors_w8a8_fp8_moe as fp8_experts
    from sglang.srt.layers.quantization.compressed_tensors.schemes import compressed_tensors_wNa16_moe as int4_experts

    with ONE_AT_A_TIME, replica.scope(), as_on_a_gpu(), pytest.MonkeyPatch.context() as patch:
        for module in (utils, fp8_experts):
            patch.setattr(module, "scaled_fp8_quant", scaled_fp8_quant_stand_in)
        patch.setattr(int4_experts, "gptq_marlin_moe_repack", gptq_marlin_moe_repack_stand_in)
        patch.setattr(int4_experts, "marlin_make_workspace", lambda device, blocks=1: torch.zeros(4, dtype=torch.int32))
        yield


def scaled_fp8_quant_stand_in(weight: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As the kernel does it: division by the scale, numbers out of range become the largest."""
    return (weight.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale


def gptq_marlin_moe_repack_stand_in(packed: torch.Tensor, perm: Any, size_k: int, size_n: int, bits: int) -> torch.Tensor:
    """Another order of the same 32-bit words, in the shape that the kernel gives them."""
    return packed.flatten(1).flip(1).reshape(packed.shape[0], size_k // 16, size_n * bits // 2).contiguous()


def loaded(path: Path, rank: int = 0, sizes: EngineSizes = TP1) -> Replica:
    """As a server that takes part in a job loads a model: by SGLang's loader, watched."""
    from sglang.srt.model_loader.loader import DefaultModelLoader

    replica = build_replica(path, rank, sizes)
    with as_one_rank(replica), torch.no_grad(), live.watched():
        torch.set_default_dtype(torch.bfloat16)  # as ModelRunner does around it
        try:
            tensors = iter(read_checkpoint(path).items())
            DefaultModelLoader.load_weights_and_postprocess(replica.model, tensors, torch.device("cpu"))
        finally:
            torch.set_default_dtype(torch.float32)
    return replica


class ReplicaEngine(Engine):
    """The adapter and front end of test_engine.py, with workers that run as one rank of SGLang at a time."""

    def __init__(self, patch: pytest.MonkeyPatch, folder: Path, model: Path, sizes: EngineSizes) -> None:
        self.replicas = [loaded(model, rank, sizes) for rank in range(sizes.world)]
        ranks = [(Scheduler(str(model), replica.model), replica.coords) for replica in self.replicas]
        self._of = {id(scheduler): replica for (scheduler, _), replica in zip(ranks, self.replicas, strict=True)}
        folder.mkdir()
        super().__init__(patch, folder, ranks=ranks, moe_ep=sizes.ep, moe_tp=sizes.tp // sizes.ep)

    def _loop(self, worker: Any) -> None:
        replica, serve = self._of[id(worker._scheduler)], worker._endpoint._serve

        def serve_as_this_rank(method: str, payload: dict[str, Any]) -> dict[str, Any]:
            with as_one_rank(replica):
                return serve(method, payload)

        worker._endpoint._serve = serve_as_this_rank
        super()._loop(worker)

    def state(self) -> list[dict[str, int]]:
        return [state(replica) for replica in self.replicas]

    @property
    def serving(self) -> bool:
        return not any(scheduler._engine_paused for scheduler in self.schedulers)

    def session(self, model: Path, export: Path, landing: Landing, sizes: EngineSizes, level: Level) -> WeightSync:
        config = json.loads((model / "config.json").read_text())
        quant = Quantisation(*from_hf(config["quantization_config"], quant_yaml)).to_json()
        convention = engine_yaml("sglang")
        dims = {"tp": sizes.tp, "moe_ep": sizes.ep, "remainder": convention["remainder"]}
        rollout = Declared(family_yaml(family_for(config)), config, dims, convention, quant=quant)
        agents = [SourceAgent(rank, lambda: MemoryTransport(self.hub, landing_seed=7)) for rank in trainer_ranks(export)]
        limits = Timeouts(connect=120, sync=120, abort=60)
        spec = SyncSpec(None, rollout, landing=landing)
        return WeightSync(InProcessTrainers(agents), [self.adapter], spec, pause="retract", timeouts=limits, level=level)


def state(replica: Replica) -> dict[str, int]:
    """Fingerprints of everything that generation depends on."""
    return {found.name: fingerprint(found.tensor) for found in known.find_all([("target", replica.model)])}


def places(replica: Replica) -> dict[str, int]:
    found = known.find_all([("target", replica.model)])
    return {f.name: f.tensor.data_ptr() for f in found if f.attribute != "w_scale"}  # SGLang binds that one anew


@pytest.fixture(scope="module")
def pair(checkpoint: Make, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[tuple[Path, Path]]]:
    """pair(kind, quantization) -> [(bf16, quantised)] of two sets of weights, A and B."""

    def make(kind: str, quantization: dict[str, Any], **sizes: Any) -> list[tuple[Path, Path]]:
        folder = tmp_path_factory.mktemp("pair")
        plain = [checkpoint(kind, seed=seed, num_hidden_layers=2, vocab_size=250, **sizes) for seed in (0, 1)]
        return [(path, quantise_checkpoint(path, folder / str(i), quantization)) for i, path in enumerate(plain)]

    return make


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., ReplicaEngine]]:
    made: list[ReplicaEngine] = []

    def make(model: Path, sizes: EngineSizes = TP1) -> ReplicaEngine:
        made.append(ReplicaEngine(monkeypatch, tmp_path / str(len(made)), model, sizes))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], EngineSizes, int, Level]] = {
    "rows, transposed": ("qwen3_moe", {}, CHANNEL, TP1, 200_000, Level.CHECK_WEIGHT_EQUAL),
    "rows, two ranks": ("qwen3_moe", {}, CHANNEL, TP2EP2, 200_000, Level.FULL),
    "rows, MLA": ("deepseek_v3", {"rope_parameters": YARN}, CHANNEL, TP1, 400_000, Level.DIGEST),
    "rows, MLA absorbed anew in all layers": ("glm4_moe_lite", {"rope_parameters": YARN}, CHANNEL, TP1, 400_000, Level.DIGEST),
    "tensor, requantised": ("qwen3_moe", {}, TENSOR, TP1, 200_000, Level.DIGEST),
    "int4 experts, packed for Marlin": ("deepseek_v3", {"rope_parameters": YARN}, INT4, TP1, 400_000, Level.DIGEST),
}


@pytest.mark.parametrize("case", CASES)
def test_an_engine_whose_weights_are_not_the_checkpoints_holds_what_a_load_from_disk_would_give_twice(
    pair: Any, engines: Any, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    kind, options, quantization, sizes, budget, level = CASES[case]
    (plain_a, a), (plain_b, b) = pair(kind, quantization, **options)
    want = {path: [state(loaded(path, rank, sizes)) for rank in range(sizes.world)] for path in (a, b)}
    engine = engines(a, sizes)
    incomplete: list[int] = []  # layers that wait for another wave: no more than the experts of one
    feed = SglangLoader.feed

    def watched(loader: SglangLoader, *args: Any) -> None:
        feed(loader, *args)
        incomplete.append(len(loader._opened))

    monkeypatch.setattr(SglangLoader, "feed", watched)
    before, first = [places(replica) for replica in engine.replicas], engine.state()
    assert first == want[a] != want[b]
    for version, (plain, path) in enumerate([(plain_b, b), (plain_a, a), (plain_b, b)], 1):
        sync = engine.session(a, plain, Landing(To.AUTO, budget), sizes, level)
        connection = sync.connect()
        assert len(connection.schedule.waves) > 1
        assert "post-processing" in connection.by_loader
        if version == 1:
            assert engine.state() == first, "connecting changed what is served"
        sync.sync(version)
        assert engine.state() == want[path]
        assert [places(replica) for replica in engine.replicas] == before
        assert engine.serving
    assert not any("weight_update" in route for route in engine.log)
    assert max(incomplete) == (1 if "experts" in case or "tensor" in case else 0)


def attempt(call: Callable[[], object]) -> str:
    with pytest.raises(WeightSyncError) as caught:
        call()
    return f"{type(caught.value).__name__}: {caught.value}"


def spoil_loader(model: torch.nn.Module, how: str, name: str) -> None:
    """From now on the model's load_weights leaves `name` out, or fails there."""
    load = type(model).load_weights

    def load_weights(weights: Any) -> Any:
        def some() -> Iterator[tuple[str, torch.Tensor]]:
            for key, tensor in weights:
                if key == name and how == "raise":
                    raise ValueError("no such expert")
                if key != name:
                    yield key, tensor

        return load(model, some())

    model.load_weights = load_weights  # type: ignore[method-assign]


def test_a_loader_that_drops_a_tensor_or_fails_leaves_the_engine_paused_until_a_complete_sync(pair: Any, engines: Any) -> None:
    (_, a), (plain_b, b) = pair("qwen3_moe", CHANNEL)
    engine, want = engines(a), state(loaded(b))
    model = engine.replicas[0].model
    before, where = engine.state(), places(engine.replicas[0])
    said: dict[str, str] = {}

    def session(to: To = To.LOADER, budget: int = 200_000) -> WeightSync:
        return engine.session(a, plain_b, Landing(to, budget), TP1, Level.DIGEST)

    def stood(sync: WeightSync) -> tuple[int, str, bool]:
        return sync.version, engine.version, engine.serving

    for name, landing in {"live": (To.LIVE, 200_000), "small": (To.AUTO, 4096)}.items():
        sync = session(*landing)
        said[name] = attempt(sync.connect)
        assert stood(sync) == (-1, "default", True)
    sync = session()
    sync.connect()
    tensor = "model.layers.1.self_attn.v_proj.weight"
    for how in ("drop", "raise"):
        spoil_loader(model, how, tensor)
        said[how] = attempt(lambda: sync.sync(1))
        assert stood(sync) == (-1, "default", False)
        # What it reads is where it was, with weights that nobody vouches for.
        assert places(engine.replicas[0]) == where
        if how == "raise":
            said["rehearsed"] = attempt(sync.connect)
        del model.load_weights
        sync.connect()
    assert engine.state() != before
    assert attempt(lambda: engine.adapter.resume(Receipt("e0", "s", 1, "d"), Deadline.after(20))).startswith("Session")
    sync.sync(1)

    assert "weight_sync.landing.to=live writes into live tensors only" in said["live"]
    assert "self_attn.qkv_proj.weight: post-processing transposed it" in said["live"]
    assert "weight_sync.landing.budget=4096" in said["small"]
    assert said["drop"].startswith("VerifyError")
    assert f"{tensor}: 0 elements were copied" in said["drop"]
    assert "SGLang's own loader failed: ValueError: no such expert" in said["raise"]
    assert "could not be recorded: ValueError: no such expert" in said["rehearsed"]
    assert stood(sync) == (1, "1", True)
    assert engine.state() == [want]
    assert places(engine.replicas[0]) == where


def test_weights_that_are_no_longer_where_graphs_were_captured_are_refused_before_a_pause(
    pair: Any, engines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (_, a), (plain_b, b) = pair("qwen3_moe", CHANNEL)
    monkeypatch.setattr(known, "captures", lambda scheduler: True)
    engine = engines(a)
    engine.session(a, plain_b, Landing(), TP1, Level.DIGEST).sync(1)
    assert engine.state() == [state(loaded(b))]
    layer = engine.replicas[0].model.model.layers[1].self_attn.o_proj
    layer.weight = torch.nn.Parameter(layer.weight.detach().clone(), requires_grad=False)  # as post-processing does it

    said = attempt(engine.session(a, plain_b, Landing(), TP1, Level.DIGEST).connect)

    assert "rollout rank 0: model.layers.1.self_attn.o_proj.weight: no longer where CUDA graphs were captured" in said
    assert said.startswith("BindError")
    assert (engine.version, engine.serving) == ("1", True)


def test_a_bind_that_is_refused_changes_nothing_for_the_plan_that_is_bound(pair: Any, engines: Any) -> None:
    (_, a), (plain_b, b) = pair("deepseek_v3", CHANNEL, rope_parameters=YARN)
    engine = engines(a)
    sync = engine.session(a, plain_b, Landing(budget=400_000), TP1, Level.DIGEST)
    sync.connect()
    other = {"expected": {"model.layers.0.self_attn.o_proj.weight": [[1], "bfloat16"]}}

    assert "nothing may be written into" in attempt(lambda: engine.adapter._workers.all("bind", other, Deadline.after(20)))
    sync.sync(1)

    assert engine.state() == [state(loaded(b))]
    assert (engine.version, engine.serving) == ("1", True)


def test_a_weight_update_of_sglangs_own_that_is_open_is_not_ended_over_post_processed_weights(pair: Any, engines: Any) -> None:
    (_, a), (plain_b, _) = pair("qwen3_moe", CHANNEL)
    engine = engines(a)
    before = engine.state()
    sync = engine.session(a, plain_b, Landing(), TP1, Level.DIGEST)
    sync.connect()
    engine.schedulers[0].weight_updater._session = object()

    assert "to end it would post-process weights once more" in attempt(lambda: sync.sync(1))
    assert (sync.version, engine.version, engine.serving) == (-1, "default", False)
    assert engine.state() == before
    assert not any("weight_update" in route for route in engine.log)


def broken(how: str) -> Callable[[Any, torch.nn.Module], None]:
    """CompressedTensorsW8A8Fp8's post-processing, with something that cannot be served."""
    from sglang.srt.layers.quantization.compressed_tensors.schemes import CompressedTensorsW8A8Fp8

    own = CompressedTensorsW8A8Fp8.process_weights_after_loading

    def process(scheme: Any, layer: torch.nn.Module) -> None:
        if how == "raises":
            raise RuntimeError("only once")
        own(scheme, layer)
        if how == "pads":
            wider = torch.nn.functional.pad(layer.weight.view(torch.uint8), (0, 8))
            layer.weight = torch.nn.Parameter(wider, requires_grad=False)
        if how == "rearranges":
            layer.weight = torch.nn.Parameter(layer.weight.contiguous(), requires_grad=False)
        if how == "adds":
            layer.late = torch.ones(3)
        if how == "flags":
            layer.largest = float(layer.weight_scale.max())

    return process


@pytest.mark.parametrize(
    ("how", "complaint"),
    [
        ("raises", "post-processing of model.layers.0.self_attn.qkv_proj cannot run again: RuntimeError: only once"),
        ("pads", "qkv_proj.weight: the engine reads float8_e4m3fn [128, 256] strides [1, 128], made is uint8"),
        ("rearranges", "qkv_proj.weight: the engine reads float8_e4m3fn [128, 256] strides [1, 128], made is float8_e4m3fn"),
        ("adds", "qkv_proj.late is made, and the engine holds no such tensor"),
    ],
)
def test_post_processing_that_does_not_make_what_the_engine_reads_is_refused_before_a_pause(
    pair: Any, engines: Any, monkeypatch: pytest.MonkeyPatch, how: str, complaint: str
) -> None:
    from sglang.srt.layers.quantization.compressed_tensors.schemes import CompressedTensorsW8A8Fp8

    (_, a), (plain_b, _) = pair("qwen3_moe", CHANNEL)
    engine = engines(a)
    before, where = engine.state(), places(engine.replicas[0])
    monkeypatch.setattr(CompressedTensorsW8A8Fp8, "process_weights_after_loading", broken(how))
    sync = engine.session(a, plain_b, Landing(), TP1, Level.DIGEST)

    said = attempt(sync.connect)

    assert said.startswith("BindError")
    assert complaint in said
    assert (sync.version, engine.version, engine.serving) == (-1, "default", True)
    assert not any("pause" in route for route in engine.log)
    assert engine.state() == before
    assert places(engine.replicas[0]) == where


def test_a_number_outside_of_tensors_that_depends_on_the_weights_fails_the_sync(
    pair: Any, engines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt.layers.quantization.compressed_tensors.schemes import CompressedTensorsW8A8Fp8

    (plain_a, a), (plain_b, _) = pair("qwen3_moe", CHANNEL)
    monkeypatch.setattr(CompressedTensorsW8A8Fp8, "process_weights_after_loading", broken("flags"))
    engine = engines(a)
    engine.session(a, plain_a, Landing(), TP1, Level.DIGEST).sync(1)  # the same weights: the same number

    sync = engine.session(a, plain_b, Landing(), TP1, Level.DIGEST)
    sync.connect()
    said = attempt(lambda: sync.sync(2))

    assert "self_attn.qkv_proj.largest was " in said
    assert said.startswith("VerifyError")
    assert (engine.version, engine.serving) == ("1", False)
