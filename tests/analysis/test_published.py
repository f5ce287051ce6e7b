"""Published numbers as data, and a report's arms beside them."""

from pathlib import Path

import pytest

from analysis.load import load_sweep
from analysis.markdown import markdown_page
from analysis.published import (
    agreement_sentence,
    compare_with_published,
    published_front,
    read_published,
)
from analysis.study import Settings, analyse

FILE = Path(__file__).parents[2] / "conf" / "paper" / "published.yaml"


def test_the_published_front():
    table = read_published(FILE, "main_table")
    assert len(table) == 18
    assert set(published_front(table)) == {
        ("gated_deltanet", "pure", "adamw"),
        ("gated_deltanet", "pure", "muon"),
        ("deltanet", "pure", "adamw"),
        ("gated_deltanet", "hybrid", "adamw"),
        ("gated_deltanet", "hybrid", "muon"),
        ("deltanet", "hybrid", "muon"),
        ("kimi_delta", "hybrid", "muon"),
    }


def test_published_differences_between_optimizers():
    table = read_published(FILE, "main_table").set_index(["mixer", "stack", "optimizer"])
    losses = table["val_loss_nats"]
    for mixer, stack, change in [
        ("softmax", "pure", -0.064),
        ("deltanet", "hybrid", -0.049),
        ("kimi_delta", "pure", -0.057),
        ("gated_deltanet2", "hybrid", -0.034),
    ]:
        difference = losses[mixer, stack, "muon"] - losses[mixer, stack, "adamw"]
        assert difference == pytest.approx(change, abs=1e-9)


@pytest.mark.parametrize(
    "name", ["one_billion_tokens", "larger", "cler", "hidden_routing", "iteration_time"]
)
def test_every_table_is_complete(name):
    table = read_published(FILE, name)
    assert table.notna().all().all()


def test_arms_are_matched_and_orders_counted(made, tmp_path):
    folder = made.write_folder(tmp_path, made.make_trials(made.wide_plan()))
    part = analyse(load_sweep(folder)).comparables[0]
    table = read_published(FILE, "main_table")
    agreement = compare_with_published(part, table)
    assert len(agreement.rows) == 18
    assert agreement.missing == ()
    # No two published final losses are equal.
    assert agreement.loss_pairs == 18 * 17 // 2
    assert 0 < agreement.loss_agreed <= agreement.loss_pairs
    sentence = agreement_sentence(agreement, "the paper")
    assert f"{agreement.loss_agreed} of 153 pairs" in sentence


def test_a_sweep_with_the_published_losses_agrees_everywhere(made, tmp_path):
    table = read_published(FILE, "main_table")
    losses = {
        (row["mixer"], row["stack"], row["optimizer"]): (row["val_loss_nats"], row["speed"])
        for _, row in table.iterrows()
    }
    rows = made.make_trials(made.wide_plan())
    for row in rows:
        loss, speed = losses[row["mixer"], row["stack"], row["optimizer"]]
        row.update(val_loss_nats=loss, tokens_per_second=176_000 * speed)
        row.update(status="completed", tokens=made.TOKENS)
    part = analyse(load_sweep(made.write_folder(tmp_path, rows))).comparables[0]
    agreement = compare_with_published(part, table)
    assert (agreement.loss_agreed, agreement.speed_agreed) == (
        agreement.loss_pairs,
        agreement.speed_pairs,
    )
    own = {tuple(p.arm.fact(k) for k in ("mixer", "stack", "optimizer")) for p in part.front}
    assert own == set(published_front(table))


def test_missing_arms_are_named(small_folder):
    part = analyse(load_sweep(small_folder)).comparables[0]
    agreement = compare_with_published(part, read_published(FILE, "main_table"))
    assert len(agreement.rows) == 4
    assert "kimi_delta hybrid muon" in agreement.missing


def test_a_report_puts_published_numbers_beside_its_own(small_folder):
    reference = f"{FILE}#main_table"
    study = analyse(load_sweep(small_folder), Settings(published=reference))
    text = markdown_page(study)
    assert "## Beside published numbers" in text
    assert "4 arms of the published main_table are here" in text
    assert "| DeltaNet · pure · AdamW | 2.3820 |" in text
    broken = analyse(load_sweep(small_folder), Settings(published=str(FILE)))
    with pytest.raises(ValueError, match="must be PATH#TABLE"):
        markdown_page(broken)


def test_bad_tables_are_refused(tmp_path, small_folder):
    with pytest.raises(ValueError, match="has no table 'nothing'; it has cler"):
        read_published(FILE, "nothing")
    with pytest.raises(ValueError, match="is not readable as YAML"):
        read_published(tmp_path / "none.yaml", "x")
    bad = tmp_path / "bad.yaml"
    bad.write_text("t: {columns: [mixer, stack], rows: [[a]]}", encoding="utf-8")
    with pytest.raises(ValueError, match="row 1 of t has 1 values; 2 are needed"):
        read_published(bad, "t")
    part = analyse(load_sweep(small_folder)).comparables[0]
    with pytest.raises(ValueError, match="lacks stack, optimizer"):
        compare_with_published(part, read_published(FILE, "hidden_routing"))
