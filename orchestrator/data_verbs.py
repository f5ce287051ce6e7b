"""`data prepare | verify | info`: the data set of a sweep file, or a prepared folder."""

import argparse
import json
import time
from pathlib import Path

from rich.console import Console

from orchestrator.compose import load_sweep
from orchestrator.data.inspection import info, verify
from orchestrator.data.preparation import Progress, prepare
from orchestrator.errors import ConfigError
from orchestrator.plan import find_data

PROGRESS_SECONDS = 5.0


def run_data_verb(options: argparse.Namespace, root: Path, console: Console) -> int:
    """Run one action and return the exit code.

    Raises:
        ConfigError: sources, folders or settings that cannot be used.
    """
    try:
        if options.action == "prepare":
            return _prepare(options.overrides, root, console)
        folder = _folder(options.overrides, root)
        if options.action == "info":
            console.print(json.dumps(info(folder), indent=1), markup=False)
            return 0
        result = verify(folder)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if result.problems:
        raise ConfigError("; ".join(result.problems))
    console.print(f"{folder}: every file is as the manifest says", markup=False)
    return 0


def _prepare(arguments: list[str], root: Path, console: Console) -> int:
    sweep = load_sweep(_conf(arguments), _rest(arguments), Path.cwd())
    config, _ = find_data(sweep, root, Path.cwd())
    shown = 0.0
    began = time.monotonic()

    def report(progress: Progress) -> None:
        nonlocal shown
        if time.monotonic() - shown > PROGRESS_SECONDS:
            shown = time.monotonic()
            console.print(
                f"{shown - began:6.0f} s  {progress.stage}: {progress.documents:,} documents, "
                f"{progress.tokens:,} tokens"
            )

    prepared = prepare(config, root, report=report)
    state = "prepared" if prepared.is_new else "was prepared before, and is whole"
    console.print(f"{prepared.folder}: {state}; data id {prepared.data_id}", markup=False)
    return 0


def _folder(arguments: list[str], root: Path) -> Path:
    if not any(text.startswith("conf=") for text in arguments):
        if len(arguments) != 1:
            raise ConfigError("give conf=… or one prepared folder")
        return Path(arguments[0]).expanduser().absolute()
    sweep = load_sweep(_conf(arguments), _rest(arguments), Path.cwd())
    config, folder = find_data(sweep, root, Path.cwd())
    if folder is None:
        raise ConfigError(
            f"data {config.name} is not prepared under {root / 'data'}; run `python -m "
            f"orchestrator data prepare conf={sweep.conf_path}` first"
        )
    return folder


def _conf(arguments: list[str]) -> str:
    found = [text.removeprefix("conf=") for text in arguments if text.startswith("conf=")]
    if len(found) != 1:
        raise ConfigError("give conf=NAME or conf=PATH.yaml once, for example conf=quickstart")
    return found[0]


def _rest(arguments: list[str]) -> list[str]:
    return [text for text in arguments if not text.startswith("conf=")]
