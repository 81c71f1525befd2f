"""Transports by name."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from weight_sync.errors import ConfigError
from weight_sync.transport import registry
from weight_sync.transport.memory import MemoryHub, MemoryTransport


@pytest.fixture(autouse=True)
def _known_names_are_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_KNOWN", dict(registry._KNOWN))


class Broken:
    def __init__(self, size: Any = None) -> None:
        raise TypeError("a bug inside")


def test_a_transport_is_made_by_name_with_its_options() -> None:
    transport = registry.create("memory", hub=MemoryHub(), address="here")
    assert isinstance(transport, MemoryTransport)
    assert transport.describe().address == "here"


@pytest.mark.parametrize("name", ["cma", "cuda_ipc", "memory", "mooncake"])
def test_every_shipped_name_resolves_to_a_class_of_that_name(name: str) -> None:
    assert registry.resolve(name).name == name


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="unknown transport 'carrier_pigeon'; known: cma, cuda_ipc, memory, mooncake"):
        registry.create("carrier_pigeon")


def test_a_name_cannot_be_taken_twice_but_the_same_registration_may_repeat() -> None:
    registry.register("mine", "a.b:C")
    registry.register("mine", "a.b:C")
    with pytest.raises(ConfigError, match=r"already registered as 'a.b:C'; refused: 'a.b:D'"):
        registry.register("mine", "a.b:D")


@pytest.mark.parametrize("target", ["a.b", "a.b:", ":C", ""])
def test_a_target_that_is_not_module_and_class_is_refused(target: str) -> None:
    with pytest.raises(ConfigError, match="not of the form"):
        registry.register("mine", target)


@pytest.mark.parametrize("target", ["no.such.module:C", "weight_sync.transport.memory:NoSuchClass"])
def test_a_target_that_does_not_load_says_which(target: str) -> None:
    registry.register("mine", target)
    with pytest.raises(ConfigError, match=target):
        registry.create("mine")


def test_an_option_that_the_transport_does_not_take_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="speed"):
        registry.create("memory", hub=MemoryHub(), speed=11)


def test_a_type_error_inside_a_constructor_is_not_mistaken_for_a_wrong_option() -> None:
    registry.register("broken", f"{__name__}:Broken")
    sys.modules.setdefault(__name__, sys.modules[Broken.__module__])
    with pytest.raises(TypeError, match="a bug inside"):
        registry.create("broken", size=1)


def test_listing_the_names_imports_no_transport() -> None:
    program = (
        "import sys; from weight_sync.transport import registry; registry.names(); "
        "sys.exit(any(f'weight_sync.transport.{n}' in sys.modules for n in ('memory', 'cma', 'mooncake')))"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0
