"""What `spec.json` says of a sweep: its seeds, its comparisons, who ran it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_list_of(kind: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(kind(item) for item in value)


KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "spec": (lambda value: isinstance(value, dict), "an object"),
    "name": (lambda value: isinstance(value, str), "a text"),
    "purpose": (
        lambda value: value in ("compare", "search", "measure"),
        "compare, search or measure",
    ),
    "seeds": (_is_list_of(_is_whole), "a list of whole numbers"),
    "replicates": (lambda value: _is_whole(value) and value >= 0, "a whole number, at least 0"),
    "compare_within": (_is_list_of(lambda item: isinstance(item, str)), "a list of texts"),
    "adaptive": (lambda value: isinstance(value, dict), "an object"),
    "provenance": (lambda value: isinstance(value, dict), "an object"),
}
"""Keys that the analysis reads, with a test and what it asks for; each may be missing or null."""


def read_spec(path: Path) -> dict[str, Any]:
    """The content of a `spec.json`; empty where there is none.

    Raises:
        ValueError: no JSON object, or a value that means nothing.
    """
    if not path.exists():
        return {}
    try:
        spec = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is not readable JSON: {error}") from error
    if not isinstance(spec, dict):
        raise ValueError(f"{path} holds a {type(spec).__name__}; a JSON object is needed")
    for key, (is_right, wanted) in KINDS.items():
        value = spec_value(spec, key, None)
        if value is not None and not is_right(value):
            raise ValueError(f"{path}: {key}={json.dumps(value)[:80]} must be {wanted}")
    packages = (spec_value(spec, "provenance", None) or {}).get("packages")
    if packages is not None and not isinstance(packages, dict):
        raise ValueError(f"{path}: provenance.packages must be an object")
    return spec


def spec_value(spec: dict[str, Any], key: str, default: Any) -> Any:
    """`key` of a `spec.json`, whether it stands at the top or under `spec`."""
    nested = spec.get("spec")
    if key not in spec and isinstance(nested, dict):
        return nested.get(key, default)
    return spec.get(key, default)
