"""Where a page leads: folders of replicates and pages of MLflow, if there are any."""

import json

import pytest

from analysis.interactive.pareto import pareto_figure
from analysis.load import load_sweep
from analysis.report import write_report
from analysis.run_links import RunLinks, find_run_links
from analysis.study import analyse

ADDRESS = "http://127.0.0.1:5000/#/experiments/1/runs/0a1b"


@pytest.fixture
def folder(made, tmp_path):
    """A sweep's records without a report, which a test may add to."""
    arms = [("softmax", "pure", "adamw"), ("deltanet", "pure", "adamw")]
    plan = made.Plan(arms=arms, rates=(3e-3,), seeds=(0, 1))
    return made.write_folder(tmp_path / "sweep", made.make_trials(plan))


def marks(figure):
    """Seed, replicate and page of every run that a click on a mark writes."""
    traces = [trace for trace in figure["data"] if "customdata" in trace]
    assert traces
    return [run for trace in traces for point in trace["customdata"] for run in point["runs"]]


def test_a_click_leads_to_the_runs_of_the_chosen_cell_and_no_others(folder):
    part = analyse(load_sweep(folder)).comparables[0]
    chosen = {name for point in part.drawn for name in point.choice.cell.replicate_ids}
    known = sorted(chosen)[0]
    figure = pareto_figure(part, RunLinks(pages={known: ADDRESS, "another": ADDRESS}))
    assert {name for _, name, _ in marks(figure)} == chosen
    assert [name for _, name, page in marks(figure) if page] == [known]
    texts = [text for trace in figure["data"] for text in trace.get("text", [])]
    assert any("click: its runs" in text for text in texts)
    assert not any(
        "click" in text for trace in pareto_figure(part)["data"] for text in trace.get("text", [])
    )


def test_a_report_has_the_addresses_and_its_claims_do_not_depend_on_them(folder, tmp_path):
    name = load_sweep(folder).trials["replicate_id"].iloc[0]
    before = write_report(folder, tmp_path / "before")
    (folder / "mlflow.json").write_text(json.dumps({"replicates": {name: ADDRESS}}))
    after = write_report(folder, tmp_path / "after")
    assert ADDRESS not in (before.folder / "index.html").read_text()
    assert find_run_links(folder, after.folder).pages == {name: ADDRESS}
    for path in before.files:
        if path.name != "index.html":
            assert (before.folder / path).read_bytes() == (after.folder / path).read_bytes()


@pytest.mark.parametrize(
    "text",
    ["{", "[]", "{}", '{"replicates": []}', '{"replicates": {"a": "javascript:alert(1)"}}'],
)
def test_a_file_of_links_that_is_none_is_refused_before_anything_is_written(folder, text):
    (folder / "mlflow.json").write_text(text)
    with pytest.raises(ValueError, match=r"mlflow\.json"):
        write_report(folder)
    assert not (folder / "report").exists()


def test_folders_are_found_from_the_page(tmp_path):
    assert find_run_links(tmp_path, tmp_path / "report") == RunLinks()
    (tmp_path / "replicates").mkdir()
    assert find_run_links(tmp_path, tmp_path / "report").folders == "../replicates"
