"""Context length, equal budgets and other costs."""

import math

import numpy as np
import pandas as pd
import pytest

from analysis import power_law, scaling
from analysis.budgets import interpolate_loss, matched_losses
from analysis.load import load_sweep
from analysis.next_runs import proposal_sentence, propose
from analysis.study import analyse
from analysis.tradeoffs import trade_offs

LENGTHS = np.array([1024.0, 2048, 4096, 8192])


def test_the_exponent_of_four_lengths():
    seconds = np.array([1, 2.1, 4.5, 10])
    assert scaling.exponent(LENGTHS, seconds) == pytest.approx(1.106532, abs=1e-6)
    expected = np.log2([2.1, 4.5 / 2.1, 10 / 4.5])
    assert scaling.local_exponents(LENGTHS, seconds) == pytest.approx(expected)
    assert scaling.exponent(LENGTHS, LENGTHS**2) == pytest.approx(2.0)


def test_growth_of_published_iteration_times():
    # Softmax, hybrid and pure gated delta at 32K against the implied 4K.
    pairs = [(1.15, 3.37, 192), (0.95, 1.56, 65), (0.89, 0.96, 8)]
    for first, last, percent in pairs:
        assert scaling.growth_percent(first, last) == pytest.approx(percent, abs=1.2)


def test_crossovers_are_interpolated_on_logarithms():
    first = np.array([50.0, 80.0, 80.0, 80.0])
    second = np.array([100.0, 100.0, 64.0, 40.0])
    assert scaling.crossover(LENGTHS, first, second) == pytest.approx(2048 * math.sqrt(2))
    assert scaling.crossover(LENGTHS, second, first) is None
    assert scaling.crossover(LENGTHS, second + 100, first) is None


def test_crossover_ranges_follow_the_seeds():
    first = np.array([[50.0, 50.0], [80.0, 80.0], [80.0, 80.0], [80.0, 80.0]])
    second = np.array([[100.0, 100.0], [100.0, 100.0], [64.0, 64.0], [40.0, 40.0]])
    low, high = scaling.crossover_range(LENGTHS, first, second)
    assert low == high == pytest.approx(2048 * math.sqrt(2))
    second[2, 1] = 90.0
    low, high = scaling.crossover_range(LENGTHS, first, second)
    assert low < high
    assert all(math.isnan(x) for x in scaling.crossover_range(LENGTHS, first[:, :1], second[:, :1]))


def test_a_power_law_gives_back_its_tokens():
    law = power_law.PowerLaw(alpha=0.5, decay=0.5, floor=3.0)
    assert law.tokens_for(3.25) == pytest.approx(4.0)
    assert law.tokens_for(3.0) is None
    tokens = np.array([1e6, 3e6, 1e7, 3e7, 1e8])
    fit = power_law.fit_power_law(tokens, 200 * tokens**-0.4 + 2.5)
    assert fit.decay == pytest.approx(0.4, abs=1e-3)
    assert fit.floor == pytest.approx(2.5, abs=1e-3)
    with pytest.raises(ValueError, match="needs 4 budgets, got 3"):
        power_law.fit_power_law(tokens[:3], tokens[:3])


@pytest.fixture
def context_rows(made):
    """Softmax slows with length and runs out of memory at the longest; the other does not."""
    rows = []
    plan = made.Plan(
        arms=[("softmax", "pure", "adamw"), ("deltanet", "pure", "adamw")], rates=(1e-3,)
    )
    for length in (1024, 2048, 4096):
        for row in made.make_trials(plan):
            is_softmax = row["mixer"] == "softmax"
            seconds = length * (1e-6 + 8e-10 * length * is_softmax + 1e-6 * (not is_softmax))
            lost = is_softmax and length == 4096
            rows.append(
                row
                | {
                    "seq_len": length,
                    "arm_id": f"{row['arm_id']}-{length}",
                    "cell_id": f"{row['cell_id']}-{length}",
                    "replicate_id": f"{row['replicate_id']}-{length}",
                    "tokens_per_second": None if lost else length / seconds,
                    "status": "failed" if lost else "completed",
                    "failure_class": "oom_gpu" if lost else None,
                    "val_loss_nats": None,
                }
            )
    return rows


def test_families_join_lengths_and_keep_what_ran_out_of_memory(made, tmp_path, context_rows):
    folder = made.write_folder(tmp_path, context_rows, spec={"purpose": "measure"})
    families = scaling.build_families(load_sweep(folder).trials)
    assert [family.label for family in families] == ["Softmax", "DeltaNet"]
    softmax, delta = families
    assert softmax.lengths.tolist() == [1024, 2048]
    assert softmax.out_of_memory == (4096,)
    assert delta.seconds == pytest.approx(delta.lengths * 2e-6)
    found = scaling.find_crossovers(families)
    assert len(found) == 1
    assert 1024 < found[0].length < 2048
    assert found[0].length == pytest.approx(
        scaling.crossover(
            np.array([1024.0, 2048.0]),
            1 / delta.seconds[:2],
            1 / softmax.seconds,
        )
    )
    sentences = " ".join(scaling.scaling_sentences(families))
    assert "out of memory at 4,096" in sentences
    assert "DeltaNet trains faster than Softmax from" in sentences


def test_one_length_is_no_family(small_folder):
    assert scaling.build_families(load_sweep(small_folder).trials) == ()


def test_losses_between_evaluations_are_linear_in_log_tokens():
    curve = pd.DataFrame({"tokens": [100.0, 10_000.0], "val_loss_nats": [4.0, 2.0]})
    assert interpolate_loss(curve, 1000.0) == pytest.approx(3.0)
    assert math.isnan(interpolate_loss(curve, 99.0))
    assert math.isnan(interpolate_loss(curve.head(0), 99.0))


def test_at_equal_seconds_slower_arms_have_seen_fewer_tokens(small_folder):
    sweep = load_sweep(small_folder)
    points = analyse(sweep).points
    matched = [m for m in matched_losses(points, sweep.curves) if m.budget == "device_seconds"]
    assert len(matched) == 4
    speeds = {point.arm.arm_id: point for point in points}
    fastest = max(matched, key=lambda m: speeds[m.arm.arm_id].speed)
    assert fastest.share == pytest.approx(1.0)
    assert fastest.loss == pytest.approx(speeds[fastest.arm.arm_id].loss)
    for match in matched:
        point = speeds[match.arm.arm_id]
        assert match.tokens == pytest.approx(match.amount * point.speed)
        assert math.isnan(match.loss) or match.loss >= point.loss


def test_fronts_of_other_costs_point_the_right_way(small_folder):
    part = analyse(load_sweep(small_folder)).comparables[0]
    trades = {trade.cost.column: trade for trade in trade_offs(part)}
    state = trades["state_bytes"]
    assert "softmax-pure-adamw" in state.on_front
    assert "linear-pure-adamw" not in state.on_front
    best = min(part.points, key=lambda point: point.loss)
    assert best.arm.arm_id in state.on_front
    assert "flops_per_token" not in trades


def test_proposals_go_beyond_an_edge_and_name_a_price(made, tmp_path):
    rows = [row for row in made.make_trials(made.small_plan()) if row["lr"] <= 1e-3]
    part = analyse(load_sweep(made.write_folder(tmp_path, rows))).comparables[0]
    edge = next(p for p in propose(part) if p.arm.arm_id == "deltanet-pure-adamw")
    assert edge.lr == pytest.approx(1e-3**2 / 3e-4)
    assert edge.num_runs == 3
    sentence = proposal_sentence(edge)
    assert "at the highest rate tried" in sentence
    assert "About 22 s for DeltaNet" in sentence
