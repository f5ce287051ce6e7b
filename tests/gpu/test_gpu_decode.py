"""The decode kernel on a GPU, for every rule, against the float64 loop."""

import pytest
import torch
from torch import Tensor

import kernels
from kernels import reference
from kernels.benchmark_ops import BENCHMARK_OPS, BenchmarkShape, op_inputs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# Arithmetic is float32; an output is rounded once to the inputs' dtype, 1.1e-3 for bfloat16.
OUT_LIMITS = {torch.bfloat16: 3e-3, torch.float16: 4e-4, torch.float32: 1e-6}
SHAPES = (BenchmarkShape(64, 1, 8, 8, 128, 128), BenchmarkShape(3, 1, 2, 6, 80, 96))


@pytest.fixture(autouse=True)
def _kernel_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    # The kernel serves a step only once it is proven, which is what these tests are for.
    monkeypatch.setattr("kernels.decode.PROVEN_OPS", frozenset({"decode"}))


@pytest.mark.parametrize("op", BENCHMARK_OPS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", OUT_LIMITS, ids=str)
def test_a_step_equals_the_loop(op: str, shape: BenchmarkShape, dtype: torch.dtype) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    inputs = {n: x.detach() for n, x in op_inputs(op, shape, generator, dtype).items()}
    state = torch.randn(shape.B, shape.HV, shape.K, shape.V, generator=generator, device="cuda")
    wide = {name: x.double() for name, x in inputs.items()} | {"initial_state": state.double()}
    options: dict[str, object] = {"scale": shape.K**-0.5}
    if op == "linear_attention":
        options |= {"log_decay": None, "feature_map": "identity", "normalize": False}
        step_options = {}
    else:
        options["qk_l2norm"] = True
        step_options = {"qk_l2norm": True}
    expected = getattr(reference, op)(**wide, **options)

    token: dict[str, Tensor] = {name: x[:, 0] for name, x in inputs.items()}
    with torch.no_grad():
        out, new = getattr(kernels, f"{op}_step")(
            **token, state=state, in_place=True, **step_options
        )
    assert new.data_ptr() == state.data_ptr()
    limits = ((out, expected[0][:, 0], OUT_LIMITS[dtype]), (new, expected[1], 1e-6))
    for actual, exact, limit in limits:
        assert (actual.double() - exact).norm() <= limit * exact.norm()
