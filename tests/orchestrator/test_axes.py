"""Grids, conditions, zips and exclusions against cells counted by hand."""

import pytest

from orchestrator.axes import AxisError, expand

DEFAULTS = {"model.mixer": "softmax", "optimizer": "adamw", "seq_len": 256}


def lookup(path):
    if path not in DEFAULTS:
        raise KeyError(f"unknown key {path}")
    return DEFAULTS[path]


def cells(axes, exclude=()):
    return expand(axes, list(exclude), lookup).cells


def test_no_axes_are_one_cell():
    assert cells({}) == [{}]


def test_a_grid_is_the_product_with_the_last_axis_fastest():
    assert cells({"a": [1, 2], "b": ["x", "y"]}) == [
        {"a": 1, "b": "x"},
        {"a": 1, "b": "y"},
        {"a": 2, "b": "x"},
        {"a": 2, "b": "y"},
    ]


def test_a_chunk_size_only_where_the_mixer_is_linear():
    """Two softmax optimizers without a chunk, two linear ones with two chunks, one of them out."""
    expansion = expand(
        {
            "model.mixer": ["softmax", "linear"],
            "chunk": [{"when": {"model.mixer": "linear"}, "values": [16, 64]}],
            "optimizer": ["adamw", "muon"],
        },
        [{"chunk": 64, "optimizer": "muon"}],
        lambda path: None if path == "chunk" else lookup(path),
    )
    assert expansion.cells == [
        {"model.mixer": "softmax", "optimizer": "adamw"},
        {"model.mixer": "softmax", "optimizer": "muon"},
        {"model.mixer": "linear", "chunk": 16, "optimizer": "adamw"},
        {"model.mixer": "linear", "chunk": 16, "optimizer": "muon"},
        {"model.mixer": "linear", "chunk": 64, "optimizer": "adamw"},
    ]
    assert expansion.excluded == [1]
    assert expansion.unmatched == []


def test_a_condition_may_name_an_axis_that_is_written_later():
    axes = {
        "lr": [
            {"when": {"optimizer": "adamw"}, "values": [1]},
            {"when": {"optimizer": "muon"}, "values": [2]},
        ],
        "optimizer": ["adamw", "muon"],
    }
    assert cells(axes) == [{"lr": 1, "optimizer": "adamw"}, {"lr": 2, "optimizer": "muon"}]


def test_a_condition_on_what_no_axis_sets_reads_the_base():
    axes = {"lr": [{"when": {"optimizer": "adamw"}, "values": [1, 2]}]}
    assert cells(axes) == [{"lr": 1}, {"lr": 2}]


def test_a_condition_may_list_values():
    axes = {
        "model.mixer": ["softmax", "linear", "deltanet"],
        "chunk": [{"when": {"model.mixer": ["linear", "deltanet"]}, "values": [16]}],
    }
    assert [cell.get("chunk") for cell in cells(axes)] == [None, 16, 16]


def test_entries_that_both_hold_give_the_union_of_their_values():
    axes = {
        "lr": [
            {"when": {"optimizer": "adamw"}, "values": [1, 2]},
            {"when": {"seq_len": 256}, "values": [2, 3]},
        ]
    }
    assert [cell["lr"] for cell in cells(axes)] == [1, 2, 3]


def test_zipped_paths_move_together():
    axes = {"seq_len, batch.tokens": [[256, 512], [512, 1024]]}
    assert cells(axes) == [
        {"seq_len": 256, "batch.tokens": 512},
        {"seq_len": 512, "batch.tokens": 1024},
    ]


def test_rules_that_match_nothing_are_named():
    expansion = expand(
        {"optimizer": ["adamw"], "lr": [{"when": {"optimizer": "muon"}, "values": [1]}]},
        [{"model.mixer": "linear"}],
        lookup,
    )
    assert expansion.cells == [{"optimizer": "adamw"}]
    assert len(expansion.unmatched) == 2
    assert "optimizer: muon" in expansion.unmatched[0]
    assert "model.mixer: linear" in expansion.unmatched[1]


def test_an_exclusion_counts_the_cells_that_it_removed_first():
    expansion = expand({"a": [1, 2, 3]}, [{"a": [1, 2]}, {"a": [2, 3]}], lookup)
    assert expansion.cells == []
    assert expansion.excluded == [2, 1]


@pytest.mark.parametrize(
    ("axes", "sentence"),
    [
        ({"a": 3}, "axes.a must be a list"),
        ({"a": []}, "axes.a has no values"),
        ({"a": [1, 1]}, "axes.a holds 1 twice"),
        ({"a": [1, {"when": {}, "values": [2]}]}, "axes.a mixes"),
        ({"a": [{"if": {}, "values": [2]}]}, "only `when` and `values`"),
        ({"a": [{"when": {"optimizer": "muon"}, "values": []}]}, "axes.a needs entries"),
        ({"a, b": [[1, 2], [3]]}, "axes.a, b zips 2 paths"),
        ({"a": [{"when": {"optimzer": "muon"}, "values": [2]}]}, "unknown key optimzer"),
    ],
    ids=["scalar", "empty", "twice", "mixed", "misspelt", "no values", "short zip", "unknown"],
)
def test_a_malformed_axis_is_refused_by_name(axes, sentence):
    with pytest.raises(AxisError, match=sentence):
        cells(axes)


def test_conditions_in_a_circle_are_refused():
    axes = {
        "a": [{"when": {"b": 1}, "values": [1]}],
        "b": [{"when": {"a": 1}, "values": [1]}],
    }
    with pytest.raises(AxisError, match="circle: a; b"):
        cells(axes)
