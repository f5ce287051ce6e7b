"""What a configuration, a run folder or a URI must not be able to do."""

import ast
import json
import os
from types import SimpleNamespace

import pytest

from orchestrator import tracking
from orchestrator.compose import load_sweep
from orchestrator.data.preparation import prepare
from orchestrator.driver import spec_json
from orchestrator.errors import ConfigError
from orchestrator.plan import make_plan
from orchestrator.provenance import CHECKOUT, capture
from orchestrator.worker import TEST_TRAINER_VARIABLE

SWEEP = """
name: small
base:
  size: nano
  data: files
  data.sources: [text.jsonl]
  data.vocab_size: 300
  budget.tokens: 1280
  batch.tokens: 128
  seq_len: 64
seeds: [0]
{more}
"""


@pytest.fixture
def load(tmp_path):
    def run(more="", *overrides):
        (tmp_path / "small.yaml").write_text(SWEEP.format(more=more))
        return load_sweep("small.yaml", list(overrides), tmp_path)

    return run


def test_the_ui_listens_on_this_machine_only(tmp_path, monkeypatch):
    commands = []

    def remember(command, check):
        commands.append(command)
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(tracking.subprocess, "run", remember)
    (tmp_path / "mlflow.db").touch()
    assert tracking.serve_ui(tmp_path, 5000) == 0
    (command,) = commands
    assert command[command.index("--host") + 1] == "127.0.0.1"


UNSAFE = {"pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}


def unsafe_calls(path):
    """Places in a file that would load a pickle or run text as code."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in UNSAFE)
        if isinstance(node, ast.ImportFrom) and node.module in UNSAFE:
            yield node.module
        if not isinstance(node, ast.Call):
            continue
        text = ast.unparse(node.func)
        options = {option.arg: ast.unparse(option.value) for option in node.keywords}
        if text in ("eval", "exec"):
            yield text
        if text == "torch.load" and options.get("weights_only") != "True":
            yield text
        if text.endswith("np.load") and options.get("allow_pickle") != "False":
            yield text
        if text in ("yaml.load", "yaml.unsafe_load", "yaml.full_load"):
            yield text
        if text.endswith(("instantiate", "get_class", "get_method", "get_object")):
            yield text


def test_no_room_loads_a_pickle_or_runs_text_as_code():
    rooms = ("orchestrator", "models", "kernels", "analysis")
    files = [path for room in rooms for path in (CHECKOUT / room).rglob("*.py")]
    assert len(files) > 100
    found = {str(path): calls for path in files if (calls := list(unsafe_calls(path)))}
    assert found == {}


def test_the_check_sees_what_it_looks_for(tmp_path):
    path = tmp_path / "bad.py"
    path.write_text("import pickle\ntorch.load(p)\nnp.load(p)\neval(t)\nhydra.utils.instantiate(c)")
    assert len(list(unsafe_calls(path))) == 5


@pytest.mark.parametrize(
    "more",
    [
        "_target_: os.system",
        "base2: {_target_: os.system}",
        "axes: {model._target_: [os.system]}",
        'axes: {model.mixer: ["${oc.env:HOME}/x"]}',
        "tracking: {_target_: os.system}",
        "!!python/object/apply:os.system ['touch hacked']",
    ],
    ids=["top", "nested", "axis", "environment", "tracking", "yaml tag"],
)
def test_a_configuration_cannot_name_code_to_run(load, tmp_path, more):
    with pytest.raises(ConfigError):
        load(more)
    assert not (tmp_path / "hacked").exists()


def test_no_key_of_a_configuration_reaches_the_trainer_of_the_tests(load):
    for key in (TEST_TRAINER_VARIABLE, TEST_TRAINER_VARIABLE.lower(), "trainer", "worker.trainer"):
        with pytest.raises(ConfigError):
            load("", f"{key}=/tmp/x.py")
    assert TEST_TRAINER_VARIABLE not in os.environ


@pytest.mark.parametrize("name", ["../out", "a/b", "/tmp/out", "..", ".", ""])
def test_a_sweeps_name_cannot_leave_the_root(load, name):
    with pytest.raises(ConfigError, match="name"):
        load("", f"name='{name}'")


@pytest.mark.parametrize("name", ["../out", "a/b", "/tmp/out", ".."])
def test_a_data_sets_name_cannot_leave_the_root(load, name):
    with pytest.raises(ConfigError, match=r"data\.name"):
        load("", f"data.name='{name}'")


SECRET = "hunter2"
URI = f"postgresql://me:{SECRET}@localhost:1/db"


def test_a_password_is_in_nothing_that_a_sweep_writes(load, tmp_path):
    rows = [json.dumps({"text": " ".join(f"w{n % 97}" for n in range(200))})] * 50
    (tmp_path / "text.jsonl").write_text("\n".join(rows))
    plan = make_plan(load("", f"tracking.uri={URI}"), tmp_path / "runs", tmp_path)
    command = ["python", "-m", "orchestrator", "sweep", f"tracking.uri={URI}"]
    provenance = capture(command)
    assert "me:***@localhost" in provenance.command
    prepare(plan.data, plan.root)
    ready = make_plan(plan.sweep, plan.root, tmp_path)
    spec = spec_json(ready, provenance)
    assert SECRET not in json.dumps(spec)
    assert "me:***@localhost" in json.dumps(spec["overrides"])
    tags = tracking._source_tags(provenance)
    assert SECRET not in json.dumps(tags)
    with pytest.raises(ConfigError) as caught:
        tracking._connect(URI)
    assert SECRET not in str(caught.value)
