"""The report as a whole: files, determinism, honesty about what is missing, odd input."""

import csv
import json
import math

import numpy as np
import pandas as pd
import pytest

from analysis.__main__ import main
from analysis.claims import verify
from analysis.load import load_sweep
from analysis.markdown import markdown_page
from analysis.report import write_report
from analysis.study import analyse

EXPECTED = {
    "claims.json",
    "files.txt",
    "index.html",
    "report.md",
    "figures/pareto.png",
    "figures/pareto.svg",
    "figures/learning_rate.png",
    "figures/learning_rate.svg",
    "figures/differences.png",
    "figures/curves.svg",
    "tables/front.csv",
    "tables/accounting.csv",
    "tables/lr_choice.csv",
    "tables/differences.csv",
    "tables/main.tex",
}


def read(result, name):
    return (result.folder / name).read_text(encoding="utf-8")


def table(result, name):
    return list(csv.DictReader(read(result, f"tables/{name}.csv").splitlines()))


def test_every_file_is_there_and_named(small_report):
    names = {path.as_posix() for path in small_report.files}
    assert names >= EXPECTED
    written = {
        path.relative_to(small_report.folder).as_posix()
        for path in small_report.folder.rglob("*")
        if path.is_file()
    }
    assert written == names


def test_the_front_table_has_one_row_per_arm_and_no_empty_flag(small_report):
    rows = {row["arm_id"]: row for row in table(small_report, "front")}
    assert len(rows) == 5
    assert {row["on_front"] for row in rows.values()} <= {"True", "False"}
    left_out = rows["kimi_delta-pure-muon"]
    assert left_out["on_front"] == "False"
    assert left_out["tokens_per_second_mean"] == ""
    assert "speed not measured" in left_out["left_out"]
    header = read(small_report, "tables/front.csv").splitlines()[0]
    assert header.startswith(
        "arm_id,cell_id,n_seeds,val_loss_nats_mean,tokens_per_second_mean,on_front,front_probability"
    )


def test_the_front_table_follows_from_the_records(small_folder, small_report):
    trials = pd.read_parquet(small_folder / "trials.parquet")
    done = trials[trials["status"] == "completed"]
    for row in table(small_report, "front"):
        arm = trials[trials["arm_id"] == row["arm_id"]]
        clean = arm.groupby("cell_id")["status"].agg(lambda s: "diverged" not in set(s))
        means = done[done["arm_id"] == row["arm_id"]].groupby("cell_id")["val_loss_nats"].mean()
        best = means[clean[clean].index.intersection(means.index)].idxmin()
        cell = done[done["cell_id"] == best]
        assert row["cell_id"] == best
        assert int(row["n_seeds"]) == len(cell)
        assert float(row["val_loss_nats_mean"]) == pytest.approx(cell["val_loss_nats"].mean())


def test_the_accounting_table_adds_up(small_report):
    counts = {row["state"]: int(row["replicates"]) for row in table(small_report, "accounting")}
    states = ("used", "diverged", "failed", "running", "pending", "missing")
    assert counts["expected"] == sum(counts[state] for state in states) == 60


def test_the_headline_has_numbers_and_words(small_report):
    headline = small_report.headline
    assert headline["replicates_used"] == 57
    assert headline["front_arms"] == 4
    assert headline["fastest_arm"] == "Linear attention · pure · AdamW"
    assert isinstance(headline["answer"], str)
    assert all(isinstance(value, float | str) for value in headline.values())


def test_two_reports_are_the_same_bytes_whatever_the_global_generator_holds(
    small_folder, small_report, tmp_path
):
    np.random.seed(3)  # noqa: NPY002
    before = np.random.get_state()[1].copy()  # noqa: NPY002
    again = write_report(
        small_folder, tmp_path / "r", title="A small sweep", context={"place": "a test"}
    )
    assert again.files == small_report.files
    for name in again.files:
        assert (again.folder / name).read_bytes() == (small_report.folder / name).read_bytes(), name
    assert (np.random.get_state()[1] == before).all()  # noqa: NPY002


def test_title_and_context_reach_the_pages(small_report):
    for name in ("report.md", "index.html"):
        text = read(small_report, name)
        assert "A small sweep" in text
        assert "a test" in text


def test_an_unmeasured_arm_and_a_diverged_one_are_said_on_both_pages(small_report):
    for name in ("report.md", "index.html"):
        text = read(small_report, name)
        assert "Kimi Delta · pure · Muon takes no part in the front: speed not measured" in text
        assert "1/12" in text


def test_old_figures_go_and_foreign_files_stay(made, tmp_path):
    folder = made.write_folder(tmp_path / "s", made.make_trials(made.small_plan())[:3])
    figures = tmp_path / "out" / "figures"
    figures.mkdir(parents=True)
    (figures / "holiday.png").write_bytes(b"x")
    first = write_report(folder, tmp_path / "out")
    assert (figures / "holiday.png").exists(), "a folder that is no report loses nothing"
    (figures / "pareto.png").rename(figures / "old.png")
    with (first.folder / "files.txt").open("a", encoding="utf-8") as listed:
        listed.write("figures/old.png\nfigures/../mine.txt\n../s/trials.parquet\n")
    (first.folder / "mine.txt").write_text("mine", encoding="utf-8")
    (figures / "mine.txt").write_text("mine", encoding="utf-8")
    write_report(folder, tmp_path / "out")
    assert not (figures / "old.png").exists()
    assert (figures / "holiday.png").exists()
    assert (folder / "trials.parquet").exists()
    assert (first.folder / "mine.txt").exists()
    assert (figures / "mine.txt").exists()


def set_all(**values):
    def change(rows):
        for row in rows:
            row.update(values)
        return rows

    return change


def name_oddly(rows):
    for row in rows:
        if row["mixer"] == "softmax":
            row["mixer"] = "注意力 $x_1$ <b>| é"
    return rows


ODD = {
    "none desired": (set_all(desired=False), 0),
    "one replicate": (lambda rows: rows[3:4], 1),
    "all diverged": (set_all(status="diverged", val_loss_nats=None), 0),
    "all nan": (set_all(val_loss_nats=math.nan), 0),
    "all pending": (set_all(status="pending", val_loss_nats=None, tokens_per_second=None), 0),
    "no speed": (lambda rows: set_all(tokens_per_second=None)(rows[:12]), 0),
    "only a rate of zero": (lambda rows: set_all(lr=0.0)(rows[:3]), 1),
    "names in another script": (lambda rows: name_oddly(rows[:24]), 2),
    "one seed": (lambda rows: [row for row in rows[:24] if row["seed"] == 0], 2),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_sweeps_give_a_readable_report(made, tmp_path, name):
    change, num_front = ODD[name]
    rows = change(made.make_trials(made.small_plan()))
    result = write_report(made.write_folder(tmp_path, rows))
    assert sum(point.on_front for point in result.study.points) == num_front
    assert read(result, "index.html").startswith("<!doctype html>")
    assert verify(tmp_path) == []
    assert result.headline["answer"]


def test_equal_arms_are_all_on_the_front(made, tmp_path):
    rows = [row for row in made.make_trials(made.small_plan()) if row["status"] == "completed"]
    equal = set_all(val_loss_nats=3.0, tokens_per_second=100.0)(rows)
    study = analyse(load_sweep(made.write_folder(tmp_path, equal)))
    assert all(point.on_front for point in study.points)


def test_few_columns_are_enough(made, tmp_path):
    rows = pd.DataFrame(made.make_trials(made.small_plan()))
    kept = ["arm_id", "lr", "seed", "status", "val_loss_nats", "tokens_per_second"]
    study = analyse(load_sweep(made.write_folder(tmp_path, rows[kept])))
    assert {point.arm.label for point in study.points} == set(rows["arm_id"])
    assert sum(point.on_front for point in study.points) == 4
    assert markdown_page(study).startswith("# Sweep ")


@pytest.mark.slow
def test_separate_comparisons_have_separate_fronts(made, tmp_path):
    rows = [row for row in made.make_trials(made.small_plan())[:24] if row["lr"] == 3e-3]
    longer = [
        row
        | {
            "seq_len": 512,
            "arm_id": row["arm_id"] + "-512",
            "cell_id": row["cell_id"] + "-512",
            "replicate_id": row["replicate_id"] + "-512",
        }
        for row in rows
    ]
    folder = made.write_folder(tmp_path, rows + longer, spec={"compare_within": ["seq_len"]})
    result = write_report(folder)
    names = {path.as_posix() for path in result.files}
    assert {"figures/pareto_1.png", "figures/pareto_2.png", "figures/scaling.png"} <= names
    assert [part.name for part in result.study.comparables] == ["seq_len=256", "seq_len=512"]
    assert len(table(result, "front")) == 4
    assert verify(folder) == []


def test_speed_alone_is_a_report_too(made, tmp_path):
    rows = []
    for length in (1024, 2048):
        for row in made.make_trials(made.small_plan())[:12]:
            tag = f"-{length}"
            rows.append(
                row
                | {
                    "seq_len": length,
                    "tokens_per_second": 1e6 / length,
                    "val_loss_nats": None,
                    "status": "completed",
                    "arm_id": row["arm_id"] + tag,
                    "cell_id": row["cell_id"] + tag,
                    "replicate_id": row["replicate_id"] + tag,
                }
            )
    spec = {"purpose": "measure", "name": "context"}
    result = write_report(made.write_folder(tmp_path, rows, spec=spec))
    assert result.headline["replicates_used"] == 24
    assert "the time per token changes by +100 %" in result.headline["answer"]
    assert "no front" not in read(result, "index.html")


def test_the_command_writes_and_verifies(made, tmp_path, capsys):
    folder = made.write_folder(tmp_path / "s", made.make_trials(made.small_plan())[3:6])
    out = tmp_path / "r"
    assert main([str(folder), "--out", str(out), "--title", "T"]) == 0
    printed = capsys.readouterr().out
    assert "Softmax · AdamW is both fastest" in printed
    assert str(out / "index.html") in printed
    assert main([str(folder), "--out", str(out), "--verify"]) == 0
    assert "Every claim follows from the 3 replicates" in capsys.readouterr().out
    claims = json.loads((out / "claims.json").read_text(encoding="utf-8"))
    claims["claims"][0]["value"] += 1
    (out / "claims.json").write_text(json.dumps(claims), encoding="utf-8")
    assert main([str(folder), "--out", str(out), "--verify"]) == 3
    assert "accounting/expected: value was 4, is now 3." in capsys.readouterr().err


def test_the_command_refuses_in_one_sentence(tmp_path, capsys):
    assert main([str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "trials.parquet does not exist" in error


def test_a_place_that_is_no_folder_is_refused_in_one_sentence(made, tmp_path, capsys):
    plan = made.Plan(arms=[("softmax", "pure", "adamw")], rates=(3e-3,), seeds=(0,))
    folder = made.write_folder(tmp_path / "sweep", made.make_trials(plan))
    taken = tmp_path / "taken"
    taken.write_text("mine", encoding="utf-8")
    for place in (taken, taken / "below"):
        assert main([str(folder), "--out", str(place)]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert f"{place} cannot be written" in error
    assert taken.read_text(encoding="utf-8") == "mine"
