"""The real server: official SGLang on a CPU, tiny Qwen3-MoE in bf16. A server starts in about a minute."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

sys.path.insert(0, str(Path(__file__).parents[1]))
from own_loader_support import trainer_ranks

from weight_sync.config import engine_yaml, family_for, family_yaml
from weight_sync.errors import RolloutError, SessionError
from weight_sync.ids import Deadline
from weight_sync.session.connect import SyncSpec
from weight_sync.session.contracts import Receipt
from weight_sync.session.inprocess import InProcessTrainers
from weight_sync.session.inputs import Declared
from weight_sync.session.landing import Landing, To
from weight_sync.session.memory import Memory
from weight_sync.session.session import Timeouts, WeightSync
from weight_sync.session.source import SourceAgent
from weight_sync.transport.base import Batch, Endpoint, Region
from weight_sync.transport.cma import CmaTransport
from weight_sync_integrations.sglang.engine import SglangEngine
from weight_sync_integrations.sglang.launch import Server, ServerSpec, new_token, start
from weight_sync_integrations.sglang.replica import EngineSizes, build_replica, read_checkpoint

Make = Callable[..., Path]
PROMPT = [5, 17, 40, 101, 7]
START_SECONDS = 450.0
pytestmark = pytest.mark.timeout(900)


def soon() -> Deadline:
    return Deadline.after(90)


def serve(model: Path, log: Path, **sizes: int) -> tuple[Server, SglangEngine, str]:
    token = new_token()
    spec = ServerSpec(
        model=str(model),
        token=token,
        python=sys.executable,
        log=str(log),
        max_total_tokens=512,
        transport={"name": "cma", "any_tracer": True},
        **sizes,
    )
    server = start(spec, Deadline.after(START_SECONDS))
    return server, SglangEngine(server.name, server.url, server.workers, token), token


def session_members(leader: int) -> list[int]:
    """Ids of living processes in the session that `leader` opened."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue  # it ended while we looked
            if int(fields[3]) == leader and fields[0] != "Z":
                found.append(int(entry.name))
    return found


def until_busy(engine: SglangEngine) -> None:
    deadline = soon()
    while engine.state(deadline)[0]["idle"]:
        time.sleep(0.05)


@pytest.fixture(scope="module")
def first(checkpoint: Make) -> Path:
    return checkpoint("qwen3_moe", seed=1, num_hidden_layers=2)


@pytest.fixture(scope="module")
def second(checkpoint: Make) -> Path:
    return checkpoint("qwen3_moe", seed=2, num_hidden_layers=2)


@pytest.fixture(scope="module")
def tp2(first: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, SglangEngine, str]]:
    server, engine, token = serve(first, tmp_path_factory.mktemp("tp2") / "log", tp=2)
    yield server, engine, token
    engine.close()
    server.stop()


@pytest.fixture
def engine(tp2: tuple[Server, SglangEngine, str]) -> SglangEngine:
    return tp2[1]


class Writer:
    """Holds a checkpoint as every rank shall hold it, and writes all of it into the engine's live parameters."""

    def __init__(self, engine: SglangEngine, checkpoint: Path, sizes: EngineSizes) -> None:
        tensors = read_checkpoint(checkpoint)
        self.engine = engine
        self.memory: dict[int, Memory] = {}
        for rank in range(sizes.world):
            replica = build_replica(checkpoint, rank, sizes)
            replica.load(tensors)
            self.memory[rank] = Memory(replica.tensors(), f"replica {rank}")
        self.bound: dict[int, dict[str, Any]] = {}

    def bind(self, plan: str) -> dict[int, int]:
        tables = {}
        for rank, memory in self.memory.items():
            params = memory.params
            tables[rank] = {
                "plan": plan,
                "params": [p.name for p in params],
                "start": [0] * len(params),
                "strides": [list(p.stride) for p in params],
                "shape": [list(p.shape) for p in params],
                "expected": {p.name: [list(p.shape), p.dtype] for p in params},
                "stage_bytes": 0,
                "rounds": [],
            }
        self.bound = self.engine.bind(tables, soon())
        return {rank: answer["epoch"] for rank, answer in self.bound.items()}

    def write(self) -> None:
        transport = CmaTransport(any_tracer=True)
        try:
            for rank, memory in self.memory.items():
                names = [p.name for p in memory.params]
                sizes = [int(np.prod(p.shape)) * 2 for p in memory.params]
                transport.register([Region(s.address, s.nbytes) for s in memory.storages])
                endpoint = Endpoint.from_json(self.bound[rank]["endpoint"])
                transport.probe(endpoint, soon())
                batch = Batch(
                    endpoint,
                    np.array([memory.address(name) for name in names], np.int64),
                    np.array([self.bound[rank]["addresses"][name] for name in names], np.int64),
                    np.array(sizes, np.int64),
                    names,
                )
                transport.wait(transport.write(batch), soon())
        finally:
            transport.close()

    def digests(self) -> dict[int, str]:
        def of(memory: Memory) -> str:
            views = [memory.view(p.name, 0, p.stride, p.shape) for p in memory.params]
            return "".join(xxhash.xxh3_64_hexdigest(np.ascontiguousarray(view)) for view in views)

        return {rank: of(memory) for rank, memory in self.memory.items()}

    def sync(self, session: str, version: int) -> Receipt:
        epochs = self.bind(f"plan of {session}")
        self.engine.pause("retract", soon())
        self.engine.begin(session, version, f"plan of {session}", epochs, soon())
        self.write()
        assert self.engine.verify(session, soon()) == self.digests()
        receipt = self.engine.finish(session, version, "all equal", soon())
        self.engine.resume(receipt, soon())
        return receipt


def test_both_workers_describe_themselves_and_record_the_whole_checkpoint(engine: SglangEngine, first: Path) -> None:
    description = engine.describe(soon())

    assert description.refusals == ()
    assert description.pause_modes == ("abort", "retract", "in_place")
    assert description.model["model_type"] == "qwen3_moe"
    assert (description.sizes["tp"], description.sizes["pp"], description.version) == (2, 1, -1)
    assert [(r.rank, r.coords["tp"], r.coords["moe_tp"]) for r in description.ranks] == [(0, 0, 0), (1, 1, 1)]
    tensors = read_checkpoint(first)
    for rank in description.ranks:
        replica = build_replica(first, rank.rank, EngineSizes(tp=2))
        assert {p.name: p.shape for p in rank.params} == {n: tuple(t.shape) for n, t in replica.tensors().items()}

    assert engine.generate_stamped(PROMPT, 2, soon())[1] == [("default", 0, 2)]
    for entries in engine.inventory(None, soon()).values():  # after a request: what is made lazily is there
        assert {entry["keep"] for entry in entries} == {"synced", "constant"}

    before = engine.generate(PROMPT, 8, soon())
    shapes = {name: (list(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in tensors.items()}
    recorded = engine.record(shapes, soon())

    for rank, answer in recorded.items():
        assert (answer["unexplained"], answer["uncovered"], answer["unread"]) == ({}, {}, []), rank
    cut = {rank: [s for s in answer["shards"] if s["tensor"] == "lm_head.weight"] for rank, answer in recorded.items()}
    assert [cut[rank][0]["offset"] for rank in (0, 1)] == [[0, 0], [128, 0]]
    assert engine.generate(PROMPT, 8, soon()) == before, "a recording changed what the engine says"


def test_the_inventory_command_looks_at_a_running_server(
    tp2: tuple[Server, SglangEngine, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from weight_sync_integrations.inventory_command import run

    server, _, token = tp2
    monkeypatch.setenv("WEIGHT_SYNC_TOKEN", token)
    workers = ",".join(f"{w.host}:{w.port}" for w in server.workers)

    assert run(["sglang", f"url={server.url}", f"workers={workers}"]) == 0
    table = capsys.readouterr().out
    assert "RotaryEmbedding.cos_sin_cache" in table
    assert "tensors on 2 workers: 2 constant, " in table

    assert run(["sglang", f"url={server.url}", f"workers={workers}", "output=json"]) == 0
    rows = json.loads(capsys.readouterr().out)["tensors"]
    assert {row["rank"] for row in rows} == {0, 1}
    assert {row["keep"] for row in rows} == {"synced", "constant"}
    assert token not in table


def test_written_weights_give_the_tokens_that_a_load_from_disk_gives(engine: SglangEngine, first: Path, second: Path) -> None:
    engine.load_from_disk(str(first), soon())
    old = engine.generate(PROMPT, 12, soon())

    receipt = Writer(engine, second, EngineSizes(tp=2)).sync("s1", 11)
    written = engine.generate(PROMPT, 12, soon())

    assert engine.describe(soon()).version == receipt.version == 11
    assert written != old
    engine.load_from_disk(str(second), soon())
    assert engine.generate(PROMPT, 12, soon()) == written
    engine.load_from_disk(str(first), soon())
    assert engine.generate(PROMPT, 12, soon()) == old


def test_a_paused_engine_answers_nothing_until_its_receipt_resumes_it(engine: SglangEngine, second: Path) -> None:
    writer = Writer(engine, second, EngineSizes(tp=2))
    receipt = writer.sync("s2", 12)
    engine.pause("retract", soon())
    answers: list[list[int]] = []
    asking = threading.Thread(target=lambda: answers.append(engine.generate(PROMPT, 4, soon())))
    asking.start()
    asking.join(timeout=2.0)

    assert asking.is_alive()
    with pytest.raises(SessionError, match="receipt"):
        engine.resume(Receipt(engine.name, "s2", 13, "all equal"), soon())
    assert asking.is_alive()

    engine.resume(receipt, soon())
    asking.join(timeout=60)
    assert answers == [engine.generate(PROMPT, 4, soon())]


def test_a_running_request_survives_a_commit_and_says_which_tokens_came_from_which_version(
    engine: SglangEngine, first: Path, second: Path
) -> None:
    Writer(engine, second, EngineSizes(tp=2)).sync("s3", 13)
    expected = engine.generate(PROMPT, 60, soon())
    other = Writer(engine, first, EngineSizes(tp=2))
    answers: list[tuple[list[int], list[tuple[str, int, int]]]] = []
    asking = threading.Thread(target=lambda: answers.append(engine.generate_stamped(PROMPT, 60, soon())))
    asking.start()
    until_busy(engine)
    receipt = other.sync("s3b", 131)
    asking.join(timeout=90)

    # The retracted part is computed anew in one piece, with the new weights; the request must not be lost.
    ((tokens, spans),) = answers
    (old, start, cut), (new, again, end) = spans
    assert (old, new, start, cut, end) == ("13", "131", 0, again, 60)
    assert tokens[: min(cut, 4)] == expected[: min(cut, 4)]
    assert engine.generate_stamped(PROMPT, 4, soon())[1] == [("131", 0, 4)]

    undisturbed = engine.generate(PROMPT, 60, soon())
    asking = threading.Thread(target=lambda: answers.append(engine.generate_stamped(PROMPT, 60, soon())))
    asking.start()
    until_busy(engine)
    engine.pause("in_place", soon())
    asking.join(timeout=1.0)
    assert asking.is_alive(), "a request went on under an in_place pause"
    engine.resume(receipt, soon())
    asking.join(timeout=90)
    assert answers[1] == (undisturbed, [("131", 0, 60)])


def test_an_aborted_session_leaves_the_engine_paused_and_a_complete_one_brings_it_back(
    engine: SglangEngine, first: Path, second: Path
) -> None:
    writer = Writer(engine, second, EngineSizes(tp=2))
    epochs = writer.bind("p")
    engine.pause("abort", soon())
    engine.begin("s4", 14, "p", epochs, soon())

    engine.abort("s4", "the drill", soon())

    description = engine.describe(soon())
    assert description.software["suspended"] == "the drill"
    assert description.version != 14
    assert all(state["paused"] and state["suspect"] for state in engine.state(soon()).values())
    with pytest.raises(SessionError, match="suspect"):
        engine.resume(Receipt(engine.name, "s4", 14, "x"), soon())

    writer.sync("s5", 15)
    tokens = engine.generate(PROMPT, 12, soon())
    engine.load_from_disk(str(second), soon())
    assert engine.generate(PROMPT, 12, soon()) == tokens


def test_a_wrong_token_gets_nothing_from_a_worker(tp2: tuple[Server, SglangEngine, str]) -> None:
    server, engine, token = tp2
    stranger = SglangEngine(server.name, server.url, server.workers, token[:-1])
    with pytest.raises(RolloutError, match="401 Unauthorised"):
        stranger.describe(soon())
    assert token not in server.tail(2000)
    command_lines = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in session_members(server.process.process.pid)]
    assert command_lines
    assert not any(token.encode() in line for line in command_lines)
    assert engine.generate(PROMPT, 2, soon())


def test_weights_cannot_be_touched_while_the_engine_generates(engine: SglangEngine, second: Path) -> None:
    epochs = Writer(engine, second, EngineSizes(tp=2)).bind("q")
    asking = threading.Thread(target=lambda: engine.generate(PROMPT, 60, soon()))
    asking.start()
    until_busy(engine)
    payload = {"session": "s6", "version": 1, "plan": "q", "epoch": epochs[0]}
    with pytest.raises(SessionError, match="the engine is generating"):
        engine.call("begin", payload, soon())
    asking.join(timeout=90)


def test_weights_that_sglangs_own_loader_places_give_the_tokens_that_a_load_from_disk_gives(
    engine: SglangEngine, first: Path, second: Path
) -> None:
    engine.load_from_disk(str(second), soon())
    want = engine.generate(PROMPT, 16, soon())
    engine.load_from_disk(str(first), soon())
    before = engine.generate(PROMPT, 16, soon())
    assert before != want
    config = json.loads((first / "config.json").read_text())
    convention = engine_yaml("sglang")
    dims = {"tp": 2, "remainder": convention["remainder"]}
    rollout = Declared(family_yaml(family_for(config)), config, dims, convention)
    agents = [SourceAgent(rank, partial(CmaTransport, any_tracer=True)) for rank in trainer_ranks(second)]
    spec = SyncSpec(None, rollout, landing=Landing(To.LOADER, 300_000))
    limits = Timeouts(connect=90, sync=90, abort=60)
    sync = WeightSync(InProcessTrainers(agents), [engine], spec, pause="retract", timeouts=limits)

    connection = sync.connect()
    assert len(connection.schedule.waves) > 1
    assert engine.generate(PROMPT, 16, soon()) == before, "connecting changed what the engine says"
    sync.sync(50)
    assert engine.generate(PROMPT, 16, soon()) == want
    sync.check_weight_equal(51)
    assert engine.generate_stamped(PROMPT, 16, soon()) == (want, [("51", 0, 16)])


def test_two_pipeline_stages_are_told_apart_and_stopping_ends_every_process(
    tp2: tuple[Server, SglangEngine, str], first: Path, tmp_path: Path
) -> None:
    tp2[0].stop()
    assert session_members(tp2[0].process.process.pid) == []
    server, engine, _ = serve(first, tmp_path / "log", pp=2)
    try:
        description = engine.describe(soon())
        assert [(r.rank, r.coords["pp"], r.coords["tp"]) for r in description.ranks] == [(0, 0, 0), (1, 1, 0)]
        assert description.pause_modes == ("abort",)
        stages = [{p.name for p in rank.params} for rank in description.ranks]
        assert "model.embed_tokens.weight" in stages[0] - stages[1]
        assert "model.norm.weight" in stages[1] - stages[0]
        assert stages[0] & stages[1] == {"lm_head.weight"}  # Qwen3-MoE builds it on every stage

        old = engine.generate(PROMPT, 6, soon())
        writer = Writer(engine, first, EngineSizes(pp=2))
        epochs = writer.bind("p")
        engine.pause("abort", soon())
        engine.begin("s1", 3, "p", epochs, soon())
        writer.write()
        assert engine.verify("s1", soon()) == writer.digests()
        engine.resume(engine.finish("s1", 3, "equal", soon()), soon())
        assert engine.generate(PROMPT, 6, soon()) == old
    finally:
        engine.close()
        server.stop()
    assert session_members(server.process.process.pid) == []
