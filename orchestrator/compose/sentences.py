"""Errors of Hydra and OmegaConf, and mistyped names, as one sentence that helps on."""

import difflib
from collections.abc import Iterable

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException


def nearest(name: str, names: Iterable[str]) -> str:
    """The known names nearest to one that is not; all of them where none is near."""
    known = sorted(names)
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    if not near:
        last = name.split(".")[-1]
        near = [k for k in known if k.split(".")[-1] == last][:3]
    return f"nearest: {', '.join(near)}" if near else f"known: {', '.join(known)}"


def first_line(error: BaseException) -> str:
    """The first line of an error's text, without its full stop."""
    return str(error).strip().splitlines()[0].rstrip(".")


def explained(error: OmegaConfBaseException, names: Iterable[str]) -> str:
    """An error of a configuration with its key; of an unknown key, the nearest of `names`."""
    key = getattr(error, "full_key", None) or getattr(error, "key", None)
    text = first_line(error)
    if key and "not in" in text:
        return f"unknown key {key}; {nearest(str(key), names)}"
    return f"{key}: {text}" if key else text


def group_error(error: HydraException, groups: tuple[str, ...]) -> str:
    """One sentence for a group option that does not exist, with the options that do."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    for choice in groups:
        group, name = choice.split("=", 1)
        if f"'{group}/{name}'" in lines[0]:
            options = [line for line in lines[2:] if not line.startswith(("Config", "provider"))]
            near = difflib.get_close_matches(name, options, n=3, cutoff=0.4)
            hint = f"nearest: {', '.join(near)}; " if near else ""
            return f"{group}={name}: no such option; {hint}known: {', '.join(options)}"
    return lines[0]
