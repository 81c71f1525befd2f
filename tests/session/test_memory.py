"""Live arrays as bytes: regions, digests, and what cannot be addressed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from weight_sync.errors import BindError, SessionError, VerifyError
from weight_sync.session import digests, memory
from weight_sync.session.inprocess import typed
from weight_sync.session.memory import Memory, Staging
from weight_sync.session.state import TRANSITIONS, Machine, State
from weight_sync.session.tables import merge_digests


def digest(region: np.ndarray[Any, Any]) -> str:
    found = digests.HostDigests(digests.XXH3)
    found.add("region", region)
    return found.hex(["region"])[0]


def tensor(array: np.ndarray[Any, Any], dtype: str = "float32", device: str = "cpu", cut: int = 0) -> Any:
    """Looks like a torch tensor over an array; its storage ends `cut` bytes too early."""
    size = array.itemsize
    storage = SimpleNamespace(data_ptr=lambda: int(array.ctypes.data), nbytes=lambda: array.nbytes - cut)
    return SimpleNamespace(
        shape=array.shape,
        dtype=f"torch.{dtype}",
        device=SimpleNamespace(type=device),
        stride=lambda: tuple(s // size for s in array.strides),
        storage_offset=lambda: 0,
        element_size=lambda: size,
        untyped_storage=lambda: storage,
    )


A = np.arange(24, dtype=np.float32).reshape(4, 6)


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (tensor(A, device="xpu"), "is on device xpu; known: cpu, cuda"),
        (tensor(A, dtype="complex64"), "has dtype complex64; known: float64"),
        (tensor(A, cut=A.nbytes), "has elements but an empty storage"),
        (tensor(A, cut=1), "needs 96 bytes of its storage, which has 95"),
    ],
    ids=["device", "dtype", "empty", "short"],
)
def test_a_tensor_that_cannot_be_addressed_is_refused_with_name_and_reason(bad: Any, reason: str) -> None:
    with pytest.raises(BindError, match=f"trainer rank 3: 1 of 2 parameters cannot be addressed: w.bad {reason}"):
        Memory({"w.good": tensor(A), "w.bad": bad}, "trainer rank 3")


def test_tensors_of_one_storage_share_it_and_know_their_offset() -> None:
    base = np.zeros(100, np.float32)
    m = Memory({"a": base[:10], "b": base[10:30].reshape(4, 5)}, "here")
    assert len(m.storages) == 1
    assert m.storages[0].nbytes == 400
    assert [p.offset for p in m.params] == [0, 40]
    assert m.address("b") - m.address("a") == 40


def test_a_parameter_that_is_not_contiguous_is_refused_by_name_with_its_stride() -> None:
    m = Memory({"w": A.T}, "rollout rank 2")
    with pytest.raises(BindError, match=r"rollout rank 2: w has shape \[6, 4\] and stride \[1, 6\]; only row-major"):
        m.address("w")


@pytest.mark.parametrize(("start", "strides", "shape"), [(20, [1], [5]), (-1, [1], [2]), (0, [6, 1], [5, 1])])
def test_a_region_that_leaves_its_parameter_is_refused(start: int, strides: list[int], shape: list[int]) -> None:
    with pytest.raises(BindError, match="leave w, which has 24"):
        Memory({"w": A}, "here").view("w", start, strides, shape)


def test_an_unknown_parameter_is_named_with_those_there_are() -> None:
    with pytest.raises(BindError, match="here has no parameter x; it has w"):
        Memory({"w": A}, "here").address("x")


def test_what_moved_is_told_by_name() -> None:
    one, two = np.zeros(4, np.float32), np.zeros(4, np.float32)
    m = Memory({"a": one, "b": two}, "here")
    assert m.moved({"a": one, "b": two}) is None
    assert m.moved({"a": one, "b": np.zeros(4, np.float32)}) == "b"
    assert m.moved({"a": two, "b": one}) == "a, b"
    assert m.moved({"a": one}) == "b"
    assert m.moved({"a": one, "b": two.reshape(2, 2)}) == "b"
    assert m.moved({"b": two, "a": one}) is None


@pytest.mark.parametrize(("what", "other"), [("stride", lambda: (1, 4)), ("dtype", "torch.int32"), ("shape", (2, 8))])
def test_a_tensor_object_whose_elements_were_laid_out_anew_in_place_has_moved(what: str, other: Any) -> None:
    square = np.zeros((4, 4), np.float32)
    one = tensor(square)
    one.data_ptr = lambda: int(square.ctypes.data)
    m = Memory({"w": one}, "here")
    assert m.moved({"w": one}) is None
    setattr(one, what, other)
    assert m.moved({"w": one}) == "w"


def test_labels_of_arrays_tell_dtypes_apart_that_numpy_does_not_have() -> None:
    words = np.zeros(4, np.uint16)
    assert Memory({"w": typed(words, "bfloat16")}, "here").moved({"w": typed(words, "float16")}) == "w"


def test_a_region_of_which_nothing_was_digested_has_no_digest() -> None:
    found = digests.HostDigests(digests.LANES)
    found.add("a", A)
    with pytest.raises(VerifyError, match="no byte was digested of 1 of 2 regions: b"):
        found.hex(["a", "b"])


def test_an_epoch_tells_another_place_and_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Memory({"w": A}, "here").epoch
    assert Memory({"w": A}, "here").epoch == here
    assert Memory({"w": A.copy()}, "here").epoch != here
    monkeypatch.setattr(memory, "PROCESS_NONCE", memory.PROCESS_NONCE ^ 1)
    assert Memory({"w": A}, "here").epoch != here


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 9), columns=st.integers(1, 9), width=st.sampled_from([1, 2, 4, 8]), chunk=st.integers(1, 64),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_the_digest_of_a_strided_region_is_that_of_its_bytes_in_order(
    rows: int, columns: int, width: int, chunk: int, seed: int
) -> None:
    whole = np.random.default_rng(seed).integers(0, 255, (rows, 2 * columns * width), np.uint8).view(f"u{width}")
    part = whole[:, :columns]
    kept, digests._CHUNK = digests._CHUNK, chunk
    try:
        parts = list(digests.chunks(part, chunk))
        assert digest(part) == xxhash.xxh3_64_hexdigest(np.ascontiguousarray(part).tobytes())
    finally:
        digests._CHUNK = kept
    assert sum(p.size for p in parts) == part.size


def test_the_digest_depends_on_every_byte_and_its_place() -> None:
    data = np.arange(256, dtype=np.uint8).reshape(16, 16)
    plain = digest(data)
    for index in range(0, 256, 37):
        changed = data.copy()
        changed.reshape(-1)[index] ^= 1
        assert digest(changed) != plain
    swapped = data[[1, 0, *range(2, 16)]]
    assert digest(swapped) != plain
    assert digest(data[:, :8]) != digest(np.ascontiguousarray(data[:8]).reshape(16, 8))


def test_a_staging_region_beyond_the_buffer_is_an_error_and_not_a_shorter_one() -> None:
    stage = Staging(64)
    words = np.zeros(1, np.uint16)
    assert stage.region(0, words, (4, 8)).shape == (4, 8)
    with pytest.raises(ValueError, match="reshape"):
        stage.region(32, words, (4, 8))


def test_labelled_arrays_say_a_dtype_that_numpy_lacks() -> None:
    assert Memory({"w": typed(np.zeros(3, np.uint16), "bfloat16")}, "here").params[0].dtype == "bfloat16"


# -- digests of ranks, put together ------------------------------------------------------------------------------------


class Two:
    """A plan of three transfers: 0 and 2 end on rank 0, 1 on rank 1."""

    source_rank = target_rank = np.array([0, 1, 0])

    def __len__(self) -> int:
        return 3


def rows(rank: int) -> Any:
    return np.flatnonzero(Two.target_rank == rank)


HEX = ["00000000000000aa", "00000000000000bb", "ffffffffffffffff"]


def test_digests_of_ranks_are_put_in_the_order_of_the_plan() -> None:
    merged = merge_digests(Two(), "rollout", {1: HEX[1], 0: HEX[0] + HEX[2]}, rows)  # type: ignore[arg-type]
    assert merged.view(np.uint64).tolist() == [0xAA, 0xBB, 2**64 - 1]


@pytest.mark.parametrize(
    ("parts", "match"),
    [
        ({0: HEX[0] + HEX[2]}, "1 of 3 transfers have no digest: rollout ranks 1 sent none"),
        ({0: HEX[0], 1: HEX[1]}, "rollout rank 0 reported 16 hex digits for its 2 transfers"),
        ({0: HEX[0] + HEX[2], 1: HEX[1], 2: HEX[1]}, "rollout rank 2 reported 16 hex digits for its 0 transfers"),
        ({0: HEX[0] + "AX" * 8, 1: HEX[1]}, "rollout rank 0 reported 'AXAXAXAXAXAXAXAX' where a digest of 16 hex"),
        ({0: HEX[0] + HEX[2][:-1] + "\n", 1: HEX[1]}, "16 hex digits"),
    ],
)
def test_missing_or_malformed_digests_are_a_verify_error(parts: dict[int, str], match: str) -> None:
    with pytest.raises(VerifyError, match=match):
        merge_digests(Two(), "rollout", parts, rows)  # type: ignore[arg-type]


# -- states ------------------------------------------------------------------------------------------------------------

HAPPY = [State.PAUSED, State.WRITTEN, State.VERIFIED, State.COMMITTED, State.IDLE]


def test_the_machine_takes_the_transitions_of_the_table_and_no_other() -> None:
    ways = {State.IDLE: [], State.FAILED: [State.FAILED]} | {s: HAPPY[: i + 1] for i, s in enumerate(HAPPY[:-1])}
    for state, way in ways.items():
        for to in State:
            machine = Machine()
            for step in way:
                machine.to(step)
            assert machine.state is state
            if to in TRANSITIONS[state]:
                machine.to(to)
                assert machine.state is to
            else:
                with pytest.raises(SessionError, match=f"cannot go from {state} to {to}; legal: "):
                    machine.to(to)
                assert machine.state is state


def test_every_state_can_fail_and_only_a_whole_sync_leads_from_failed_to_idle() -> None:
    assert all(State.FAILED in targets for targets in TRANSITIONS.values())
    assert TRANSITIONS[State.FAILED] == {State.PAUSED, State.FAILED}
    assert [state for state, targets in TRANSITIONS.items() if State.IDLE in targets] == [State.COMMITTED]


def test_the_state_cannot_be_set_past_the_table() -> None:
    with pytest.raises(AttributeError):
        Machine().state = State.COMMITTED  # type: ignore[misc]
