"""Whole models on a GPU: in float32 the values of the CPU, in bfloat16 near them, by Triton."""

import dataclasses

import pytest
import torch

from models.configs import (
    MIXER_CONFIGS,
    GatedDeltaNet2Config,
    GatedLinearConfig,
    HeadLayout,
    ModelConfig,
    RoutingConfig,
    SoftmaxConfig,
)
from models.generate import decode, prefill
from models.lm import LanguageModel, build_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

VOCAB = 257
SHAPE = ModelConfig(
    num_layers=3,
    d_model=64,
    ffn_dim=96,
    heads=HeadLayout(
        softmax_heads=4,
        softmax_kv_heads=2,
        softmax_head_dim=16,
        key_heads=2,
        value_heads=4,
        key_dim=32,
        value_dim=32,
    ),
)

# Products in tf32 by the kernels' own three-pass scheme, sums in other orders.
FLOAT32_TOLERANCE = 1e-4
# 2^-9 per rounding, about ten of them in a row through three layers.
BFLOAT16_TOLERANCE = 2e-2


def _configs() -> dict[str, ModelConfig]:
    configs = {}
    for name, options in MIXER_CONFIGS.items():
        configs[name] = dataclasses.replace(SHAPE, mixer=options())
        if name != "softmax":
            configs[f"{name}-hybrid"] = dataclasses.replace(
                configs[name], stack="hybrid", softmax_layers=[1]
            )
    configs["gated_deltanet2-lowrank"] = dataclasses.replace(
        SHAPE, mixer=GatedDeltaNet2Config(variant="lowrank")
    )
    for decay in ("head", "channel"):
        configs[f"gated_linear-{decay}"] = dataclasses.replace(
            SHAPE, mixer=GatedLinearConfig(decay=decay)
        )
    configs["softmax-window"] = dataclasses.replace(
        SHAPE, softmax=SoftmaxConfig(window=50, output_gate=True, qk_norm=True)
    )
    for kind, residual in (("cler", "paper"), ("cler_h", "written"), ("clvr", "written")):
        configs[f"{kind}-{residual}"] = dataclasses.replace(
            configs["gated_deltanet-hybrid"], routing=RoutingConfig(kind=kind, residual=residual)
        )
    configs["attention_residuals_clvr"] = dataclasses.replace(
        configs["gated_deltanet-hybrid"], routing=RoutingConfig(kind="attention_residuals_clvr")
    )
    return configs


CONFIGS = _configs()
every_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())


def build(config: ModelConfig, device: str) -> LanguageModel:
    model = build_model(config, VOCAB, torch.Generator().manual_seed(0), device)
    generator = torch.Generator().manual_seed(1)
    info = model.parameter_info()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if info[name].role.startswith("routing"):
                noise = 0.2 * torch.randn(parameter.shape, generator=generator)
                parameter.add_(noise.to(device))
    return model


def tokens() -> torch.Tensor:
    return torch.randint(VOCAB, (2, 151), generator=torch.Generator().manual_seed(2))


def relative_rms(got: torch.Tensor, expected: torch.Tensor) -> float:
    difference = (got.cpu().double() - expected.double()).square().mean().sqrt()
    return float(difference / expected.double().square().mean().sqrt())


def trained(model: LanguageModel, device: str, dtype: torch.dtype) -> tuple[torch.Tensor, float]:
    """Logits, and the loss whose gradients the parameters then hold."""
    batch = tokens().to(device)
    with torch.autocast(device, torch.bfloat16, enabled=dtype == torch.bfloat16):
        logits = model(batch)
        loss = model.loss(batch[:, :-1], batch[:, 1:])
    loss.backward()
    return logits.detach().cpu().float(), loss.item()


@every_config
def test_initial_values_are_those_of_the_cpu(config: ModelConfig) -> None:
    for a, b in zip(
        build(config, "cuda").parameters(), build(config, "cpu").parameters(), strict=True
    ):
        assert torch.equal(a.cpu(), b)


@every_config
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_logits_loss_and_gradients_are_near_the_cpu(
    config: ModelConfig, dtype: torch.dtype
) -> None:
    limit = FLOAT32_TOLERANCE if dtype == torch.float32 else BFLOAT16_TOLERANCE
    reference, model = build(config, "cpu"), build(config, "cuda")
    expected, expected_loss = trained(reference, "cpu", torch.float32)
    logits, loss = trained(model, "cuda", dtype)
    assert relative_rms(logits, expected) < limit
    assert loss == pytest.approx(expected_loss, rel=limit / 10)
    got, wanted = (
        torch.cat([p.grad.flatten().cpu() for p in m.parameters() if p.grad is not None])
        for m in (model, reference)
    )
    assert relative_rms(got, wanted) < 5 * limit


@every_config
def test_decoding_in_bfloat16_continues_the_parallel_form(config: ModelConfig) -> None:
    model, batch = build(config, "cuda"), tokens().cuda()
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        expected = model(batch)
        _, state = prefill(model, batch[:, :100], dtype=torch.bfloat16)
        for position in range(100, 151):
            logits, state = model.step(batch[:, position], state)
            wanted = expected[:, position].cpu().float()
            assert relative_rms(logits, wanted) < BFLOAT16_TOLERANCE
        written, _, _ = decode(model, logits, state, 4)
    assert written.shape == (2, 4)


@pytest.mark.parametrize("name", [n for n in MIXER_CONFIGS if n != "softmax"])
def test_triton_serves_every_rule(name: str) -> None:
    assert build(CONFIGS[name], "cuda").kernel_impl == "triton"
    assert build(CONFIGS[f"{name}-hybrid"], "cuda").kernel_impl == "triton"
