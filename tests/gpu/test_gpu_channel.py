"""The channel-decay kernels on a GPU, against the float64 loop: 16 bit, cuts, packs."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import kernels
from kernels import channel_delta_plan, reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

RULES = ("kimi_delta_rule", "gated_delta_rule_2")
# One rounding to bfloat16 is 1.1e-3 in root mean square; a gradient passes through about five
# operands so rounded, that of the decay through their pairwise products besides. float16 keeps
# three bits more. float32 products are tf32x3.
LIMITS = {torch.bfloat16: 8e-3, torch.float16: 2e-3, torch.float32: 1e-5}
# What bounds the decay's gradient in float16 is products in tf32: 1.8e-3 to 2.2e-3 over eight draws
# at 16 to 32 channels, 1.7e-3 to 1.8e-3 at 64 and 128.
DECAY_LIMITS = LIMITS | {torch.float16: 2.5e-3}
SIZES = {
    "one token": (1, 1, 1, 1, 128, 128),
    "ragged": (2, 200, 2, 2, 128, 128),
    "grouped heads of 64": (1, 130, 2, 4, 64, 64),
    "no powers of two": (1, 81, 1, 2, 100, 60),
    "largest": (1, 70, 1, 1, 256, 512),
    "smallest": (1, 70, 1, 1, 16, 16),
    "narrow": (1, 130, 2, 4, 24, 40),
}
DECAYS = ("mild", "strong", "one channel", "open", "mixed")


def draw_decay(kind: str, shape: tuple[int, ...], source: torch.Generator) -> Tensor:
    uniform = torch.rand(shape, generator=source, device="cuda")
    if kind == "mild":
        return functional.logsigmoid(6 * uniform)
    if kind == "strong":
        return -30 * uniform
    if kind == "open":
        return torch.zeros_like(uniform)
    decay = -0.02 * uniform
    decay[..., :: 3 if kind == "mixed" else shape[-1]] = -30
    return decay


def draw(
    rule: str, sizes: tuple[int, ...], dtype: torch.dtype, decay: str = "mild", count: int = 0
) -> dict[str, Tensor]:
    B, T, H, HV, K, V = sizes
    source = torch.Generator("cuda").manual_seed(T + K)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=source, device="cuda")

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=source, device="cuda")

    inputs = {"q": normal(B, T, H, K), "k": normal(B, T, H, K), "v": normal(B, T, HV, V)}
    if rule == "kimi_delta_rule":
        inputs["beta"] = 2 * uniform(B, T, HV)
    else:
        inputs |= {"erase": uniform(B, T, HV, K), "write": uniform(B, T, HV, V)}
    inputs = {name: x.to(dtype) for name, x in inputs.items()}
    inputs["log_decay"] = draw_decay(decay, (B, T, HV, K), source)
    return inputs | {"initial_state": normal(count or B, HV, K, V)}


def evaluate(
    rule: str, inputs: dict[str, Tensor], dtype: torch.dtype | None, **options: Any
) -> dict[str, Tensor]:
    """Results and all gradients: of the loop in float64, or of the kernels where dtype is None."""
    leaves = {n: (x if dtype is None else x.to(dtype)).detach() for n, x in inputs.items()}
    leaves = {name: x.requires_grad_() for name, x in leaves.items()}
    named = dict(leaves)
    q, k, v = (named.pop(name) for name in "qkv")
    if dtype is None:
        op, options = getattr(kernels, rule), options | {"impl": "triton", "return_residual": True}
    else:
        op, options = getattr(reference, rule), options | {"scale": q.shape[-1] ** -0.5}
    results = op(q, k, v, **named, qk_l2norm=True, **options)
    source = torch.Generator("cuda").manual_seed(0)
    cotangents = [
        torch.randn(x.shape, generator=source, device="cuda").to(x.dtype) for x in results
    ]
    gradients = torch.autograd.grad(results, list(leaves.values()), cotangents)
    named = dict(zip(("out", "final_state", "residual"), results, strict=True))
    named |= {f"d_{name}": x for name, x in zip(leaves, gradients, strict=True)}
    return {name: x.detach() for name, x in named.items()}


def compare(rule: str, inputs: dict[str, Tensor], dtype: torch.dtype, **options: Any) -> None:
    expected = evaluate(rule, inputs, torch.float64, **options)
    actual = evaluate(rule, inputs, None, **options)
    errors = {
        name: ((actual[name].double() - x).norm() / x.norm().clamp(min=1e-30)).item()
        for name, x in expected.items()
    }
    limits = {name: (DECAY_LIMITS if name == "d_log_decay" else LIMITS)[dtype] for name in errors}
    wrong = {name: error for name, error in errors.items() if not error <= limits[name]}
    assert not wrong, f"{wrong} beyond {limits}; all: {errors}"


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("sizes", SIZES)
def test_every_gradient_equals_the_loop(rule: str, dtype: torch.dtype, sizes: str) -> None:
    compare(rule, draw(rule, SIZES[sizes], dtype), dtype)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("decay", DECAYS)
def test_any_decay_equals_the_loop(rule: str, dtype: torch.dtype, decay: str) -> None:
    compare(rule, draw(rule, (1, 130, 1, 2, 128, 128), dtype, decay), dtype)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("bounds", [None, [0, 300, 301, 900]], ids=["whole", "packed"])
def test_a_sequence_that_is_cut_equals_the_loop(
    rule: str, bounds: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel_delta_plan, "num_segments", lambda *_: 4)
    count = 0 if bounds is None else len(bounds) - 1
    inputs = draw(rule, (1, 900, 1, 1, 128, 128), torch.bfloat16, count=count)
    cu_seqlens = None if bounds is None else torch.tensor(bounds, device="cuda")
    compare(rule, inputs, torch.bfloat16, cu_seqlens=cu_seqlens)


@pytest.mark.parametrize("rule", RULES)
def test_twenty_equal_calls_give_equal_bits(rule: str) -> None:
    inputs = draw(rule, (2, 300, 2, 2, 128, 128), torch.bfloat16)
    first = evaluate(rule, inputs, None)
    for _ in range(20):
        again = evaluate(rule, inputs, None)
        assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.parametrize("rule", RULES)
def test_compiled_calls_equal_eager_ones(rule: str) -> None:
    inputs = draw(rule, (1, 130, 1, 2, 64, 64), torch.bfloat16)
    q, k, v = (inputs.pop(name) for name in "qkv")

    def call() -> Any:
        # without unit keys the memory of this rule grows beyond every float
        return getattr(kernels, rule)(q, k, v, **inputs, qk_l2norm=True, impl="triton")[0]

    assert torch.equal(torch.compile(call, fullgraph=True)(), call())
