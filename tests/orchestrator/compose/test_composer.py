"""Each cell's values are its own, whatever was composed before it."""

import itertools
import textwrap

import pytest

from orchestrator.compose import load_sweep
from orchestrator.compose.composer import Composer
from orchestrator.compose.conf_folder import CONF_FOLDER

CELLS = {
    "defaults": {},
    "values": {"clip_norm": 2.0, "batch.tokens": 512, "data.sources": ["a.txt"], "data_seed": 3},
    "interpolated": {"budget.tokens": "${batch.tokens}"},
    "muon": {"optimizer": "muon", "optimizer.adam_lr": 0.5, "seq_len": 128},
    "interpolated muon": {"optimizer": "muon", "optimizer.adam_lr": "${optimizer.lr}"},
    "mixer": {"model.mixer": "gated_deltanet", "model.mixer.dt_init": "ones"},
    "no softmax": {"model.softmax": None},
    "typed softmax": {"model.softmax.qk_norm": "yes", "model.softmax.window": "64"},
    "interpolated mixer": {"model.mixer": "gated_deltanet", "clip_norm": "${optimizer.lr}"},
}


@pytest.fixture(scope="module")
def alone():
    """The values of each cell where nothing was composed before it."""
    return {name: Composer(CONF_FOLDER).values(cell) for name, cell in CELLS.items()}


def test_a_cell_is_the_same_after_any_other(alone):
    composer = Composer(CONF_FOLDER)
    for first, second in itertools.permutations(CELLS, 2):
        for name in (first, second, first):
            assert composer.values(CELLS[name]) == alone[name], f"{first}, {second}, {first}"


def test_what_a_caller_does_to_a_cells_values_stays_with_the_caller(alone):
    composer = Composer(CONF_FOLDER)
    for name, cell in CELLS.items():
        values = composer.values(cell)
        values["data"]["sources"].append("more.txt")
        values["optimizer"]["lr"] = -1.0
        assert composer.values(cell) == alone[name]


SWEEP = """
name: small
base: {size: nano, data: sotu, budget.tokens: 5120, batch.tokens: 512}
axes:
  model.mixer: [softmax, deltanet]
  clip_norm:
    - {when: {model.mixer: softmax}, values: [0.25]}
  optimizer.weight_decay:
    - {when: {model.mixer: deltanet}, values: ["${optimizer.lr}"]}
"""


def test_a_conditional_value_stays_in_the_cells_of_its_condition(tmp_path):
    (tmp_path / "sweep.yaml").write_text(textwrap.dedent(SWEEP))
    softmax, deltanet = load_sweep("sweep.yaml", [], tmp_path).cells
    assert softmax.config.clip_norm == 0.25
    assert deltanet.config.clip_norm == 1.0
    assert deltanet.config.optimizer.weight_decay == deltanet.config.optimizer.lr


def test_an_interpolation_in_a_group_follows_the_cells_values(tmp_path):
    (tmp_path / "size").mkdir()
    text = (CONF_FOLDER / "size" / "nano.yaml").read_text()
    derived = text.replace("ffn_dim: 176", "ffn_dim: ${seq_len}")
    assert derived != text
    (tmp_path / "size" / "mine.yaml").write_text(derived)
    composer = Composer(tmp_path)
    for length in (256, 512, 256):
        values = composer.values({"size": "mine", "seq_len": length})
        assert values["model"]["ffn_dim"] == length
