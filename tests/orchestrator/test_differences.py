"""What decides a comparison beside what is compared is said."""

import dataclasses

import pytest

from models.configs import (
    DeltaNetConfig,
    GatedDeltaNetConfig,
    GatedLinearConfig,
    KimiDeltaConfig,
    ModelConfig,
)
from orchestrator.config import TrialConfig
from orchestrator.differences import differences


def trials(*mixers, **changes):
    return [TrialConfig(model=ModelConfig(mixer=mixer, **changes)) for mixer in mixers]


def test_rules_that_start_with_different_decay_are_named():
    gated, kimi = GatedDeltaNetConfig(dt_init="ones"), KimiDeltaConfig()
    (note,) = differences(trials(gated, kimi, DeltaNetConfig()), "params")
    assert "model.mixer.dt_init: gated_deltanet ones, kimi_delta loguniform" in note


@pytest.mark.parametrize(
    "mixers",
    [
        [GatedDeltaNetConfig(), KimiDeltaConfig()],
        [GatedDeltaNetConfig(dt_init="ones"), DeltaNetConfig()],
        # A rule without decay has no start of it, whatever its option says.
        [GatedDeltaNetConfig(dt_init="ones"), GatedLinearConfig(decay="none")],
        # Every rule with every start: the starts are what is compared.
        [
            options(dt_init=start)
            for options in (GatedDeltaNetConfig, KimiDeltaConfig)
            for start in ("ones", "loguniform")
        ],
    ],
    ids=["equal", "one_decay", "no_decay", "crossed"],
)
def test_starts_that_decide_nothing_are_not_named(mixers):
    assert differences(trials(*mixers), "params") == []


def test_published_cells_are_listed_by_what_they_differ_in():
    small, large = trials(DeltaNetConfig()), trials(DeltaNetConfig(), num_layers=4, ffn_dim=200)
    (note,) = differences(small + large, "paper")
    assert "model.num_layers (3, 4), model.ffn_dim (176, 200); parameters outside" in note
    assert differences(small + large, "depth") == []


def test_what_a_sweep_compares_is_no_difference():
    config = trials(DeltaNetConfig())[0]
    other = dataclasses.replace(
        trials(GatedDeltaNetConfig())[0],
        optimizer=dataclasses.replace(config.optimizer, lr=0.5),
    )
    assert differences([config, other], "paper") == []
