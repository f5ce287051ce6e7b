"""`doctor`: is this machine fit to run trials, and if not, why."""

import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

from orchestrator.hardware import this_machine
from orchestrator.provenance import fingerprints

NEEDED_MEMORY_BYTES = 4 * 2**30
NEEDED_DISK_BYTES = 2 * 2**30
LARGEST_SKEW_SECONDS = 5.0
"""Between the clock of a node, with the time that it takes to answer, and that of this machine."""
SUPPORTED = {
    "torch": (2, 11),
    "triton": (3, 6),
    "ray": (2, 60),
    "mlflow": (3, 17),
    "hydra-core": (1, 3),
    "optuna": (5, 0),
    "pyarrow": (20, 0),
}
"""Oldest supported version of each package."""


@dataclass(frozen=True, slots=True)
class Check:
    """One question and its answer.

    Attributes:
        name: what was looked at.
        fit: false where trials cannot run.
        finding: what was found, and what to do where it is not fit.
    """

    name: str
    fit: bool
    finding: str

    def as_row(self) -> dict[str, Any]:
        """The check as a JSON-ready dict."""
        return asdict(self)


def examine(root: Path) -> list[Check]:
    """Every check on this machine, for ledgers under `root`; writes only temporary files."""
    return [
        _packages(),
        _rooms(),
        _host(),
        _gpu(),
        _kernels(),
        _storage(root),
        _tracking(),
        _ray(),
        _report(),
    ]


def examine_cluster(root: Path, address: str) -> list[Check]:
    """The checks of `examine` that a node can answer, on every node of a Ray cluster.

    Raises:
        ConfigError: no cluster answers at the address, or a node of it does not.
    """
    from orchestrator import cluster

    with cluster.joined(address):
        found = cluster.nodes()
        answers = cluster.on_each_node(found, _node_checks, str(root))
        facts = cluster.facts_of_nodes(root, found)
    checks = []
    for (node, rows), (_, about) in zip(answers, facts, strict=True):
        unlike = about.fingerprints != fingerprints()
        skew = abs(about.unix_seconds - about.asked_at_unix_seconds)
        code = "unlike here" if unlike else "as here"
        storage = "seen" if about.reads else "not seen: all nodes must mount it at one path"
        rows += [
            Check("same code and packages", not unlike, code),
            Check("shared root", about.reads, f"a file written here is {storage}"),
            Check("clock", skew < LARGEST_SKEW_SECONDS, f"within {max(skew, 0.1):.1f} s of here"),
        ]
        checks += [replace(row, name=f"{node.host} {row.name}") for row in rows]
    return checks


def _node_checks(root: str) -> list[Check]:
    return [_packages(), _rooms(), _host(), _gpu(), _kernels(), _storage(Path(root))]


def show(checks: list[Check], console: Console) -> None:
    """Print one line per check."""
    for check in checks:
        console.print(
            f"{'ok ' if check.fit else 'NOT'}  {check.name}: {check.finding}", markup=False
        )


def _packages() -> Check:
    found, wrong = [], []
    for name, oldest in SUPPORTED.items():
        try:
            text = version(name)
        except PackageNotFoundError:
            wrong.append(f"{name} is missing")
            continue
        found.append(f"{name} {text}")
        numbers = tuple(int(part) for part in text.split("+")[0].split(".")[:2])
        if numbers < oldest:
            wrong.append(f"{name} {text} is older than {'.'.join(map(str, oldest))}")
    if wrong:
        return Check(
            "packages", fit=False, finding=f"{'; '.join(wrong)}; install the project again"
        )
    return Check("packages", fit=True, finding=", ".join(found))


def _rooms() -> Check:
    """Whether `kernels` is ours: a package of that name on PyPI would shadow it."""
    import kernels

    ours = Path(__file__).resolve().parent.parent
    found = Path(str(kernels.__file__)).resolve()
    if ours not in found.parents:
        return Check("rooms", fit=False, finding=f"kernels is {found}; uninstall that package")
    return Check("rooms", fit=True, finding=f"kernels is this checkout's, in {ours}")


def _host() -> Check:
    machine, memory = this_machine(), psutil.virtual_memory()
    finding = (
        f"{machine.cpus} cores, {memory.available / 2**30:.1f} of {memory.total / 2**30:.1f} GiB "
        "memory free"
    )
    return Check("host", memory.available >= NEEDED_MEMORY_BYTES, finding)


def _gpu() -> Check:
    import torch

    if not this_machine().gpus:
        return Check("gpu", fit=True, finding="none; trials run on the CPU")
    if not torch.cuda.is_available():
        finding = f"{', '.join(this_machine().gpus)}, but torch {torch.__version__} cannot use it"
        return Check("gpu", fit=False, finding=finding)
    free, total = torch.cuda.mem_get_info()
    finding = (
        f"{torch.cuda.get_device_name()}, {free / 2**30:.0f} of {total / 2**30:.0f} GiB free, "
        f"CUDA {torch.version.cuda}"
    )
    return Check("gpu", fit=True, finding=finding)


def _kernels() -> Check:
    """Whether the implementation that `auto` picks agrees with the reference loop here."""
    import torch

    from kernels import delta_rule
    from kernels.launch import resolve

    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 70, 1, 32, generator=generator) for _ in range(3))
    k = torch.nn.functional.normalize(k, dim=-1)
    beta = torch.rand(1, 70, 1, generator=generator)
    arguments = [x.to(device) for x in (q, k, v)]
    began = time.perf_counter()
    out, _ = delta_rule(*arguments, beta=beta.to(device))
    seconds = time.perf_counter() - began
    expected, _ = delta_rule(
        q.double(), k.double(), v.double(), beta=beta.double(), impl="reference"
    )
    error = float((out.cpu().double() - expected).norm() / expected.norm())
    implementation = resolve("auto", device, "delta_rule")
    finding = (
        f"{implementation} on {device}: relative error {error:.0e}, first call {seconds:.1f} s"
    )
    return Check("kernels", error < 5e-3, finding)


def _storage(root: Path) -> Check:
    place = next(folder for folder in (root, *root.parents) if folder.is_dir())
    free = shutil.disk_usage(place).free
    try:
        with tempfile.NamedTemporaryFile(dir=place) as file:
            file.write(b"seedfront")
    except OSError as error:
        return Check("storage", fit=False, finding=f"{place} cannot be written ({error.strerror})")
    finding = f"{root}: writable, {free / 2**30:.0f} GiB free"
    return Check("storage", free >= NEEDED_DISK_BYTES, finding)


def _tracking() -> Check:
    from orchestrator.tracking import MlflowView

    def open_store(folder: Path) -> str:
        MlflowView(f"sqlite:///{folder / 'mlflow.db'}", folder, "doctor")
        return "an MLflow store on SQLite opens"

    return _attempt("tracking", open_store)


def _ray() -> Check:
    from orchestrator.cluster import probe_ray

    def run_task(_: Path) -> str:
        import orchestrator.sweep  # noqa: F401 - what a driver and its workers import

        return f"{probe_ray()}, and Tune loads"

    return _attempt("ray", run_task)


def _report() -> Check:
    def load(_: Path) -> str:
        import analysis.report  # noqa: F401

        return f"analysis loads, with matplotlib {version('matplotlib')}"

    return _attempt("report", load)


def _attempt(name: str, action: Callable[[Path], str]) -> Check:
    """The check that an action passes by returning its finding; any error is the finding."""
    with tempfile.TemporaryDirectory(prefix="seedfront-doctor-") as folder:
        try:
            return Check(name, fit=True, finding=action(Path(folder)))
        except Exception as error:  # noqa: BLE001 - a diagnosis reports whatever went wrong
            return Check(name, fit=False, finding=f"{type(error).__name__}: {error}")
