"""What would run, what is refused before anything starts, and what leaves no trace."""

import json
import subprocess
import sys
import textwrap
import time

import pytest

from orchestrator import plan as planning
from orchestrator.compose import load_sweep
from orchestrator.errors import ConfigError
from orchestrator.hardware import Machine
from orchestrator.identity import replicate_id
from orchestrator.journal import Journal
from orchestrator.plan import make_plan, plan_json
from orchestrator.provenance import CHECKOUT

SMALL = """
name: small
base:
  size: nano
  data: sotu
  budget.tokens: 5120
  batch.tokens: 512
axes:
  model.mixer: [softmax, gated_deltanet]
  optimizer.lr: [1e-3, 3e-3]
seeds: [0, 1]
"""


@pytest.fixture
def plan(tmp_path, monkeypatch):
    def run(*overrides, text=SMALL, machine=None):
        (tmp_path / "small.yaml").write_text(textwrap.dedent(text))
        if machine is not None:
            monkeypatch.setattr(planning, "this_machine", lambda: machine)
        sweep = load_sweep("small.yaml", list(overrides), tmp_path)
        return make_plan(sweep, tmp_path / "runs", tmp_path)

    return run


def finish(plan, name, status="completed"):
    plan.ledger.describe(plan.desired[name])
    journal = Journal(plan.ledger.next_attempt(name))
    journal.append({"event": "end", "status": status})
    journal.close()


def remember(plan, **changes):
    """The `spec.json` of a sweep that was started."""
    spec = plan.spec
    facts = {"device": plan.device, "precision": plan.precision, "threads": plan.threads}
    plan.ledger.write_spec(
        {"base": spec.base, "axes": spec.axes, "match": spec.match, **facts, **changes}
    )


def test_a_plan_writes_nothing(plan, tmp_path):
    plan()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["small.yaml"]


def test_everything_desired_is_to_run_at_first(plan):
    found = plan()
    assert len(found.desired) == 8
    assert found.to_run == list(found.desired)
    assert [r.seed for r in found.desired.values()] == [0] * 4 + [1] * 4
    assert any("not prepared" in note for note in found.notes)


def test_what_failed_or_is_missing_is_to_run_and_a_result_is_not(plan):
    first = plan()
    names = list(first.desired)
    finish(first, names[0])
    finish(first, names[1], "diverged")
    finish(first, names[2], "failed")
    remember(first)
    assert plan().to_run == names[2:]
    assert plan().to_time == [names[0]]
    assert plan("lanes.speed.enabled=false").to_time == []


def test_more_seeds_ask_for_the_new_replicates_alone(plan):
    first = plan()
    for name in first.desired:
        finish(first, name)
    remember(first)
    more = plan("seeds=range(5)")
    assert len(more.to_run) == 12
    assert {name.split("-")[1] for name in more.to_run} == {"s2", "s3", "s4"}


def test_fewer_seeds_leave_the_others_on_disk(plan):
    first = plan()
    for name in first.desired:
        finish(first, name)
    remember(first)
    fewer = plan("seeds=0")
    assert len(fewer.undesired) == 4
    assert any("no longer asked for" in note for note in fewer.notes)


def test_a_base_that_would_change_cells_is_refused_with_both_values(plan):
    first = plan()
    finish(first, next(iter(first.desired)))
    remember(first)
    with pytest.raises(ConfigError, match=r"budget\.tokens: 5120 → 10240.*use another name"):
        plan("budget.tokens=10240")
    assert plan("log.every_steps=3").to_run
    assert plan("clip_norm=1.0").to_run


@pytest.mark.parametrize(
    ("key", "before"), [("device", "cuda"), ("precision", "bf16"), ("threads", 7)]
)
def test_rows_of_another_kind_under_one_name_are_refused(plan, key, before):
    first = plan()
    finish(first, next(iter(first.desired)))
    remember(first, **{key: before})
    with pytest.raises(ConfigError, match=f"with {key}={before}"):
        plan()


TWO_GPUS = Machine(host="node", cpus=16, memory_bytes=2**36, gpus=("H200", "H200"))
NO_GPU = Machine(host="node", cpus=2, memory_bytes=2**34, gpus=())


@pytest.mark.parametrize(
    ("overrides", "machine", "sentence"),
    [
        (["lanes.loss.gpus=4"], TWO_GPUS, "needs 4 GPUs, but node has 2"),
        (["lanes.loss.gpus=1", "lanes.loss.cpus=64"], TWO_GPUS, "needs 64 cores, but node has 16"),
        (["lanes.loss.gpus=4"], NO_GPU, "needs 4 GPUs, but node has 0"),
        (["device=cuda"], NO_GPU, "no NVIDIA GPU"),
        (["device=cuda", "lanes.loss.gpus=0"], TWO_GPUS, "give a trial a share"),
        (["lanes.loss.gpus=1.5"], TWO_GPUS, r"lanes\.loss\.gpus=1\.5 must be a whole number"),
        (["tracking.uri=./mlruns"], NO_GPU, "mlflow migrate-filestore"),
    ],
    ids=["gpus", "cpus", "none", "cuda", "no share", "broken", "store"],
)
def test_an_impossible_request_says_need_and_have(plan, overrides, machine, sentence):
    with pytest.raises(ConfigError, match=sentence):
        plan(*overrides, machine=machine)


NOW = {"code_id": "1" * 12, "packages_id": "2" * 12}


def trained_by(plan, name, **facts):
    plan.ledger.describe(plan.desired[name])
    journal = Journal(plan.ledger.next_attempt(name))
    journal.append({"event": "claim", **NOW, "torch_version": "1.0", **facts})
    journal.append({"event": "end", "status": "completed"})
    journal.close()


@pytest.mark.parametrize("key", ["code_id", "packages_id"])
def test_results_of_other_code_are_reused_told_or_refused(plan, key, monkeypatch):
    monkeypatch.setattr(planning, "fingerprints", lambda: NOW)
    first = plan()
    names = list(first.desired)
    trained_by(first, names[0])
    trained_by(first, names[1], **{key: "0" * 12})
    remember(first)
    warned = plan()
    assert warned.other_code == [names[1]] == plan_json(warned)["other_code"]
    assert any("1 of 8 replicates were trained by other code" in n for n in warned.notes)
    assert names[1] not in warned.to_run
    silent = plan("other_code=reuse")
    assert silent.other_code == [names[1]]
    assert not any("other code" in note for note in silent.notes)
    with pytest.raises(ConfigError, match=rf"{names[1]}.*another sweep name"):
        plan("other_code=refuse")
    with pytest.raises(ConfigError, match="other_code='no' must be one of reuse, warn, refuse"):
        plan("other_code=no")


def test_a_share_of_a_gpu_is_ignored_where_there_is_none(plan):
    assert plan("lanes.loss.gpus=0.25", machine=NO_GPU).device == "cpu"
    assert plan("lanes.loss.gpus=0.25", machine=TWO_GPUS).device == "cuda"


def test_the_json_names_every_cell_with_its_size(plan):
    found = plan_json(plan())
    assert json.loads(json.dumps(found)) == found
    assert len(found["cells"]) == 4
    for cell in found["cells"]:
        assert cell["params_total"] > cell["params_non_embedding"] > 0
        assert set(cell["replicates"]) == {replicate_id(cell["cell_id"], s) for s in (0, 1)}


def call(*arguments, folder):
    command = [sys.executable, "-m", "orchestrator", *arguments]
    began = time.perf_counter()
    result = subprocess.run(
        command,
        cwd=folder,
        env={"PYTHONPATH": str(CHECKOUT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return result, time.perf_counter() - began


def test_a_refusal_is_one_line_and_exit_code_two(tmp_path):
    result, _ = call("plan", "conf=quickstart", "model.mixr=softmax", folder=tmp_path)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert "nearest: model.mixer" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_name_is_found_from_any_folder(tmp_path):
    result, _ = call("plan", "conf=quickstart", "--json", folder=tmp_path)
    assert result.returncode == 0
    assert json.loads(result.stdout)["replicates"] == 40


@pytest.mark.parametrize("verb", ["--help", "plan"])
def test_light_verbs_import_nothing_heavy(verb):
    arguments = "['--help']" if verb == "--help" else "['plan', 'conf=quickstart']"
    heavy = "{'torch', 'ray', 'mlflow', 'matplotlib', 'pandas'}"
    program = (
        "import sys, contextlib\n"
        "from orchestrator.cli import main\n"
        f"with contextlib.suppress(SystemExit): main({arguments})\n"
        f"found = {heavy} & set(sys.modules)\n"
        "assert not found, found\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": str(CHECKOUT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
