"""Which parameter is moved by which rule, at which rate; the table that says so."""

from typing import Any

import pytest
import torch
from torch import nn

from models.configs import MIXER_CONFIGS
from models.lm import LanguageModel
from models.mixer import ParameterInfo
from orchestrator.training.optim.build import OPTIMIZERS, build_optimizer, resolved_choices
from orchestrator.training.optim.configs import (
    OPTIMIZER_CONFIGS,
    AdamWConfig,
    MuonConfig,
    OptimizerConfig,
)
from orchestrator.training.optim.roles import GroupSpec, assign, format_table


class Described(nn.Module):
    """Parameters of given shapes with given roles."""

    def __init__(self, parameters: dict[str, tuple[str, tuple[int, ...]]]) -> None:
        super().__init__()
        self.roles = {name: role for name, (role, _) in parameters.items()}
        for name, (_, shape) in parameters.items():
            self.register_parameter(name, nn.Parameter(torch.ones(shape)))

    def parameter_info(self) -> dict[str, ParameterInfo]:
        return {name: ParameterInfo(role) for name, role in self.roles.items()}


def groups_of(config: OptimizerConfig, model: Any) -> dict[str, str]:
    return {row.name: row.group for row in build_optimizer(config, model).table}


def test_both_registries_name_the_same_optimizers():
    assert {n: entry[0] for n, entry in OPTIMIZERS.items()} == OPTIMIZER_CONFIGS
    for name, config_class in OPTIMIZER_CONFIGS.items():
        assert config_class().name == name


def test_muon_takes_hidden_matrices_and_adam_the_rest(every_role):
    groups = groups_of(MuonConfig(), every_role())
    assert {n for n, group in groups.items() if group == "matrix"} == {"matrix", "fused", "routing"}
    assert set(groups) == {n for n, _ in every_role().named_parameters()}


@pytest.mark.parametrize("config", [AdamWConfig(), MuonConfig()], ids=lambda c: c.name)
@pytest.mark.parametrize("stack", ["pure", "hybrid"])
@pytest.mark.parametrize("mixer", MIXER_CONFIGS)
def test_every_parameter_of_every_model_is_in_one_group(tiny_trial, mixer, stack, config):
    if mixer == "softmax" and stack == "hybrid":
        pytest.skip("a hybrid is softmax layers among others")
    model = LanguageModel(tiny_trial(mixer=mixer, stack=stack).model, 50)
    table = build_optimizer(config, model).table
    assert [row.name for row in table] == [name for name, _ in model.named_parameters()]
    groups = {row.name: row.group for row in table}
    assert groups["embedding.weight"] == groups["head.weight"] == "adam"
    if config.name == "muon":
        # Every matrix between embedding and head that mixes channels, and nothing else.
        assert {n for n, group in groups.items() if group == "matrix"} == {
            row.name
            for row in table
            if len(row.shape) == 2 and row.role not in ("embedding", "head", "convolution")
        }
    assert all(row.weight_decay == 0 for row in table if len(row.shape) == 1)


def test_the_table_of_a_small_model(tiny_trial):
    model = LanguageModel(tiny_trial(mixer="deltanet", stack="hybrid").model, 50)
    text = format_table(build_optimizer(MuonConfig(lr=1e-3, adam_lr=1e-2), model).table)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    attention = "32×16 attention_matrix matrix 0.001 0.1 decayed q:16 k:8 v:8"
    assert [line for line in lines if "blocks.0.mixer." in line or "blocks.1.mixer." in line] == [
        "blocks.0.mixer.in_proj.weight 25×16 matrix matrix 0.001 0.1 decayed q:8 k:8 v:8 beta:1",
        "blocks.0.mixer.conv.weight 24×4 convolution adam 0.01 0 decayed whole",
        "blocks.0.mixer.out_norm.weight 8 norm adam_no_decay 0.01 0 decayed whole",
        "blocks.0.mixer.out_proj.weight 16×8 matrix matrix 0.001 0.1 decayed whole",
        f"blocks.1.mixer.in_proj.weight {attention}",
        "blocks.1.mixer.out_proj.weight 16×16 matrix matrix 0.001 0.1 decayed whole",
    ]


def test_a_role_can_be_moved_to_the_other_group(every_role):
    moved = MuonConfig(role_groups={"gate_projection": "matrix", "routing_matrix": "adam"})
    groups = groups_of(moved, every_role())
    assert groups["gate"] == "matrix"
    assert groups["routing"] != "matrix"


def test_adamw_decays_all_but_vectors_and_biases(every_role):
    table = build_optimizer(AdamWConfig(weight_decay=0.1), every_role()).table
    undecayed = {row.name for row in table if row.weight_decay == 0}
    assert undecayed == {"norm", "decay", "offset", "wide_offset"}
    assert all(row.weight_decay in (0, 0.1) for row in table)


def test_the_table_shows_name_shape_role_group_rates_and_blocks(every_role):
    config = MuonConfig(lr=3e-4, adam_lr=1.5e-3, adam_schedule="constant")
    lines = format_table(build_optimizer(config, every_role()).table).splitlines()
    words = [" ".join(line.split()) for line in lines]
    assert words[0] == "parameter shape role group lr decay schedule blocks"
    assert "fused 24×8 matrix matrix 0.0003 0.1 decayed q:8 k:4 v:12" in words
    assert "gamma scalar routing_vector adam 0.0015 0 constant whole" in words
    assert len(words) == 13


def test_fused_matrices_stay_whole_on_request(every_role):
    rows = build_optimizer(MuonConfig(split="fused"), every_role()).table
    assert all(row.blocks == () for row in rows)


def test_the_projections_of_softmax_layers_alone_are_split_on_request(tiny_trial):
    model = LanguageModel(tiny_trial(mixer="deltanet", stack="hybrid").model, 50)
    rows = build_optimizer(MuonConfig(split="attention"), model).table
    assert {row.name for row in rows if row.blocks} == {"blocks.1.mixer.in_proj.weight"}


def test_table_rows_are_plain_values(every_role):
    row = build_optimizer(MuonConfig(), every_role()).table[5].as_row()
    assert row["name"] == "fused"
    assert row["shape"] == [24, 8]
    assert row["blocks"] == [["q", 8], ["k", 4], ["v", 12]]


def spec(name: str, roles: set[str]) -> GroupSpec:
    return GroupSpec(
        name=name, peak_lr=1.0, weight_decay=0.0, claims=lambda role, ndim: role in roles
    )


def test_a_parameter_in_no_group_or_in_two_is_an_error():
    parameters = {"w": nn.Parameter(torch.ones(2, 2))}
    infos = {"w": ParameterInfo("matrix")}
    with pytest.raises(ValueError, match=r"parameter w \(matrix\) is in no group"):
        assign(parameters, infos, [spec("a", {"norm"})])
    with pytest.raises(ValueError, match=r"parameter w \(matrix\) is in a and b"):
        assign(parameters, infos, [spec("a", {"matrix"}), spec("b", {"matrix", "norm"})])


def test_a_parameter_without_a_role_is_an_error():
    model = Described({"w": ("matrix", (2, 2))})
    model.register_parameter("stray", nn.Parameter(torch.ones(2)))
    with pytest.raises(ValueError, match="parameters without a role in parameter_info: stray"):
        build_optimizer(AdamWConfig(), model)


def test_a_role_without_a_parameter_is_an_error():
    model = Described({"w": ("matrix", (2, 2))})
    model.roles["ghost"] = "norm"
    with pytest.raises(ValueError, match="names what the model doesn't have: ghost"):
        build_optimizer(AdamWConfig(), model)


def test_blocks_that_miss_rows_are_an_error():
    parameters = {"w": nn.Parameter(torch.ones(6, 2))}
    infos = {"w": ParameterInfo("matrix", (("q", 2), ("k", 2)))}
    group = GroupSpec(
        name="m",
        peak_lr=1.0,
        weight_decay=0.0,
        claims=lambda r, n: True,
        split_roles=frozenset({"matrix"}),
    )
    with pytest.raises(ValueError, match="must add up to its 6 rows"):
        assign(parameters, infos, [group])


def test_frozen_parameters_are_in_no_group():
    model = Described({"w": ("matrix", (2, 2)), "frozen": ("norm", (2,))})
    model.get_parameter("frozen").requires_grad_(requires_grad=False)
    assert groups_of(AdamWConfig(), model) == {"w": "adam"}


def test_an_unknown_role_in_the_options_is_refused(every_role):
    with pytest.raises(ValueError, match="'gates' is not a role; roles are embedding, head"):
        build_optimizer(MuonConfig(role_groups={"gates": "adam"}), every_role())


def test_options_of_another_class_are_refused(every_role):
    with pytest.raises(TypeError, match="'muon' takes MuonConfig, got OptimizerConfig"):
        build_optimizer(OptimizerConfig(name="muon"), every_role())
    with pytest.raises(ValueError, match="optimizer='sgd' must be one of adamw, muon"):
        build_optimizer(OptimizerConfig(name="sgd"), every_role())


def test_the_ratio_reaches_each_group_as_its_schedule_says(every_role):
    config = MuonConfig(lr=4e-4, adam_lr=2e-3, adam_schedule="constant", adam_weight_decay=0.1)
    optimizer = build_optimizer(config, every_role())
    assert {g.name: g.lr for g in optimizer.groups} == dict.fromkeys(
        ("matrix", "adam", "adam_no_decay"), 0.0
    )
    optimizer.set_lr_ratio(0.25, warmup_ratio=1.0)
    assert {g.name: g.lr for g in optimizer.groups} == {
        "matrix": 1e-4,
        "adam": 2e-3,
        "adam_no_decay": 2e-3,
    }


def test_the_record_holds_the_choices_that_were_made():
    choices = resolved_choices(MuonConfig(variant="normuon", ns_steps=6), "cpu")
    assert choices["second_moment"] == "row"
    assert choices["ns_steps"] == 6
    assert choices["arithmetic"] == "fp32"
    assert resolved_choices(MuonConfig(), "cuda")["arithmetic"] == "bf16"
    assert resolved_choices(AdamWConfig(), "cpu") == {}
