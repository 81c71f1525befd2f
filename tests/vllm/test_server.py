"""A real vLLM HTTP server with two tensor-parallel workers, driven through VllmEngine; weights are written with `cma`.

The tests share one server and run in file order. Each leaves it generating.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from tests.own_loader_support import trainer_ranks
from tests.vllm.conftest import NEW_TOKENS, PROMPTS, greedy_transformers
from tests.vllm.test_live_weights import Layout, hand_slices, read_checkpoint
from weight_sync.config import engine_yaml, family_for, family_yaml
from weight_sync.errors import BindError, RolloutError, SessionError
from weight_sync.ids import Deadline
from weight_sync.session.connect import SyncSpec
from weight_sync.session.contracts import Receipt
from weight_sync.session.inprocess import InProcessTrainers
from weight_sync.session.inputs import Declared
from weight_sync.session.landing import Landing, To
from weight_sync.session.session import Timeouts, WeightSync
from weight_sync.session.source import SourceAgent
from weight_sync.transport import registry
from weight_sync.transport.base import Batch, Endpoint, Region
from weight_sync_integrations.server import Server
from weight_sync_integrations.vllm.engine import PAUSE_MODES, VllmEngine
from weight_sync_integrations.vllm.launch import ServerSpec, start

LAYOUT = Layout("qwen3_moe", tp=2, ep=True)
TOKEN = "server-token"

# The server imports vLLM in four processes; the first test waits for that.
pytestmark = pytest.mark.timeout(480)


def soon() -> Deadline:
    return Deadline.after(60)


@pytest.fixture(scope="module")
def folders(checkpoints: Callable[..., Path]) -> list[Path]:
    return [checkpoints(LAYOUT.kind, seed=seed) for seed in (0, 1)]


@pytest.fixture(scope="module")
def references(folders: list[Path], forked: Callable[..., Any]) -> list[list[list[int]]]:
    return [forked(greedy_transformers, folder) for folder in folders]


@pytest.fixture(scope="module")
def server(folders: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    spec = ServerSpec(
        model=str(folders[0]),
        token=TOKEN,
        name="vllm-test",
        tp=2,
        ep=2,
        dtype="float32",
        max_model_len=256,
        max_num_seqs=4,
        kv_cache_bytes=32 << 20,
        log=str(tmp_path_factory.mktemp("server") / "server.log"),
        transport={"name": "cma", "any_tracer": True},
    )
    with start(spec, Deadline.after(400)) as running:
        yield running


@pytest.fixture
def engine(server: Server) -> Iterator[VllmEngine]:
    made = VllmEngine(server.name, server.url, TOKEN)
    yield made
    made.close()


def generated(engine: VllmEngine) -> list[list[int]]:
    return [engine.generate(prompt, NEW_TOKENS, soon()) for prompt in PROMPTS]


def tables(engine: VllmEngine) -> dict[int, dict[str, Any]]:
    """One transfer for each live parameter, whole."""
    made = {}
    for rank in engine.describe(soon()).ranks:
        made[rank.rank] = {
            "plan": "by-hand",
            "rank": rank.rank,
            "tensors": [param.name for param in rank.params],
            "params": [param.name for param in rank.params],
            "start": [0] * len(rank.params),
            "strides": [list(param.stride) for param in rank.params],
            "shape": [list(param.shape) for param in rank.params],
            "expected": {param.name: [list(param.shape), param.dtype] for param in rank.params},
            "stage_bytes": 0,
            "rounds": [[]],
        }
    return made


def write(folder: Path, bindings: dict[int, dict[str, Any]], only: int | None = None) -> dict[int, str]:
    """Write a checkpoint's slices one-sided into every bound worker (or `only` the first few). -> digests of the source."""
    digests: dict[int, str] = {}
    transport = registry.create("cma")
    for rank, binding in bindings.items():
        slices = hand_slices(*read_checkpoint(folder), LAYOUT, rank)
        names = list(binding["addresses"])
        arrays = [np.ascontiguousarray(slices[name].numpy()) for name in names]
        transport.register([Region(array.ctypes.data, array.nbytes) for array in arrays])
        endpoint = Endpoint.from_json(binding["endpoint"])
        transport.probe(endpoint, soon())
        batch = Batch(
            endpoint=endpoint,
            local=np.array([array.ctypes.data for array in arrays][:only]),
            remote=np.array([binding["addresses"][name] for name in names][:only]),
            nbytes=np.array([array.nbytes for array in arrays][:only]),
            tensors=names[:only],
        )
        transport.wait(transport.write(batch), soon())
        digests[rank] = "".join(xxhash.xxh3_64_hexdigest(array) for array in arrays)
    transport.close()
    return digests


def begun(engine: VllmEngine, session: str, version: int) -> dict[int, dict[str, Any]]:
    bindings = engine.bind(tables(engine), soon())
    engine.pause("keep", soon())
    engine.begin(session, version, "by-hand", {rank: b["epoch"] for rank, b in bindings.items()}, soon())
    return bindings


def test_describe_lists_every_worker_with_the_shapes_the_checkpoint_implies(
    engine: VllmEngine, folders: list[Path], references: Any
) -> None:
    about = engine.describe(soon())
    assert about.refusals == ()
    assert about.kind == "vllm"
    assert about.version == -1
    assert about.pause_modes == PAUSE_MODES
    assert about.model["architectures"] == ["Qwen3MoeForCausalLM"]
    assert {axis: about.sizes[axis] for axis in ("tp", "pp", "moe_ep", "moe_tp")} == {
        "tp": 2, "pp": 1, "moe_ep": 2, "moe_tp": 1,
    }  # fmt: skip
    assert [rank.rank for rank in about.ranks] == [0, 1]
    assert about.ranks[0].epoch != about.ranks[1].epoch
    for rank in about.ranks:
        expected = hand_slices(*read_checkpoint(folders[0]), LAYOUT, rank.rank)
        assert {param.name: (param.shape, param.dtype) for param in rank.params} == {
            name: (tuple(tensor.shape), "float32") for name, tensor in expected.items()
        }
    assert generated(engine) == references[0]
    for entries in engine.inventory(None, soon()).values():  # after a request: what is made lazily is there
        assert {entry["keep"] for entry in entries} == {"synced", "constant", "state"}


def test_the_inventory_command_looks_at_a_running_server(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from weight_sync_integrations.inventory_command import run

    monkeypatch.setenv("WEIGHT_SYNC_TOKEN", TOKEN)
    assert run(["vllm", f"url={server.url}"]) == 0
    table = capsys.readouterr().out
    assert "Attention.kv_cache" in table

    assert run(["vllm", f"url={server.url}", "output=json"]) == 0
    rows = json.loads(capsys.readouterr().out)["tensors"]
    assert {row["rank"] for row in rows} == {0, 1}
    assert {row["keep"] for row in rows} == {"synced", "constant", "state"}


def test_another_jobs_token_is_refused_by_every_worker_and_harms_nothing(server: Server, engine: VllmEngine) -> None:
    stranger = VllmEngine(server.name, server.url, "another-token")
    with pytest.raises(RolloutError, match=r"2 of 2 workers.*wrong token"):
        stranger.describe(soon())
    with pytest.raises(RolloutError, match="wrong token"):
        stranger.abort("s", "not mine", soon())
    stranger.close()
    assert [rank.rank for rank in engine.describe(soon()).ranks] == [0, 1]


def test_nothing_of_a_session_is_allowed_on_a_running_engine(engine: VllmEngine) -> None:
    with pytest.raises(SessionError, match="needs a paused engine"):
        engine.begin("s", 1, "by-hand", {0: 0, 1: 0}, soon())
    with pytest.raises(SessionError, match="before verify"):
        engine.finish("s", 1, "d", soon())
    with pytest.raises(SessionError, match="cannot pause with mode 'in_place'"):
        engine.pause("in_place", soon())
    with pytest.raises(SessionError, match="committed nothing"):
        engine.resume(Receipt(engine=engine.name, session="s", version=1, digest="d"), soon())
    assert not engine.is_paused(soon())


def test_a_worker_refuses_a_plan_for_other_shapes_before_anything_is_paused(engine: VllmEngine) -> None:
    made = tables(engine)
    made[1]["expected"]["model.norm.weight"] = [[64], "float32"]
    with pytest.raises(BindError, match=r"rollout rank 1.*model.norm.weight"):
        engine.bind(made, soon())
    assert not engine.is_paused(soon())


def test_a_session_replaces_weights_under_a_running_request_and_stamps_the_version(
    server: Server, engine: VllmEngine, folders: list[Path], references: Any
) -> None:
    answers: list[tuple[list[int], list[tuple[str, int, int]]]] = []
    other, enough = VllmEngine(server.name, server.url, TOKEN), threading.Event()

    def ask() -> None:
        """One request after another, so that one is under way when the engine is paused, however fast it is."""
        while not enough.is_set():
            answers.append(other.generate_stamped([1, 2, 3], 200, soon()))

    requests = threading.Thread(target=ask)
    requests.start()

    bindings = begun(engine, "first", 7)
    with pytest.raises(SessionError, match="while first is open"):
        engine.begin("second", 8, "by-hand", {rank: b["epoch"] for rank, b in bindings.items()}, soon())
    source = write(folders[1], bindings)
    with pytest.raises(SessionError, match="before verify"):
        engine.finish("first", 7, "d", soon())
    assert engine.verify("first", soon()) == source
    with pytest.raises(SessionError, match="suspect weights"):
        engine.resume(Receipt(engine=engine.name, session="first", version=7, digest="d"), soon())
    receipt = engine.finish("first", 7, "d", soon())
    assert receipt == Receipt(engine=engine.name, session="first", version=7, digest="d")
    assert engine.is_paused(soon())
    assert engine.version(soon()) == 7
    with pytest.raises(SessionError, match="does not fit"):
        engine.resume(Receipt(engine=engine.name, session="first", version=8, digest="d"), soon())
    engine.resume(receipt, soon())

    assert generated(engine) == references[1]
    enough.set()
    requests.join(60)
    other.close()
    versions: list[str] = []
    for tokens, spans in answers:
        assert len(tokens) == 200
        assert [start for _, start, _ in spans] == [0, *(end for _, _, end in spans[:-1])], "every token has one version"
        assert spans[-1][2] == 200
        versions += [version for version, _, _ in spans]
    assert versions == sorted(versions, key=["default", "7"].index), "an older version after a newer one"
    assert versions[-1] == "7"
    assert engine.generate_stamped(PROMPTS[0], 2, soon())[1] == [("7", 0, 2)]


def test_an_aborted_session_leaves_the_engine_paused_until_a_complete_one_commits(
    engine: VllmEngine, folders: list[Path], references: Any
) -> None:
    bindings = begun(engine, "broken", 8)
    write(folders[0], bindings, only=3)
    engine.abort("broken", "VerifyError: for this test", soon())
    assert engine.is_paused(soon())
    about = engine.describe(soon())
    assert about.version == 7
    assert about.software["suspended"] == "VerifyError: for this test"
    with pytest.raises(SessionError, match="suspect weights"):
        engine.resume(Receipt(engine=engine.name, session="first", version=7, digest="d"), soon())
    with pytest.raises(SessionError, match="before verify"):
        engine.finish("broken", 8, "d", soon())

    bindings = begun(engine, "whole", 9)
    assert write(folders[0], bindings) == engine.verify("whole", soon())
    engine.resume(engine.finish("whole", 9, "d", soon()), soon())
    assert "suspended" not in engine.describe(soon()).software
    assert engine.version(soon()) == 9
    assert generated(engine) == references[0]


def test_loading_from_disk_changes_tokens_but_no_version_and_voids_the_receipt(
    engine: VllmEngine, folders: list[Path], references: Any
) -> None:
    engine.load_from_disk(str(folders[1]), soon())
    assert generated(engine) == references[1]
    assert engine.version(soon()) == 9
    with pytest.raises(SessionError, match="committed nothing"):
        engine.resume(Receipt(engine=engine.name, session="whole", version=9, digest="d"), soon())


def test_recording_over_http_covers_every_worker(engine: VllmEngine, folders: list[Path]) -> None:
    hf, _ = read_checkpoint(folders[0])
    recordings = engine.record({name: (list(t.shape), "float32") for name, t in hf.items()}, soon())
    assert sorted(recordings) == [0, 1]
    for recording in recordings.values():
        assert recording["unexplained"] == {}
        assert recording["uncovered"] == {}
    used = [{shard["tensor"] for shard in recordings[rank]["shards"]} for rank in (0, 1)]
    assert used[0] | used[1] == set(hf)
    assert used[0] != used[1]


def test_a_request_of_many_megabytes_reaches_every_worker_and_its_answer_comes_back(engine: VllmEngine) -> None:
    # More than the 16 MiB of one chunk of vLLM's queue between the engine core and its workers.
    name = "model.layers.0.input_layernorm.weight"
    many = {f"{name}.{i:06d}{'x' * 200}": [[8], "float32"] for i in range(100_000)}
    made = tables(engine)
    assert len(json.dumps(many)) > 20 << 20
    made[0]["expected"] = many
    with pytest.raises(BindError, match=r"rank 0.*the declared layout is not the live one"):
        engine.bind(made, soon())
    assert engine.bind(tables(engine), soon()).keys() == {0, 1}


def test_an_incomplete_checkpoint_folder_is_refused_by_name_and_the_engine_stays_paused(
    engine: VllmEngine, folders: list[Path], tmp_path: Path
) -> None:
    from safetensors.torch import save_file

    hf, _ = read_checkpoint(folders[0])
    del hf["model.norm.weight"]
    save_file(hf, tmp_path / "model.safetensors")
    with pytest.raises(BindError, match=r"holds nothing for: model\.norm\.weight"):
        engine.load_from_disk(str(tmp_path), soon())
    assert engine.is_paused(soon())

    bindings = begun(engine, "repair", 10)
    assert write(folders[0], bindings) == engine.verify("repair", soon())
    engine.resume(engine.finish("repair", 10, "d", soon()), soon())


def test_weights_that_vllms_own_loader_places_over_http_give_the_tokens_of_the_checkpoint(
    engine: VllmEngine, folders: list[Path], references: Any
) -> None:
    before = generated(engine)
    assert before == references[0]
    config = json.loads((folders[0] / "config.json").read_text())
    convention = engine_yaml("vllm")
    dims = {"tp": 2, "moe_ep": 2, "remainder": convention["remainder"]}
    rollout = Declared(family_yaml(family_for(config)), config, dims, convention)
    agents = [SourceAgent(rank, partial(registry.create, "cma", any_tracer=True)) for rank in trainer_ranks(folders[1])]
    spec = SyncSpec(None, rollout, landing=Landing(To.LOADER, 800_000))
    limits = Timeouts(connect=90, sync=90, abort=60)
    sync = WeightSync(InProcessTrainers(agents), [engine], spec, pause="keep", timeouts=limits)

    connection = sync.connect()
    assert len(connection.schedule.waves) > 1
    assert generated(engine) == before, "connecting changed what the engine says"
    sync.sync(50)
    assert generated(engine) == references[1]
    sync.check_weight_equal(51)
    assert generated(engine) == references[1]
    assert engine.version(soon()) == 51
