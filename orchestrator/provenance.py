"""What code, on what machine, asked by whom: captured once, on the driver."""

import getpass
import hashlib
import platform
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from orchestrator.hardware import this_machine
from orchestrator.store_uri import without_secret

CHECKOUT = Path(__file__).resolve().parent.parent
ROOMS = ("orchestrator", "models", "kernels", "analysis")
RESULT_CODE = (
    "kernels",
    "models",
    "orchestrator/training",
    "orchestrator/data",
    "orchestrator/trial.py",
    "orchestrator/config.py",
)
"""Code that decides what a trial computes."""
RESULT_PACKAGES = ("torch", "triton", "numpy", "tokenizers")
"""Packages that decide what a trial computes."""
PACKAGES = (
    "torch",
    "triton",
    "ray",
    "mlflow",
    "hydra-core",
    "omegaconf",
    "optuna",
    "pyarrow",
    "numpy",
    "tokenizers",
)


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where a sweep's numbers come from.

    Attributes:
        git_commit: commit of the checkout; null outside a repository.
        git_dirty: whether tracked files differ from that commit.
        git_diff: those differences, at most `MAX_DIFF_CHARACTERS`; passwords in URIs are left out,
            here as in `command`.
        code_digest: sha256 over the rooms' Python files, whatever git says.
        command: the command line.
        user: who ran it.
        python: version of Python.
        platform: operating system and processor.
        host: the machine's name.
        gpus: its visible GPUs.
        packages: versions of what results depend on.
    """

    git_commit: str | None
    git_dirty: bool | None
    git_diff: str
    code_digest: str
    command: str
    user: str
    python: str
    platform: str
    host: str
    gpus: list[str]
    packages: dict[str, str]


MAX_DIFF_CHARACTERS = 200_000


def capture(command: list[str]) -> Provenance:
    """The provenance of a sweep that this process starts."""
    commit = _git("rev-parse", "HEAD")
    diff = _git("diff", "HEAD", "--", ".") if commit else None
    machine = this_machine()
    return Provenance(
        git_commit=commit,
        git_dirty=bool(diff) if commit else None,
        git_diff=without_secret(diff or "")[:MAX_DIFF_CHARACTERS],
        code_digest=code_digest(),
        command=without_secret(" ".join(command)),
        user=getpass.getuser(),
        python=sys.version.split()[0],
        platform=platform.platform(),
        host=machine.host,
        gpus=list(machine.gpus),
        packages={name: found for name in PACKAGES if (found := _version(name))},
    )


def code_digest() -> str:
    """sha256 over names and contents of the rooms' Python files."""
    total = hashlib.sha256()
    for room in ROOMS:
        for path in sorted((CHECKOUT / room).rglob("*.py")):
            total.update(str(path.relative_to(CHECKOUT)).encode())
            total.update(path.read_bytes())
    return total.hexdigest()


def fingerprints() -> dict[str, str]:
    """Ids of the code and of the package versions that decide what a trial computes, as they are.

    Equal ids mean equal results, on equal devices; other ids may still mean the same results.
    """
    code = hashlib.sha256()
    for part in RESULT_CODE:
        path = CHECKOUT / part
        for file in [path] if path.is_file() else sorted(path.rglob("*.py")):
            code.update(str(file.relative_to(CHECKOUT)).encode())
            code.update(file.read_bytes())
    versions = " ".join(f"{name}={_version(name)}" for name in RESULT_PACKAGES)
    return {
        "code_id": code.hexdigest()[:12],
        "packages_id": hashlib.sha256(versions.encode()).hexdigest()[:12],
    }


def trial_stamp(provenance: Provenance) -> dict[str, Any]:
    """What each attempt's journal repeats of it."""
    return {
        **fingerprints(),
        "git_commit": provenance.git_commit,
        "git_dirty": provenance.git_dirty,
        "torch_version": provenance.packages.get("torch"),
    }


def _git(*arguments: str) -> str | None:
    try:
        result = subprocess.run(
            ["git", *arguments],
            cwd=CHECKOUT,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=30,
            check=False,
        )
    except OSError:
        return None
    return result.stdout.strip() if result.returncode == 0 else None


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
