"""One real session from a dumped trainer into live engine memory, and what is reported of it. Used in engine environments."""

from __future__ import annotations

import copy
import json
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from tests.exact.exact_cases import ENGINES, MODELS, MUTATIONS, QUANTS, TRAINER_WORLD, TRAINERS, WAYS
from tests.exact.exact_dump import read_ranks
from weight_sync.config import engine_yaml, family_yaml, quant_yaml
from weight_sync.plan.schedule import Budget, CostModel
from weight_sync.quant.emission import Quantisation
from weight_sync.quant.published import from_hf
from weight_sync.session.connect import SyncSpec
from weight_sync.session.contracts import RolloutEngine
from weight_sync.session.inprocess import InProcessTrainers
from weight_sync.session.inputs import Declared, Recorded
from weight_sync.session.session import Timeouts, WeightSync
from weight_sync.session.source import SourceAgent
from weight_sync.transport.base import Transport

GARBAGE = 0xA5


class Rollout(Protocol):
    """The engines of one layout, as a case needs them."""

    engines: Sequence[RolloutEngine]

    def scramble(self) -> None:
        """Overwrite every element that the engine's own loader takes from a checkpoint (not padding, which no sync writes)."""
        ...

    def differing(self, export: Path) -> tuple[list[str], int]:
        """Compare every live tensor with what the engine's own load_weights makes of `export`.

        Returns "engine e rank r name: ..." of each tensor that is not equal byte for byte, and how many were compared.
        """
        ...


def read_cases(file: Path) -> dict[tuple[str, str, str], list[dict[str, str]]]:
    """Cases by (model, engine, quantisation): {"id", "kind", "trainer", "engine", "way" or "mutation"}, some with "quant"."""
    groups: dict[tuple[str, str, str], list[dict[str, str]]] = {}
    for case in json.loads(file.read_text()):
        groups.setdefault((TRAINERS[case["trainer"]].model, case["engine"], case.get("quant", "")), []).append(case)
    return groups


def served(root: Path, model: str, quant: str) -> Path:
    """The checkpoint that engines of this model serve."""
    return _quantised(root, root / "models" / model, quant)


def exported(root: Path, case: Mapping[str, str]) -> Path:
    """What the trainer's own exporter made of its state, quantised as the engine's checkpoint is."""
    return _quantised(root, root / "trainers" / case["trainer"] / "export", case.get("quant", ""))


def _quantised(root: Path, source: Path, quant: str) -> Path:
    if not quant:
        return source
    from weight_sync_integrations.quantised import fp8_config, quantise_checkpoint

    folder = root / "quantised" / quant / source.relative_to(root)
    if not folder.exists():
        config = json.loads((source / "config.json").read_text())
        partial = folder.with_name(folder.name + ".part")
        quantise_checkpoint(source, partial, fp8_config(config, **QUANTS[quant])).rename(folder)
    return folder


def answer(file: Path, case: Mapping[str, str], root: Path, rollout: Rollout, transport: Callable[[], Transport]) -> None:
    """Run one case and append one line of JSON. An error is part of the answer: the test that asked for the case fails."""
    result: dict[str, Any] = dict(case)
    try:
        result |= (_mutation if "mutation" in case else _case)(case, root, rollout, transport)
    except Exception:  # noqa: BLE001 - see above
        result["error"] = traceback.format_exc()
    with file.open("a") as stream:
        stream.write(json.dumps(result) + "\n")


def _case(case: Mapping[str, str], root: Path, rollout: Rollout, transport: Callable[[], Transport]) -> dict[str, Any]:
    """Scramble, connect (with the witness), sync, compare."""
    export = exported(root, case)
    rollout.scramble()
    scrambled, tensors = rollout.differing(export)
    sync = session(case, root, rollout, transport, *_yaml(case), *WAYS[case["way"]], witness=True)
    connection = sync.connect()
    outcome = sync.sync(1)
    plan = connection.schedule.plan
    return {
        "tensors": tensors,
        "cast": sorted({plan.catalog.name(t) for t in plan.tensor[plan.casts].tolist()}),
        "scrambled": len(scrambled),
        "methods": {name: entry["transfers"] for name, entry in connection.schedule.summary().items()},
        "rounds": connection.schedule.rounds,
        "bytes": outcome.bytes,
        "gathered": outcome.gathered_bytes,
        "differing": rollout.differing(export)[0],
    }


def _mutation(case: Mapping[str, str], root: Path, rollout: Rollout, transport: Callable[[], Transport]) -> dict[str, Any]:
    """The same with a wrong declaration: what the witness says to it, and which bytes are wrong when it is not asked."""
    family, convention = (copy.deepcopy(yaml) for yaml in _yaml(case))
    MUTATIONS[case["mutation"]].apply(case["mutation"], family, convention)
    result: dict[str, Any] = {}
    for key, witness in (("with witness", True), ("without", False)):
        rollout.scramble()
        sync = session(case, root, rollout, transport, family, convention, *WAYS["default"], witness=witness)
        try:
            sync.sync(1)
            result[key] = ""
        except Exception as error:  # noqa: BLE001 - looked at by the test
            result[key] = f"{type(error).__name__}: {error}"
    result["differing"], result["tensors"] = rollout.differing(root / "trainers" / case["trainer"] / "export")
    return result


def _yaml(case: Mapping[str, str]) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """(family, engine); no family where an FSDP trainer is synced to a recorded layout: then nothing is declared at all."""
    trainer = TRAINERS[case["trainer"]]
    nothing = trainer.fsdp and case.get("way") == "recorded"
    return None if nothing else family_yaml(MODELS[trainer.model].family), engine_yaml(case["kind"])


def session(
    case: Mapping[str, str],
    root: Path,
    rollout: Rollout,
    transport: Callable[[], Transport],
    family: Mapping[str, Any] | None,
    convention: Mapping[str, Any],
    costs: CostModel,
    budget: Budget,
    *,
    witness: bool,
) -> WeightSync:
    """The real session over the dumped trainer ranks and live engines."""
    trainer = TRAINERS[case["trainer"]]
    folder = root / "trainers" / case["trainer"]
    config = json.loads((served(root, trainer.model, case.get("quant", "")) / "config.json").read_text())
    quant = None
    if "quantization_config" in config:
        quant = Quantisation(*from_hf(config["quantization_config"], quant_yaml)).to_json()
    dims = ENGINES[case["engine"]].dims(convention["remainder"])
    target: Declared | Recorded
    if case.get("way") == "recorded":
        target = Recorded(config, dims, family, quant=quant)
    else:
        assert family is not None
        symbols = MODELS[trainer.model].symbols.get(case["kind"], {})
        target = Declared(family, config, dims, convention, symbols, quant=quant)
    source, held_as = None, str(trainer.options.get("dtype", ""))
    if not trainer.fsdp:  # FSDP ranks publish their shards instead
        assert family is not None
        own = json.loads((folder / "export" / "config.json").read_text())
        own["dtype"] = config["dtype"]  # the export of a float32 trainer says its own
        symbols = {"vocab_multiple": 128 * trainer.parallel.get("tp", 1)}
        source = Declared(family, own, {"ranks": TRAINER_WORLD, **trainer.parallel}, None, symbols, held_as, quant)
    agents = [SourceAgent(rank, transport) for rank in read_ranks(folder)]
    spec = SyncSpec(source, target, witness=witness, costs=costs, budget=budget, casts=[held_as] if held_as else ())
    timeouts = Timeouts(connect=120, sync=120, abort=60)
    return WeightSync(InProcessTrainers(agents), rollout.engines, spec, pause="retract", timeouts=timeouts)
