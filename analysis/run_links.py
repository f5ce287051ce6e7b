"""Where the runs behind a report can be looked at: their folders, and their pages in MLflow."""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path

LINKS_FILE = "mlflow.json"
"""Written by the tracking of a sweep; no part of the records, since a store that is made again
gives its runs new ids."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunLinks:
    """What a page can lead to; nothing it says depends on it.

    Attributes:
        folders: path from the page to the folder with one folder per replicate; empty without one.
        pages: replicate id to the address of its run in MLflow.
    """

    folders: str = ""
    pages: dict[str, str] = field(default_factory=dict)

    @property
    def hint(self) -> str:
        """What a hover text says about a click; empty where it leads nowhere."""
        return "click: its runs" if self.folders or self.pages else ""


def find_run_links(folder: Path, place: Path) -> RunLinks:
    """What a report in `place` on the sweep in `folder` can lead to.

    Raises:
        ValueError: `mlflow.json` is not what tracking writes.
    """
    replicates = folder / "replicates"
    near = os.path.relpath(replicates.resolve(), place.resolve()) if replicates.is_dir() else ""
    return RunLinks(folders=Path(near).as_posix() if near else "", pages=_pages(folder))


def _pages(folder: Path) -> dict[str, str]:
    path = folder / LINKS_FILE
    if not path.exists():
        return {}
    try:
        pages = json.loads(path.read_text(encoding="utf-8"))["replicates"]
        found = {str(name): str(address) for name, address in pages.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} is not readable ({error!r}); remove it, or write it again with "
            "`python -m orchestrator report`"
        ) from error
    for name, address in found.items():
        # A page must not run what stands in a file beside the records.
        if not address.startswith(("http://", "https://")):
            raise ValueError(f"{path}: {name}={address!r} must be an http or https address")
    return found
