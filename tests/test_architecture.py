"""The house keeps its shape: rooms, registries, and documents that tell the truth."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml

import kernels
from models.configs import MIXER_CONFIGS
from models.mixers import MIXERS
from orchestrator.cli import _parser
from orchestrator.compose import load_sweep
from orchestrator.training.optim.build import OPTIMIZERS
from orchestrator.training.optim.configs import OPTIMIZER_CONFIGS

CHECKOUT = Path(__file__).resolve().parent.parent
README = (CHECKOUT / "README.md").read_text(encoding="utf-8")
PROJECT = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def blocks(language):
    """The fenced blocks of the README in a language."""
    parts = README.split("```")[1::2]
    return [part.split("\n", 1)[1] for part in parts if part.split("\n", 1)[0] == language]


COMMANDS = [
    line for block in blocks("") for line in block.splitlines() if "-m orchestrator" in line
]


def test_kernels_is_ours_and_not_the_package_of_that_name():
    assert CHECKOUT in Path(kernels.__file__).resolve().parents
    assert not hasattr(kernels, "__version__")


def test_every_mixer_has_its_options_and_its_module():
    assert list(MIXERS) == list(MIXER_CONFIGS)
    assert {name: config for name, (config, _) in MIXERS.items()} == MIXER_CONFIGS


def test_every_module_of_mixers_is_registered():
    modules = {path.stem for path in (CHECKOUT / "models" / "mixers").glob("*.py")} - {"__init__"}
    assert {module.__module__.split(".")[-1] for _, module in MIXERS.values()} == modules


def test_every_optimizer_has_its_options_and_its_builder():
    assert set(OPTIMIZERS) == set(OPTIMIZER_CONFIGS)


def test_the_readmes_sweep_file_composes(tmp_path):
    text = next(block for block in blocks("yaml") if block.startswith("name:"))
    (tmp_path / "mine.yaml").write_text(text, encoding="utf-8")
    sweep = load_sweep("mine.yaml", [], tmp_path)
    assert len(sweep.cells) == 30


def test_the_readmes_data_keys_exist(tmp_path):
    text = next(block for block in blocks("yaml") if "data.sources" in block)
    sweep = yaml.safe_load(text) | {"name": "mine"}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(sweep), encoding="utf-8")
    assert load_sweep("mine.yaml", [], tmp_path).cells[0].config.data.vocab_size == 8192


@pytest.mark.parametrize("line", COMMANDS)
def test_the_readmes_commands_parse(line):
    words = line.split("#")[0].replace("'", "").split()
    options = _parser().parse_args(words[words.index("orchestrator") + 1 :])
    assert options.verb in line


def test_the_readmes_rooms_exist():
    tree = next(block for block in blocks("") if block.startswith("conf/"))
    rooms = [line.split()[0] for line in tree.splitlines()]
    assert {"orchestrator/", "models/", "kernels/", "conf/", "analysis/", "tests/"} <= set(rooms)
    for room in rooms:
        assert (CHECKOUT / room).is_dir(), room


@pytest.mark.parametrize("path", sorted(CHECKOUT.glob("*.md")), ids=lambda path: path.name)
def test_links_between_documents_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)#:]+)\)", path.read_text(encoding="utf-8")):
        assert (path.parent / target).exists(), target


def test_the_pinned_set_covers_what_the_project_needs():
    pinned = {
        line.split("==")[0]
        for line in (CHECKOUT / "constraints.txt").read_text(encoding="utf-8").splitlines()
        if line
    }
    fixed = {"torch", "ray", "triton", "hydra-core", "mlflow", "pyarrow", "optuna"}
    needed = {re.split(r"[\[<>=;]", text)[0] for text in PROJECT["dependencies"]}
    assert fixed <= needed
    assert fixed <= pinned


def test_a_todo_has_an_anchor():
    bare = re.compile(r"\b(TODO|FIXME|XXX)\b(?!.*https?://)")
    for room in ("orchestrator", "models", "kernels", "analysis"):
        for path in (CHECKOUT / room).rglob("*.py"):
            assert not bare.search(path.read_text(encoding="utf-8")), path
