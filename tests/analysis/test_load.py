"""Reading records: the schema, the accounting, and what is refused."""

import json
import math
import shutil
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest

from analysis.load import load_sweep
from orchestrator.records import TRIAL_COLUMNS


@pytest.fixture
def rows(made):
    return made.make_trials(made.small_plan())


def load(made, tmp_path, rows, **options):
    spec = options.pop("spec", None)
    return load_sweep(made.write_folder(tmp_path / "s", rows, spec=spec), **options)


def test_every_replicate_is_accounted_for(small_folder):
    sweep = load_sweep(small_folder)
    counts = dict(sweep.accounting.rows())
    assert counts["expected"] == counts["found"] == 60
    assert (counts["used"], counts["diverged"], counts["failed"], counts["pending"]) == (
        57,
        1,
        1,
        1,
    )
    states = ("used", "diverged", "failed", "running", "pending", "missing")
    assert counts["expected"] == sum(counts[state] for state in states)
    assert set(TRIAL_COLUMNS) <= set(sweep.trials.columns)


def test_rows_that_are_not_desired_are_counted_and_set_aside(made, tmp_path, rows):
    for row in rows[:7]:
        row["desired"] = False
    sweep = load(made, tmp_path, rows)
    assert sweep.accounting.not_desired == 7
    assert sweep.accounting.expected == len(sweep.trials) == 53


def test_replicates_without_a_row_are_missing(made, tmp_path, rows):
    sweep = load(made, tmp_path, rows[:-2], spec={"seeds": [0, 1, 2, 3]})
    assert sweep.accounting.missing == 2 + 20
    assert sweep.accounting.expected == 60 + 20
    assert any("between 1 and 3 seeds" in note for note in sweep.notes)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_completed_replicate_without_a_finite_loss_is_diverged(made, tmp_path, rows, bad):
    rows[0]["val_loss_nats"] = bad
    sweep = load(made, tmp_path, rows)
    assert sweep.accounting.diverged == 2
    assert "1 replicate completed without a finite validation loss" in sweep.notes[0]


def test_speeds_that_are_no_speed_become_unmeasured_with_a_note(made, tmp_path, rows):
    for row, value in zip(rows, (0.0, -3.0, math.inf), strict=False):
        row["tokens_per_second"] = value
    rows[3]["exclusive"] = False
    sweep = load(made, tmp_path, rows)
    measured = sweep.trials.set_index("replicate_id")["tokens_per_second"]
    assert measured[[row["replicate_id"] for row in rows[:4]]].isna().all()
    text = " ".join(sweep.notes)
    assert "tokens_per_second is not a positive number in 3 replicates" in text
    assert "1 replicate was measured on a shared device" in text


def test_a_rate_of_zero_is_kept_and_named(made, tmp_path, rows):
    for row in rows[:3]:
        row.update(lr=0.0, cell_id="zero", replicate_id=f"zero-{row['seed']}")
    sweep = load(made, tmp_path, rows)
    assert (sweep.trials["lr"] == 0).sum() == 3
    assert any("learning rate of 0" in note for note in sweep.notes)


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("status", "finished", "status='finished' in row 0 must be one of completed"),
        ("lr", -1e-3, "lr=-0.001 in row 0 must be a finite number, at least 0"),
        ("lr", math.nan, "lr=nan in row 0 must be a finite number"),
        ("seed", 1.5, "seed=1.5 in row 0 must be a whole number"),
        ("replicate_id", "kimi_delta-pure-muon-0.01-s1", "appears twice"),
    ],
)
def test_values_out_of_range_are_named(made, tmp_path, rows, column, value, message):
    rows[0][column] = value
    with pytest.raises(ValueError, match=message):
        load(made, tmp_path, rows)


def test_two_rows_for_one_seed_of_a_cell_are_refused(made, tmp_path, rows):
    rows[1]["seed"] = 0
    with pytest.raises(
        ValueError, match=r"cell_id=softmax-pure-adamw-0.0003, seed=0 appears twice"
    ):
        load(made, tmp_path, rows)


def test_text_in_a_number_column_is_named(made, tmp_path, rows):
    frame = pd.DataFrame(rows)
    frame["val_loss_nats"] = ["fast"] + ["6.0"] * (len(frame) - 1)
    with pytest.raises(ValueError, match="val_loss_nats='fast' in row 0 is not a number"):
        load(made, tmp_path, frame)


@pytest.mark.parametrize("column", ["seed", "lr", "status", "val_loss_nats"])
def test_a_missing_column_that_is_needed_is_named(made, tmp_path, rows, column):
    with pytest.raises(ValueError, match=f"lacks {column}"):
        load(made, tmp_path, pd.DataFrame(rows).drop(columns=column))


def test_ids_and_other_columns_may_be_missing(made, tmp_path, rows):
    kept = ["mixer", "stack", "optimizer", "lr", "seed", "status", "val_loss_nats"]
    full = load(made, tmp_path / "a", rows)
    bare = load(made, tmp_path / "b", pd.DataFrame(rows)[kept])
    assert bare.trials["arm_id"].nunique() == full.trials["arm_id"].nunique() == 5
    assert bare.trials["cell_id"].nunique() == full.trials["cell_id"].nunique() == 20
    assert bare.trials["replicate_id"].is_unique
    assert bare.trials["tokens_per_second"].isna().all()
    assert any("arm_id was missing in 60 replicates" in note for note in bare.notes)


def test_nothing_that_says_what_was_trained_is_refused(made, tmp_path, rows):
    frame = pd.DataFrame(rows).drop(columns=["arm_id", "mixer"])
    with pytest.raises(ValueError, match="neither arm_id nor mixer"):
        load(made, tmp_path, frame)


@pytest.mark.parametrize(
    ("column", "value", "shown"),
    [
        ("tokens", 55_040, "55040 .1 replicate, e.g. softmax-pure-adamw-0.0003-s0. and 110080"),
        ("data_id", "data-2", "data-1 .56 replicates"),
        ("eval_id", "eval-2", "eval-2 .1 replicate"),
        ("seq_len", 512, "mixes seq_len"),
        ("device_name", "another core", "another core"),
        ("precision", "bf16", "bf16"),
        ("threads", 2, "mixes threads"),
    ],
)
def test_mixed_comparisons_are_refused_with_the_rows(made, tmp_path, rows, column, value, shown):
    rows[0][column] = value
    with pytest.raises(ValueError, match=f"mixes {column}.*{shown}|{shown}") as caught:
        load(made, tmp_path, rows)
    assert "compare_within" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_budgets_of_replicates_that_did_not_complete_do_not_matter(small_folder):
    tokens = load_sweep(small_folder).trials["tokens"]
    assert tokens.nunique() == 2


@pytest.mark.parametrize("path", ["seq_len", "model.depth"])
def test_an_axis_of_compare_within_splits_the_comparison(made, tmp_path, rows, path):
    longer = [dict(row) for row in rows]
    for row in longer:
        row.update(
            seq_len=512,
            arm_id=row["arm_id"] + "-512",
            cell_id=row["cell_id"] + "-512",
            replicate_id=row["replicate_id"] + "-512",
        )
    for each in (rows, longer):
        for row in each:
            row["config_json"] = json.dumps({"model": {"depth": row["seq_len"]}})
    sweep = load(made, tmp_path, rows + longer, compare_within=(path,))
    assert sweep.groups == (f"{path}=256", f"{path}=512")


def test_an_unknown_axis_is_refused(made, tmp_path, rows):
    with pytest.raises(ValueError, match=r"compare_within='model\.deth' is neither a column"):
        load(made, tmp_path, rows, compare_within=("model.deth",))


def test_the_spec_may_stand_at_the_top_or_inside(made, tmp_path, rows):
    for number, spec in enumerate(({"name": "x", "seeds": [0]}, {"spec": {"name": "x"}})):
        sweep = load(made, tmp_path / str(number), rows, spec=spec)
        assert sweep.name == "x"


def test_an_empty_table_is_refused(made, tmp_path, rows):
    with pytest.raises(ValueError, match="has no rows"):
        load(made, tmp_path, pd.DataFrame(rows).head(0))


def test_unreadable_files_are_refused_in_one_sentence(made, tmp_path, rows):
    with pytest.raises(ValueError, match="is no folder"):
        load_sweep(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="does not exist"):
        load_sweep(tmp_path)
    folder = made.write_folder(tmp_path / "s", rows)
    (folder / "spec.json").write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match="not readable JSON"):
        load_sweep(folder)
    (folder / "spec.json").unlink()
    (folder / "trials.parquet").write_bytes(b"PAR1 no parquet")
    with pytest.raises(ValueError, match="not readable as Parquet"):
        load_sweep(folder)


def test_curves_of_other_replicates_are_set_aside(made, tmp_path, rows):
    curves = made.make_curves(rows)
    stray = curves[curves["replicate_id"] == curves["replicate_id"][0]].assign(replicate_id="x")
    folder = made.write_folder(tmp_path / "s", rows, pd.concat([curves, stray]))
    sweep = load_sweep(folder)
    assert len(sweep.curves) == len(curves)
    assert any("1 curve" in note for note in sweep.notes)


def test_the_digest_follows_the_records(made, tmp_path, rows):
    first = load(made, tmp_path / "a", rows).digest
    again = load(made, tmp_path / "b", rows).digest
    rows[0]["val_loss_nats"] = np.nextafter(rows[0]["val_loss_nats"], 10)
    assert first == again
    assert first != load(made, tmp_path / "c", rows).digest


def test_loading_needs_neither_matplotlib_nor_plotly_nor_torch():
    heavy = ("matplotlib", "plotly", "torch", "ray", "mlflow", "scipy.stats")
    code = f"import sys, analysis.load; print([m for m in {heavy!r} if m in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("values", "desired"),
    [
        ([1, 0], [True, False]),
        ([1.0, 0.0], [True, False]),
        (["true", "False"], [True, False]),
        ([None, False], [True, False]),
    ],
)
def test_flags_may_be_written_as_numbers_or_words(made, tmp_path, values, desired):
    rows = pd.DataFrame(made.make_trials(made.small_plan()))
    rows["desired"] = [values[i % 2] for i in range(len(rows))]
    sweep = load_sweep(made.write_folder(tmp_path, rows))
    assert sweep.accounting.found == sum(desired[i % 2] for i in range(len(rows)))


@pytest.mark.parametrize(("column", "value"), [("desired", "perhaps"), ("exclusive", 2)])
def test_a_flag_that_is_neither_is_named(made, tmp_path, column, value):
    rows = pd.DataFrame(made.make_trials(made.small_plan()))
    rows[column] = value
    with pytest.raises(ValueError, match=rf"{column}=.*{value}.* in row 0 must be true or false"):
        load_sweep(made.write_folder(tmp_path, rows))


def test_a_column_of_lists_is_named(made, tmp_path):
    rows = pd.DataFrame(made.make_trials(made.small_plan()))
    rows["mixer"] = [["a", "b"]] * len(rows)
    with pytest.raises(ValueError, match="mixer in row 0 holds several values"):
        load_sweep(made.write_folder(tmp_path, rows))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("seeds", ["a"]),
        ("seeds", "0,1"),
        ("seeds", [0.5]),
        ("seeds", [None]),
        ("replicates", -1),
        ("replicates", True),
        ("purpose", "dance"),
        ("compare_within", "seq_len"),
        ("name", 5),
        ("adaptive", 5),
        ("provenance", []),
        ("spec", []),
    ],
)
def test_a_spec_that_means_nothing_is_named(small_folder, tmp_path, key, value):
    shutil.copy(small_folder / "trials.parquet", tmp_path / "trials.parquet")
    (tmp_path / "spec.json").write_text(json.dumps({key: value}), encoding="utf-8")
    with pytest.raises(ValueError, match=rf"spec\.json: {key}=.* must be "):
        load_sweep(tmp_path)


def test_a_spec_of_nulls_says_nothing(small_folder, tmp_path):
    shutil.copy(small_folder / "trials.parquet", tmp_path / "trials.parquet")
    nulls = dict.fromkeys(("name", "purpose", "seeds", "replicates", "provenance", "adaptive"))
    (tmp_path / "spec.json").write_text(json.dumps(nulls), encoding="utf-8")
    sweep = load_sweep(tmp_path)
    assert (sweep.name, sweep.purpose, sweep.fixed_seeds) == ("made", "compare", None)


@pytest.mark.parametrize("value", [1.7976931348623157e308, -1.7976931348623157e308])
def test_an_infinity_as_mlflow_writes_it_is_one(made, tmp_path, value):
    rows = pd.DataFrame(made.make_trials(made.small_plan()))
    before = load_sweep(made.write_folder(tmp_path / "before", rows)).accounting
    rows.loc[5, "val_loss_nats"] = value
    after = load_sweep(made.write_folder(tmp_path / "after", rows)).accounting
    assert rows.loc[5, "status"] == "completed"
    assert (after.used, after.diverged) == (before.used - 1, before.diverged + 1)


def test_a_row_without_arm_and_mixer_is_named(made, tmp_path):
    rows = pd.DataFrame(made.make_trials(made.small_plan()))
    rows.loc[7, ["arm_id", "mixer"]] = None
    with pytest.raises(ValueError, match="row 7 has neither arm_id nor mixer"):
        load_sweep(made.write_folder(tmp_path, rows))
