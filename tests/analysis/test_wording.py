"""Names, numbers and sentences."""

import json
import math

import pandas as pd
import pytest

from analysis import wording
from analysis.comparison import VERDICTS
from analysis.load import load_sweep
from analysis.naming import COLUMNS, name_arms
from analysis.study import analyse


def arms(*rows):
    base = dict.fromkeys(COLUMNS) | {"config_json": None}
    return pd.DataFrame([base | {"arm_id": f"id{i}"} | row for i, row in enumerate(rows)])


def test_names_say_what_differs():
    table = arms(
        {"mixer": "gated_deltanet", "stack": "hybrid", "softmax_every": 3.0, "optimizer": "muon"},
        {"mixer": "softmax", "stack": "pure", "optimizer": "adamw"},
    )
    assert list(name_arms(table).values()) == ["Gated DeltaNet · hybrid · Muon", "Softmax · AdamW"]


def test_names_of_unknown_parts_are_spelt_out():
    table = arms(
        {"mixer": "my_rule", "dt_init": "ones"}, {"mixer": "deltanet", "dt_init": "loguniform"}
    )
    assert list(name_arms(table).values()) == ["My rule · Δt ones", "DeltaNet · Δt loguniform"]


def test_equal_names_are_told_apart_by_their_configurations():
    configs = [{"model": {"negative": flag}, "optimizer": {"lr": flag}} for flag in (True, False)]
    table = arms(*({"mixer": "deltanet", "config_json": json.dumps(c)} for c in configs))
    assert list(name_arms(table).values()) == [
        "DeltaNet · negative True",
        "DeltaNet · negative False",
    ]


def test_equal_names_without_a_reason_get_their_id():
    table = arms({"mixer": "deltanet"}, {"mixer": "deltanet"})
    assert list(name_arms(table).values()) == ["DeltaNet (id0)", "DeltaNet (id1)"]


@pytest.mark.parametrize(
    ("value", "text"),
    [(3e-4, "3e-4"), (1e-3, "1e-3"), (0.0012, "1.2e-3"), (0.01, "1e-2"), (0.0, "0"), (1.0, "1e0")],
)
def test_rates(value, text):
    assert wording.rate_text(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (176_000, "176 k"),
        (20_992.6, "21.0 k"),
        (3.14e6, "3.14 M"),
        (92.0, "92.0"),
        (999.9, "1.00 k"),
    ],
)
def test_counts(value, text):
    assert wording.count_text(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(-0.0143, "−0.0143"), (0.5, "+0.5000"), (-1e-9, "0.0000")]
)
def test_signs(value, text):
    assert wording.signed(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(1e-9, "< 0.0001"), (0.0076, "0.0076"), (math.nan, "–")]
)
def test_p_values(value, text):
    assert wording.p_text(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0 B"), (24_576, "24 KiB"), (418_000_000, "399 MiB")]
)
def test_bytes(value, text):
    assert wording.bytes_text(value) == text


def test_every_verdict_has_its_own_verb(small_folder):
    comparison = analyse(load_sweep(small_folder)).comparables[0].comparison
    verbs = {
        "better": "has a lower loss than",
        "worse": "has a higher loss than",
        "equivalent": "are equivalent within ±0.01 nats",
        "undecided": "no difference is shown, nor equivalence",
    }
    assert set(verbs) == set(VERDICTS)
    row = comparison.rows[0]
    for verdict, verb in verbs.items():
        import dataclasses  # noqa: PLC0415

        sentence = wording.difference_sentence(
            dataclasses.replace(row, verdict=verdict), comparison
        )
        assert verb in sentence
        assert not any(other in sentence for key, other in verbs.items() if key != verdict)


def test_a_headline_names_both_ends(small_folder):
    part = analyse(load_sweep(small_folder)).comparables[0]
    sentence = wording.headline_sentence(part)
    assert "The front has 4 of 4 arms" in sentence
    assert sentence.index("Linear attention") < sentence.index("Gated DeltaNet")
