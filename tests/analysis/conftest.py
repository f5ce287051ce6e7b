"""Made-up sweeps for the tests of `analysis`."""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from analysis.report import ReportResult, write_report

Array = npt.NDArray[np.float64]


@pytest.fixture(scope="session")
def made() -> ModuleType:
    """The module that makes records."""
    spec = spec_from_file_location("made_records", Path(__file__).with_name("made_records.py"))
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def fixture_f(made: Any) -> tuple[Array, Array]:
    """Loss and throughput of five configurations over four seeds, with known answers."""
    loss, speed = made.fixture_f()
    return loss, speed


@pytest.fixture(scope="session")
def small_report(small_folder: Path) -> ReportResult:
    """The report on `small_folder`, in its `report`; tests may read it only."""
    return write_report(small_folder, title="A small sweep", context={"place": "a test"})


@pytest.fixture(scope="session")
def small_folder(made: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five arms, four rates, three seeds; one diverged, one failed, one pending, one not timed."""
    trials = made.make_trials(made.small_plan())
    folder = tmp_path_factory.mktemp("sweeps") / "small"
    written: Path = made.write_folder(
        folder, trials, made.make_curves(trials), {"name": "small", "seeds": [0, 1, 2]}
    )
    return written
