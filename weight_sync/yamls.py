"""YAML files of ours, read so that nothing in them is lost: plain loading keeps the last of two equal keys and says nothing."""

from __future__ import annotations

from typing import Any

from weight_sync.errors import WeightSyncError


def read_yaml(text: str, file: str, error: type[WeightSyncError]) -> Any:
    """What stands in a file. Raises `error`, naming the file, the key and both lines, where a block has a key twice."""
    import yaml

    loader = yaml.SafeLoader(text)
    try:
        root = loader.get_single_node()
        if root is None:
            return None
        # Before anything is constructed: merge keys (<<) bring in keys that may be given again, and that is not twice.
        if (twice := _twice(root, "", set())) is not None:
            key, line, first = twice
            raise error(f"{file}, line {line}: {key} is given a second time, first in line {first}; keep one of them")
        return loader.construct_document(root)
    except yaml.YAMLError as problem:
        raise error(f"{file}: not readable as YAML: {problem}") from None
    finally:
        loader.dispose()


def _twice(node: Any, path: str, seen: set[int]) -> tuple[str, int, int] | None:
    """(key with its path, its line, the line of the first) of a key that its block has already."""
    if id(node) in seen:  # an alias
        return None
    seen.add(id(node))
    if node.id == "sequence":
        parts = [(f"{path}[{i}]", item) for i, item in enumerate(node.value)]
    elif node.id == "mapping":
        parts = []
        lines: dict[tuple[str, str], int] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            name = f"{path}.{key.value}" if path else str(key.value)
            if key.id == "scalar":
                if (first := lines.get((key.tag, key.value))) is not None:
                    return name, line, first
                lines[key.tag, key.value] = line
            parts.append((name, value))
    else:
        return None
    return next((found for at, part in parts if (found := _twice(part, at, seen)) is not None), None)
