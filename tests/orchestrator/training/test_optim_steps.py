"""Whole optimizers: AdamW against torch's, state by name, skipped and low-precision parameters."""

import pytest
import torch
from torch import nn

from orchestrator.training.optim.build import build_optimizer
from orchestrator.training.optim.configs import AdamWConfig, MuonConfig
from orchestrator.training.optim.optimizer import Optimizer

CONFIGS = pytest.mark.parametrize(
    "config",
    [
        AdamWConfig(lr=0.05),
        MuonConfig(lr=0.05, adam_lr=0.05, variant="paper"),
        MuonConfig(lr=0.05, adam_lr=0.05, variant="keller"),
        MuonConfig(lr=0.05, adam_lr=0.05, variant="normuon", split="fused"),
    ],
    ids=["adamw", "paper", "keller", "normuon-fused"],
)


def advance(model: nn.Module, optimizer: Optimizer, num_steps: int) -> None:
    for _ in range(num_steps):
        optimizer.zero_grad()
        model.loss().backward()
        optimizer.set_lr_ratio(1.0, warmup_ratio=1.0)
        optimizer.step()


def parameters_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def test_adamw_equals_torch_adamw(every_role):
    ours, theirs = every_role(), every_role()
    optimizer = build_optimizer(AdamWConfig(lr=0.02, weight_decay=0.1), ours)
    vectors = {"norm", "decay", "offset", "wide_offset"}
    oracle = torch.optim.AdamW(
        [
            {"params": [p for n, p in theirs.named_parameters() if n not in vectors]},
            {
                "params": [p for n, p in theirs.named_parameters() if n in vectors],
                "weight_decay": 0.0,
            },
        ],
        lr=0.02,
        betas=(0.9, 0.95),
        eps=1e-8,
        weight_decay=0.1,
        foreach=False,
    )
    for _ in range(20):
        advance(ours, optimizer, 1)
        oracle.zero_grad()
        theirs.loss().backward()
        oracle.step()
    for name, parameter in theirs.named_parameters():
        assert torch.allclose(ours.get_parameter(name), parameter, rtol=0, atol=1e-6), name


@CONFIGS
def test_gradients_are_left_as_they_are(every_role, config):
    model = every_role()
    optimizer = build_optimizer(config, model)
    optimizer.set_lr_ratio(1.0, warmup_ratio=1.0)
    model.loss().backward()
    before = {n: p.grad.clone() for n, p in model.named_parameters()}
    optimizer.step()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, before[name]), name


@CONFIGS
@pytest.mark.parametrize("skipped", ["matrix", "norm", "head"])
def test_a_parameter_without_a_gradient_keeps_weight_and_state(every_role, config, skipped):
    model = every_role()
    optimizer = build_optimizer(config, model)
    advance(model, optimizer, 1)
    before, state = parameters_of(model), optimizer.state_dict()
    model.loss().backward()
    model.get_parameter(skipped).grad = None
    optimizer.step()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) == (name == skipped), name
    later = optimizer.state_dict()
    own = [name for name in state if name.endswith(f"/{skipped}")]
    assert own
    assert all(torch.equal(state[name], later[name]) for name in own)


@CONFIGS
def test_every_parameter_approaches_its_target(every_role, config):
    model = every_role()
    optimizer = build_optimizer(config, model)
    start = model.loss().item()
    advance(model, optimizer, 40)
    assert model.loss().item() < 0.5 * start


@CONFIGS
def test_saved_and_loaded_goes_on_bit_for_bit(every_role, config):
    straight = every_role()
    advance(straight, build_optimizer(config, straight), 6)

    first = every_role()
    optimizer = build_optimizer(config, first)
    advance(first, optimizer, 2)
    second = every_role()
    second.load_state_dict(first.state_dict())
    resumed = build_optimizer(config, second)
    resumed.load_state_dict(optimizer.state_dict())
    advance(second, resumed, 4)
    for name, parameter in straight.named_parameters():
        assert torch.equal(parameter, second.get_parameter(name)), name


@CONFIGS
def test_a_state_dict_does_not_follow_later_steps(every_role, config):
    model = every_role()
    optimizer = build_optimizer(config, model)
    advance(model, optimizer, 1)
    taken = optimizer.state_dict()
    kept = {name: tensor.clone() for name, tensor in taken.items()}
    advance(model, optimizer, 1)
    assert all(torch.equal(taken[name], kept[name]) for name in taken)


@CONFIGS
def test_missing_extra_and_misshapen_state_is_refused(every_role, config):
    model = every_role()
    optimizer = build_optimizer(config, model)
    state = optimizer.state_dict()
    name = next(iter(state))
    with pytest.raises(ValueError, match="optimizer state lacks"):
        optimizer.load_state_dict({k: v for k, v in state.items() if k != name})
    with pytest.raises(ValueError, match="optimizer state has unknown momentum/ghost"):
        optimizer.load_state_dict(state | {"momentum/ghost": torch.zeros(2)})
    with pytest.raises(ValueError, match=r"expected torch.float32"):
        optimizer.load_state_dict(state | {name: torch.zeros(3, 1, 1, 1)})


@CONFIGS
def test_two_runs_are_bit_identical(every_role, config):
    models = every_role(), every_role()
    for model in models:
        advance(model, build_optimizer(config, model), 5)
    for name, parameter in models[0].named_parameters():
        assert torch.equal(parameter, models[1].get_parameter(name)), name


@CONFIGS
def test_low_precision_parameters_follow_an_fp32_master(every_role, config):
    """Two hundred steps, each far below bf16's spacing at 1, still add up."""
    model = every_role(torch.bfloat16)
    before = parameters_of(model)
    optimizer = build_optimizer(config, model)
    for _ in range(200):
        optimizer.zero_grad()
        model.loss().backward()
        optimizer.set_lr_ratio(2e-3, warmup_ratio=2e-3)
        optimizer.step()
    assert all(tensor.dtype == torch.float32 for tensor in optimizer.state_dict().values())
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.bfloat16
        assert not torch.equal(parameter, before[name]), name
        master = optimizer.state_dict()[f"master/{name}"]
        assert torch.equal(master.bfloat16(), parameter), name


@pytest.mark.parametrize("nesterov", [True, False])
def test_the_momentum_of_low_precision_matrices_is_the_gradients_average(every_role, nesterov):
    """With a constant gradient g, m = (1 − 0.95ᵗ)g; an aliased buffer would have norm 1."""
    model = every_role(torch.bfloat16)
    config = MuonConfig(lr=0.0, adam_lr=0.0, nesterov=nesterov, arithmetic="bf16")
    optimizer = build_optimizer(config, model)
    advance(model, optimizer, 3)
    momentum = optimizer.state_dict()["momentum/matrix"]
    gradient = model.get_parameter("matrix").grad.float()
    assert torch.allclose(momentum, (1 - 0.95**3) * gradient, rtol=1e-5)
