"""Exact equality on real parts: a sync leaves in an engine, byte for byte, what the engine itself would have loaded.

Real trainers (Megatron-Core on gloo, FSDP2) take an optimiser step; their live bytes are synced by the real session, second
witness and digests on, into live parameters of SGLang and vLLM that were filled with garbage. The reference is the engine's
own load_weights on the checkpoint that the trainer's own exporter (Megatron-Bridge, transformers) made of the same state.
Nothing of weight_sync takes part in the reference.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.exact.conftest import Answers
from tests.exact.exact_cases import CASTS, METHODS, MODELS, MUTATIONS, TRAINERS, all_cases, why_not
from tests.families_support import record_result

# The first test of each side waits for the whole side.
pytestmark = pytest.mark.timeout(2000)

CASES = all_cases()


def cases(choose: Any) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", [pytest.param(c, id=c["id"].replace(" ", "_")) for c in CASES if choose(c)])


@cases(lambda case: "way" in case)
def test_after_a_sync_every_live_tensor_equals_what_the_engines_own_loader_makes_of_the_export(
    case: dict[str, str], answers: Answers
) -> None:
    if reason := why_not(case["kind"], case["trainer"], case["engine"]):
        pytest.skip(reason)
    found = answers(case)
    assert found["differing"] == []
    assert found["scrambled"] == found["tensors"] > 0, "a tensor was right before the sync: the comparison proves less"
    # Largest magnitudes of blocks that lie on several ranks; the weights themselves are never gathered.
    assert (found["gathered"] > 0) is ("quant" in case and TRAINERS[case["trainer"]].fsdp)
    assert found["bytes"] > 0
    endings = CASTS.get(case["trainer"], ())
    assert {ending for ending in endings if any(name.endswith(ending) for name in found["cast"])} == set(endings)
    assert [name for name in found["cast"] if not name.endswith(endings)] == []
    trainer, recorded = TRAINERS[case["trainer"]], ", the engine recorded" if case["way"] == "recorded" else ""
    recorded = f", {case['quant']}" if "quant" in case else recorded
    layouts = f"{case['trainer']} -> {case['engine']}{recorded}"
    record_result(f"{case['kind']} bytes", MODELS[trainer.model].family, layouts, "byte-equal", found["tensors"])
    if case["way"] == "runs":
        assert {name for name, count in found["methods"].items() if count} == {"direct"}


@cases(lambda case: case.get("way") == "staged" and (case["trainer"], case["engine"]) in METHODS.values())
def test_pieces_were_packed_unpacked_or_both_through_a_small_buffer_where_messages_are_dear(
    case: dict[str, str], answers: Answers
) -> None:
    found = answers(case)
    method = next(name for name, pair in METHODS.items() if pair == (case["trainer"], case["engine"]))
    assert found["methods"][method] > 0
    if method != "pack":  # what is packed only needs no place on the other side
        assert found["rounds"] > 3


@cases(lambda case: "mutation" in case)
def test_a_wrong_declaration_is_caught_by_the_witness_where_it_is_the_engines_and_by_the_bytes_in_any_case(
    case: dict[str, str], answers: Answers
) -> None:
    found = answers(case)
    mutation = MUTATIONS[case["mutation"]]
    if mutation.seen:
        assert found["with witness"].startswith("WitnessError")
        assert "the declared layout is not what the engine's own loader does" in found["with witness"]
        assert mutation.wrong in found["with witness"]
    else:
        assert found["with witness"] == "", "the engine's loader cannot know how a trainer holds its weights"
    assert found["without"] == "", "digests only say that what was sent has arrived"
    assert found["differing"]
    assert [line for line in found["differing"] if f"{mutation.wrong}: " not in line] == []
