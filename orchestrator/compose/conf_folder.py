"""What lies in `conf/`: sweep files by name, and groups that they choose values from."""

import difflib
from pathlib import Path

from orchestrator.errors import ConfigError

CONF_FOLDER = Path(__file__).resolve().parents[2] / "conf"
GROUPS = ("size", "data")
"""Paths whose value chooses a YAML file in the group's folder under `conf/`."""


def find_conf(conf: str, folder: Path) -> Path:
    """The sweep file of a name in `conf/` or of a path.

    Raises:
        ConfigError: there is no such file; the nearest names are listed.
    """
    if conf.endswith((".yaml", ".yml")):
        path = (folder / Path(conf).expanduser()).resolve()
        if not path.is_file():
            raise ConfigError(f"conf={conf}: there is no file {path}")
        return path
    path = CONF_FOLDER / f"{conf}.yaml"
    if path.is_file():
        return path
    names = conf_names()
    near = difflib.get_close_matches(conf, names, n=3, cutoff=0.4) or names
    raise ConfigError(
        f"conf={conf}: no such sweep in conf/; nearest: {', '.join(near)} "
        "(a path must end in .yaml)"
    )


def conf_names() -> list[str]:
    """Names of the sweeps in `conf/`."""
    groups = set(GROUPS) | {"cluster"}
    tables = {"published"}  # results of others, which a report can show beside its own
    return sorted(
        str(path.relative_to(CONF_FOLDER).with_suffix(""))
        for path in CONF_FOLDER.rglob("*.yaml")
        if path.relative_to(CONF_FOLDER).parts[0] not in groups and path.stem not in tables
    )
