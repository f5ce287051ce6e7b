"""The scalar-decay kernels on a GPU, against the float64 loop: bfloat16, races, large offsets."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
if torch.cuda.is_available():
    from kernels.linear_attention_triton import linear_attention_triton
    from kernels.scalar_delta_triton import scalar_delta_triton

# bfloat16 keeps 8 bits, so one rounding is 1.1e-3 in root mean square, and an output or gradient
# has passed about nine operands rounded so, independently: 3.3e-3. A quotient's gradient is a
# difference of two such sums. float16 keeps 11 bits. float32 products are tf32x3, about 1e-6.
LIMITS = {torch.bfloat16: 6e-3, torch.float16: 1.5e-3, torch.float32: 1e-5}
# A write strength above 1 reflects, and errors of earlier tokens come back undamped.
REFLECTING_LIMIT = 1.2e-2
# Under strong decay few pairs carry a decay's gradient, so roundings don't average: four operands
# of at most 2^-9 each.
DECAY_LIMITS = {torch.bfloat16: 8e-3, torch.float16: 1.5e-3, torch.float32: 1e-4}


@pytest.fixture(autouse=True)
def _poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh tensors are full of NaN, so that a row nobody wrote is seen."""
    empty, empty_like, new_empty = torch.empty, torch.empty_like, Tensor.new_empty

    def poison(x: Tensor) -> Tensor:
        return x.fill_(float("nan")) if x.is_floating_point() else x

    monkeypatch.setattr(torch, "empty", lambda *a, **k: poison(empty(*a, **k)))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: poison(empty_like(*a, **k)))
    monkeypatch.setattr(Tensor, "new_empty", lambda *a, **k: poison(new_empty(*a, **k)))


def _inputs(
    rule: str,
    sizes: tuple[int, ...],
    dtype: torch.dtype,
    strength: float = 1.0,
    count: int = 0,
    max_beta: float = 1.0,
) -> dict[str, Tensor]:
    B, T, H, HV, K, V = sizes
    generator = torch.Generator("cuda").manual_seed(T + K)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda")

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, device="cuda")

    values = {"q": normal(B, T, H, K), "k": normal(B, T, H, K), "v": normal(B, T, HV, V)}
    if not rule.startswith("linear"):
        values["k"] = torch.nn.functional.normalize(values["k"], dim=-1)
    values = {name: x.to(dtype) for name, x in values.items()}
    if rule in ("gated", "decayed"):
        values["log_decay"] = -strength * uniform(B, T, HV)
    if rule in ("gated", "delta"):
        values["beta"] = max_beta * uniform(B, T, HV)
    values["initial_state"] = normal(count or B, HV, K, V)
    if rule == "linear normalised":
        values["initial_key_sum"] = uniform(count or B, HV, K)
    return {name: x.requires_grad_() for name, x in values.items()}


def _triton(rule: str, values: dict[str, Tensor], **options: Any) -> tuple[Tensor, ...]:
    values = dict(values)
    q, k, v = (values.pop(name) for name in "qkv")
    scale = q.shape[-1] ** -0.5
    if rule.startswith("linear"):
        normalize = rule == "linear normalised"
        outs = linear_attention_triton(
            q, k, v, elu1=normalize, normalize=normalize, scale=scale, **values, **options
        )
        return outs if normalize else outs[:2]
    gates = {"log_decay": None, "beta": None} | values
    out, final, residual = scalar_delta_triton(q, k, v, scale=scale, **gates, **options)
    return (out, final) if rule == "decayed" else (out, final, residual)


def _exact(rule: str, values: dict[str, Tensor], **options: Any) -> tuple[Tensor, ...]:
    values = dict(values)
    q, k, v = (values.pop(name) for name in "qkv")
    scale = q.shape[-1] ** -0.5
    if rule in ("gated", "delta"):
        op = reference.gated_delta_rule if rule == "gated" else reference.delta_rule
        return op(q, k, v, scale=scale, **values, **options)
    key_sum = values.pop("initial_key_sum", None)
    if key_sum is not None:
        values["initial_state"] = (values["initial_state"], key_sum)
    out, state = reference.linear_attention(
        q,
        k,
        v,
        log_decay=values.pop("log_decay", None),
        feature_map="identity" if key_sum is None else "elu1",
        normalize=key_sum is not None,
        scale=scale,
        **values,
        **options,
    )
    return (out, *state) if isinstance(state, tuple) else (out, state)


def _run(
    call: Callable[..., tuple[Tensor, ...]], rule: str, values: dict[str, Tensor], **options: Any
) -> dict[str, Tensor]:
    """Outputs and gradients by name, under random cotangents of every output."""
    outs = call(rule, values, **options)
    generator = torch.Generator("cuda").manual_seed(7)
    loss = torch.zeros((), device="cuda", dtype=torch.float64)
    for out in outs:
        cotangent = torch.randn(out.shape, generator=generator, device="cuda")
        loss = loss + (out * cotangent.to(out.dtype)).sum().double()
    gradients = torch.autograd.grad(loss, list(values.values()))
    named = {f"output {i}": out.detach() for i, out in enumerate(outs)}
    return named | {f"d_{n}": d for n, d in zip(values, gradients, strict=True)}


def _assert_close(
    actual: dict[str, Tensor],
    wanted: dict[str, Tensor],
    dtype: torch.dtype,
    limit: float | None = None,
) -> None:
    errors = {
        name: float((actual[name].double() - x).norm() / x.norm()) for name, x in wanted.items()
    }
    shown = ", ".join(f"{name} {error:.1e}" for name, error in errors.items())
    for name, error in errors.items():
        usual = DECAY_LIMITS[dtype] if name == "d_log_decay" else LIMITS[dtype]
        assert error <= (limit or usual), f"{name} among {shown}"


def _double(values: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.detach().double().requires_grad_() for name, x in values.items()}


SHAPES = {
    "T1": (2, 1, 2, 2, 64, 64),
    "T63": (1, 63, 1, 2, 128, 128),
    "T65": (2, 65, 2, 2, 64, 128),
    "T200": (2, 200, 2, 2, 128, 128),
    "T200 D64": (1, 200, 2, 4, 64, 64),
    "T130 D32": (1, 130, 2, 2, 32, 32),
    "T130 D16": (1, 130, 2, 2, 16, 16),
    "T130 K16 V64": (1, 130, 2, 4, 16, 64),
    "T130 K24 V40": (1, 130, 2, 4, 24, 40),
    "T130 K100 V60": (1, 130, 2, 2, 100, 60),
    "T130 K48 V80": (1, 130, 2, 2, 48, 80),
    "T130 K256 V512": (1, 130, 1, 1, 256, 512),
}
RULES = ("gated", "delta", "decayed", "linear", "linear normalised")


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("shape", SHAPES)
def test_bfloat16_equals_the_loop(rule: str, shape: str) -> None:
    values = _inputs(rule, SHAPES[shape], torch.bfloat16)
    wanted = _run(_exact, rule, _double(values))
    _assert_close(_run(_triton, rule, values), wanted, torch.bfloat16)


@pytest.mark.parametrize("rule", ["gated", "delta"])
def test_write_strengths_up_to_2(rule: str) -> None:
    for sizes in ((1, 130, 2, 2, 16, 16), (2, 200, 2, 2, 128, 128)):
        values = _inputs(rule, sizes, torch.bfloat16, max_beta=2.0)
        wanted = _run(_exact, rule, _double(values))
        _assert_close(_run(_triton, rule, values), wanted, torch.bfloat16, REFLECTING_LIMIT)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=["fp16", "fp32"])
def test_other_dtypes_equal_the_loop(rule: str, dtype: torch.dtype) -> None:
    for sizes in ((1, 130, 1, 2, 64, 64), (1, 70, 1, 1, 128, 128)):
        values = _inputs(rule, sizes, dtype, max_beta=2.0 if dtype == torch.float32 else 1.0)
        wanted = _run(_exact, rule, _double(values))
        _assert_close(_run(_triton, rule, values), wanted, dtype)


@pytest.mark.parametrize("rule", RULES)
def test_a_split_sequence_equals_the_loop(rule: str) -> None:
    values = _inputs(rule, (1, 1100, 2, 2, 128, 128), torch.bfloat16, strength=0.05)
    wanted = _run(_exact, rule, _double(values))
    _assert_close(_run(_triton, rule, values, segments=8), wanted, torch.bfloat16)


@pytest.mark.parametrize("rule", RULES)
def test_packed_sequences_equal_the_loop(rule: str) -> None:
    bounds = torch.tensor([0, 37, 128, 129, 300], device="cuda")
    values = _inputs(rule, (1, 300, 2, 4, 64, 64), torch.bfloat16, count=4)
    wanted = _run(_exact, rule, _double(values), cu_seqlens=bounds)
    _assert_close(_run(_triton, rule, values, cu_seqlens=bounds), wanted, torch.bfloat16)


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("strength", [0.0, 0.1, 20.0, 30.0])
def test_gradients_at_any_decay(strength: float, width: int) -> None:
    values = _inputs("gated", (1, 192, 2, 2, width, width), torch.bfloat16, strength)
    wanted = _run(_exact, "gated", _double(values))
    _assert_close(_run(_triton, "gated", values), wanted, torch.bfloat16)


@pytest.mark.parametrize("rule", ["gated", "linear normalised"])
def test_twenty_runs_are_bit_identical(rule: str) -> None:
    values = _inputs(rule, (2, 700, 4, 4, 128, 128), torch.bfloat16)
    first = _run(_triton, rule, values)
    for _ in range(20):
        again = _run(_triton, rule, values)
        assert all(torch.equal(first[name], again[name]) for name in first)


def test_normalised_inputs_equal_the_loop() -> None:
    for sizes in ((1, 130, 2, 4, 64, 64), (2, 200, 2, 2, 128, 128)):
        for rule in ("gated", "delta"):
            values = _inputs(rule, sizes, torch.bfloat16)
            wanted = _run(_exact, rule, _double(values), qk_l2norm=True)
            actual = _run(_triton, rule, values, qk_l2norm=True)
            _assert_close(actual, wanted, torch.bfloat16)


def test_offsets_beyond_2_to_the_31_reach_the_right_rows() -> None:
    # The last 64 tokens lie behind 2^31 elements of q, k and v, in a sequence of their own.
    T, H, D = 262_144 + 64, 64, 128
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)

    q, k, v = draw(1, T, H, D), draw(1, T, H, D), draw(1, T, H, D)
    log_decay, beta = -torch.ones(1, T, H, device="cuda"), torch.ones(1, T, H, device="cuda")
    bounds = torch.tensor([0, T - 64, T], device="cuda")
    tail = slice(T - 64, T)

    def run(rows: slice, cu_seqlens: Tensor | None) -> tuple[Tensor, ...]:
        parts = [x[:, rows].detach().requires_grad_() for x in (q, k, v)]
        gates = {"log_decay": log_decay[:, rows], "beta": beta[:, rows]}
        out, *_ = scalar_delta_triton(
            *parts, **gates, scale=1.0, qk_l2norm=True, cu_seqlens=cu_seqlens, segments=1
        )
        gradients = torch.autograd.grad(out[:, -64:].float().sum(), parts)
        return (out[:, -64:], *(x[:, -64:] for x in gradients))

    for whole, alone in zip(run(slice(0, T), bounds), run(tail, None), strict=True):
        assert torch.equal(whole, alone)


def test_more_sequences_than_a_grid_axis_holds() -> None:
    lengths = torch.arange(9000, device="cuda") % 3 + 1
    bounds = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    T = int(bounds[-1])
    values = _inputs("gated", (1, T, 8, 8, 16, 16), torch.float32, count=9000)
    out, final, _ = _triton("gated", values, cu_seqlens=bounds)
    rows = slice(int(bounds[8998]), T)
    tail = {n: x[:, rows] for n, x in values.items() if n != "initial_state"}
    tail["initial_state"] = values["initial_state"][8998:]
    tail_bounds = bounds[8998:] - bounds[8998]
    out_tail, final_tail, _ = _triton("gated", tail, cu_seqlens=tail_bounds)
    assert torch.equal(out[:, rows], out_tail)
    assert torch.equal(final[8998:], final_tail)


def test_compiled_calls_have_no_graph_break() -> None:
    values = _inputs("gated", (1, 130, 2, 2, 64, 64), torch.bfloat16)
    plain = _run(_triton, "gated", values)
    compiled = _run(torch.compile(_triton, fullgraph=True), "gated", values)
    assert all(torch.equal(plain[name], compiled[name]) for name in plain)


def test_an_input_off_the_alignment_of_an_earlier_call() -> None:
    values = _inputs("gated", (1, 130, 2, 2, 64, 64), torch.bfloat16)
    q = values["q"].detach()
    shifted = torch.zeros(q.numel() + 1, dtype=q.dtype, device="cuda")[1:].view(q.shape).copy_(q)
    for _ in range(2):
        wanted = _triton("gated", values)[0]
        actual = _triton("gated", values | {"q": shifted})[0]
        torch.testing.assert_close(actual, wanted, rtol=1e-2, atol=1e-2)
