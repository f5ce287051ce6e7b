"""Ids follow from content alone, and no parser takes one for a number."""

import copy
import hashlib
import math
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.config import TrialConfig, trial_from_dict, trial_to_dict
from orchestrator.identity import arm_id, canonical_json, cell_id, replicate_id

KEYS = st.text(max_size=6)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)


def config():
    return trial_to_dict(TrialConfig())


def changed(path, value):
    result = copy.deepcopy(config())
    *parents, last = path.split(".")
    node = result
    for name in parents:
        node = node[name]
    node[last] = value
    return result


@given(st.dictionaries(KEYS, PLAIN, max_size=4))
def test_the_order_of_keys_changes_nothing(value):
    assert canonical_json(value) == canonical_json(dict(reversed(value.items())))


@pytest.mark.parametrize("value", [{1, 2}, Path("x"), object(), {1: 2}, b"x"])
def test_what_has_no_stable_form_is_refused_with_its_path(value):
    with pytest.raises(TypeError, match=r"model\.x"):
        canonical_json({"model": {"x": value}})


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_number_that_is_not_finite_has_no_identity(value):
    with pytest.raises(ValueError, match="lr"):
        canonical_json({"lr": value})


def test_ids_are_pinned():
    """A changed id orphans every ledger there is: change this only with a changed meaning."""
    small = {"model": {"d_model": 64}, "optimizer": {"lr": 1e-3}, "log": {"every_steps": 10}}
    assert cell_id(small) == "c" + canonical_digest(
        '{"model":{"d_model":64},"optimizer":{"lr":0.001}}'
    )
    assert arm_id(small) == "a" + canonical_digest('{"model":{"d_model":64},"optimizer":{}}')


def canonical_digest(text):

    return hashlib.sha256(text.encode()).hexdigest()[:12]


@pytest.mark.parametrize("path", ["log.every_steps", "checkpoint.every_steps", "model.impl"])
def test_what_changes_no_result_changes_no_id(path):
    assert cell_id(changed(path, "other")) == cell_id(config())


@pytest.mark.parametrize("path", ["optimizer.lr", "seq_len", "data.vocab_size", "eval.windows"])
def test_what_changes_a_result_changes_the_id(path):
    assert cell_id(changed(path, 7)) != cell_id(config())


def test_an_arm_is_a_cell_without_its_learning_rates():
    assert arm_id(changed("optimizer.lr", 0.5)) == arm_id(config())
    assert arm_id(changed("optimizer.weight_decay", 0.5)) != arm_id(config())


@given(st.integers(min_value=0, max_value=10**6))
def test_no_parser_takes_an_id_for_a_number(number):
    name = cell_id({"x": number})
    assert name[0] == "c"
    for parse in (int, float):
        with pytest.raises(ValueError, match=name):
            parse(name)
    assert yaml.safe_load(name) == name
    assert replicate_id(name, 3) == f"{name}-s3"


def test_a_trial_survives_its_plain_form():
    assert trial_from_dict(config()) == TrialConfig()


def test_a_key_that_no_dataclass_has_is_refused():
    with pytest.raises(TypeError, match="speed"):
        trial_from_dict({**config(), "speed": 1})
