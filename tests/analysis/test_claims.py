"""Claims follow from the records, and drift is found wherever it is."""

import json
import shutil

import pandas as pd
import pytest

from analysis.claims import verify


@pytest.fixture
def sweep(small_folder, small_report, tmp_path):
    """A copy of the small sweep with its report, free to be changed."""
    assert small_report.files
    return shutil.copytree(small_folder, tmp_path / "s")


def read_claims(folder):
    return json.loads((folder / "report" / "claims.json").read_text(encoding="utf-8"))


def change_trials(folder, change):
    trials = pd.read_parquet(folder / "trials.parquet")
    change(trials)
    trials.to_parquet(folder / "trials.parquet", index=False)


def test_a_fresh_report_holds(sweep):
    assert verify(sweep) == []


def test_claims_name_their_query_test_and_replicates(sweep):
    stored = read_claims(sweep)
    claims = {claim["id"]: claim for claim in stored["claims"]}
    assert len(claims) == len(stored["claims"])
    loss = claims["loss/softmax-pure-adamw"]
    trials = pd.read_parquet(sweep / "trials.parquet").set_index("replicate_id")
    assert loss["value"] == pytest.approx(trials.loc[loss["replicates"], "val_loss_nats"].mean())
    assert loss["query"] == (
        "mean val_loss_nats where cell_id = softmax-pure-adamw-0.003 and state = completed"
    )
    assert loss["test"]["method"] == "95 % t interval"
    assert loss["unit"] == "nats per token"
    difference = claims["difference/deltanet-pure-adamw"]
    assert difference["test"]["method"] in ("blocked ANOVA", "paired t")
    assert difference["test"]["verdict"] in difference["statement"] or (
        "lower loss" in difference["statement"]
    )
    assert stored["seeds"] == [0, 1, 2]
    assert stored["git_commits"] == ["0123456789abcdef0123456789abcdef01234567"]


def test_every_sentence_of_the_findings_is_a_claim(sweep):
    text = (sweep / "report" / "report.md").read_text(encoding="utf-8")
    findings = text.split("## Findings")[1].split("##")[0]
    sentences = {line[2:] for line in findings.splitlines() if line.startswith("- ")}
    statements = {claim["statement"] for claim in read_claims(sweep)["claims"]}
    assert sentences
    assert sentences <= statements


def test_a_changed_loss_is_found(sweep):
    def change(trials):
        row = trials.index[trials["replicate_id"] == "softmax-pure-adamw-0.003-s0"]
        trials.loc[row, "val_loss_nats"] += 1e-6

    change_trials(sweep, change)
    drifts = verify(sweep)
    assert any(drift.startswith("loss/softmax-pure-adamw: value was") for drift in drifts)
    assert any("tables/front.csv differs from line" in drift for drift in drifts)


def test_a_lost_replicate_is_found(sweep):
    trials = pd.read_parquet(sweep / "trials.parquet")
    trials.drop(index=5).to_parquet(sweep / "trials.parquet", index=False)
    drifts = verify(sweep)
    assert any(drift.startswith("accounting/missing: value was 0, is now 1") for drift in drifts)


def test_an_edited_table_or_page_is_found(sweep):
    path = sweep / "report" / "tables" / "front.csv"
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    lines[2] = lines[2].replace("True", "False")
    path.write_text("".join(lines), encoding="utf-8")
    page = sweep / "report" / "report.md"
    page.write_text(page.read_text(encoding="utf-8") + "It is the best.\n", encoding="utf-8")
    (sweep / "report" / "tables" / "cells.csv").unlink()
    assert sorted(verify(sweep)) == [
        "report.md differs in its length from what the records give.",
        "tables/cells.csv is missing or unreadable.",
        "tables/front.csv differs from line 3 on from what the records give.",
    ]


@pytest.mark.parametrize("key", ["value", "statement", "query", "replicates", "test"])
def test_an_edited_claim_is_found(sweep, key):
    stored = read_claims(sweep)
    claim = next(claim for claim in stored["claims"] if claim["id"].startswith("loss/"))
    changed = {"value": 1.0, "statement": "Better.", "query": "none", "replicates": [], "test": {}}
    claim[key] = changed[key]
    (sweep / "report" / "claims.json").write_text(json.dumps(stored), encoding="utf-8")
    drifts = verify(sweep)
    assert len(drifts) == 1
    assert drifts[0].startswith(f"{claim['id']}: {key} was")


def test_claims_that_appear_or_vanish_are_found(sweep):
    stored = read_claims(sweep)
    stored["claims"][-1]["id"] = "difference/nobody"
    (sweep / "report" / "claims.json").write_text(json.dumps(stored), encoding="utf-8")
    drifts = verify(sweep)
    assert "difference/nobody is claimed, but no longer follows from the records." in drifts
    assert any("follows from the records, but is not claimed" in drift for drift in drifts)


def test_an_unreadable_report_is_refused_in_one_sentence(sweep):
    path = sweep / "report" / "claims.json"
    path.write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match="is not readable JSON"):
        verify(sweep)
    path.write_text("[]", encoding="utf-8")
    with pytest.raises(ValueError, match="is not in format 1"):
        verify(sweep)
    path.write_text('{"format": 1, "compare_within": [], "claims": []}', encoding="utf-8")
    with pytest.raises(ValueError, match="lacks the settings"):
        verify(sweep)
    path.unlink()
    with pytest.raises(ValueError, match="write the report first"):
        verify(sweep)
