"""The loops are the equations: numbers done by hand, algebra, numerical derivatives."""

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kernels
from kernels import reference
from tests.kernels.rules import (
    DECAYING_RULES,
    DELTA_RULES,
    RULES,
    call,
    draw_inputs,
    generator,
    normal,
    uniform,
    unit,
)

F64 = torch.float64
IMPLS = ("reference", "chunked")


def sequence(rows: list[list[float]]) -> Tensor:
    """One batch row and one head `[1, T, 1, D]`."""
    return torch.tensor(rows, dtype=F64)[None, :, None]


def ones(rule: str, T: int, K: int, V: int) -> dict[str, Tensor]:
    """Gates that erase and write fully and let nothing decay."""
    sizes = {"B": 1, "T": T, "HV": 1, "K": K, "V": V}
    gates = {}
    for name, axes in RULES[rule].gates.items():
        shape = tuple(sizes[axis] for axis in axes.split())
        gates[name] = torch.full(shape, 0.0 if name == "log_decay" else 1.0, dtype=F64)
    return gates


def write_and_read(
    rule: str, keys: list[list[float]], values: list[list[float]], query: list[float], impl: str
) -> tuple[list[list[float]], list[float]]:
    """The memory after the writes, and what the query then reads from it at scale 1."""
    k, v = sequence(keys), sequence(values)
    q = torch.zeros_like(k)
    q[0, -1, 0] = torch.tensor(query, dtype=F64)
    gates = ones(rule, len(keys), k.shape[-1], v.shape[-1])
    results = call(RULES[rule], {"q": q, "k": k, "v": v, **gates}, impl=impl, scale=1.0)
    state = results["final_state"][0, 0]
    return state.tolist(), results["out"][0, -1, 0].tolist()


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    ("query", "read", "normalizer"),
    [([1.0, 0.0], [3.0, 1.0], 2.0), ([0.0, 1.0], [0.0, 3.0], 1.0), ([1.0, 1.0], [3.0, 4.0], 3.0)],
    ids=["q10", "q01", "q11"],
)
def test_additive_memory_by_hand(
    query: list[float], read: list[float], normalizer: float, impl: str
) -> None:
    keys, values = [[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]], [[2.0, 0.0], [0.0, 3.0], [1.0, 1.0]]
    state, out = write_and_read("linear", keys, values, query, impl)
    assert state == [[3.0, 1.0], [0.0, 3.0]]
    assert out == read
    k, v, q = sequence(keys), sequence(values), sequence([query])
    options: dict[str, Any] = {"scale": 1.0, "normalize": True, "eps": 0.0, "impl": impl}
    _, first_two = kernels.linear_attention(k[:, :2], k[:, :2], v[:, :2], **options)
    normalized, (_, key_sum) = kernels.linear_attention(
        q, k[:, 2:], v[:, 2:], initial_state=first_two, **options
    )
    assert key_sum[0, 0].tolist() == [2.0, 1.0]
    assert normalized[0, 0, 0].tolist() == [x / normalizer for x in read]


KEYS, VALUES = [[1.0, 0.0], [0.0, 1.0], [0.6, 0.8]], [[5.0], [3.0], [10.0]]


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    ("rule", "state", "first", "last"),
    [
        ("linear", [11.0, 11.0], 11.0, 15.4),
        ("delta", [7.76, 6.68], 7.76, 10.0),
        ("gated-delta", [7.76, 6.68], 7.76, 10.0),
        ("kimi-delta", [7.76, 6.68], 7.76, 10.0),
        ("gated-delta-2", [7.76, 6.68], 7.76, 10.0),
    ],
    ids=["linear", "delta", "gated-delta", "kimi-delta", "gated-delta-2"],
)
def test_interference_by_hand(
    rule: str, state: list[float], first: float, last: float, impl: str
) -> None:
    memory, out = write_and_read(rule, KEYS, VALUES, [0.6, 0.8], impl)
    assert [row[0] for row in memory] == pytest.approx(state, abs=1e-14)
    assert out[0] == pytest.approx(last, abs=1e-14)
    assert write_and_read(rule, KEYS, VALUES, [1.0, 0.0], impl)[1][0] == pytest.approx(
        first, abs=1e-14
    )


def test_one_step_of_every_gate_by_hand() -> None:
    """S = 8, decays to 4; erased by 0.5 · 2 · 4; written 0.25 · 12; read by 3 at scale 0.5."""
    one = sequence([[1.0]])
    out, state, residual = reference.gated_delta_rule_2(
        3 * one,
        2 * one,
        12 * one,
        log_decay=one * torch.tensor(0.5, dtype=F64).log(),
        erase=0.5 * one,
        write=0.25 * one,
        scale=0.5,
        initial_state=8 * one,
    )
    assert residual.item() == pytest.approx(3 - 4, abs=1e-14)
    assert state.item() == pytest.approx(4 + 2 * -1, abs=1e-14)
    assert out.item() == pytest.approx(0.5 * 3 * 2, abs=1e-14)


@pytest.mark.parametrize("name", DELTA_RULES)
def test_strength_zero_writes_nothing(name: str) -> None:
    rule = RULES[name]
    inputs = draw_inputs(rule, T=6, strength=lambda shape, _: torch.zeros(shape, dtype=F64))
    results = call(rule, inputs, impl="reference")
    total = inputs["log_decay"].sum(1) if "log_decay" in inputs else torch.zeros(1, 1, dtype=F64)
    decay = total.exp().reshape(1, 1, -1, 1)
    assert not results["residual"].any()
    torch.testing.assert_close(results["final_state"], decay * inputs["initial_state"])


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", ["linear", *DELTA_RULES])
def test_orthonormal_keys_recall_exactly(name: str, impl: str) -> None:
    rule, K = RULES[name], 16
    keys = torch.linalg.qr(normal((K, K), generator(0))).Q
    values = normal((K, 5), generator(1))
    # The second half of the sequence reads what the first half wrote, and writes zeros to keys
    # of length zero.
    k = torch.cat([keys, torch.zeros_like(keys)])[None, :, None]
    v = torch.cat([values, torch.zeros_like(values)])[None, :, None]
    q = torch.cat([torch.zeros_like(keys), keys])[None, :, None]
    inputs = {"q": q, "k": k, "v": v, **ones(name, 2 * K, K, 5)}
    out = call(rule, inputs, impl=impl, scale=1.0)["out"]
    torch.testing.assert_close(out[0, K:, 0], values, rtol=0, atol=1e-13)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", ["linear", *DELTA_RULES])
def test_a_key_written_twice_reads_the_latest_value_or_the_sum(name: str, impl: str) -> None:
    key = [0.6, 0.8]
    _, out = write_and_read(name, [key, key], [[2.0, -1.0], [7.0, 3.0]], key, impl)
    expected = [9.0, 2.0] if name == "linear" else [7.0, 3.0]
    assert out == pytest.approx(expected, abs=1e-14)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", DECAYING_RULES)
def test_the_first_of_t_orthogonal_writes_fades_by_the_decay_to_the_t_minus_one(
    name: str, impl: str
) -> None:
    rule, T, K, log_decay = RULES[name], 12, 16, -0.3
    q, k = torch.zeros(1, T, 1, K, dtype=F64), torch.eye(T, K, dtype=F64)[None, :, None]
    q[0, -1, 0, 0] = 1.0
    gates = ones(name, T, K, 3)
    gates["log_decay"] += log_decay
    v = normal((1, T, 1, 3), generator(2))
    out = call(rule, {"q": q, "k": k, "v": v, **gates}, impl=impl, scale=1.0)["out"]
    expected = v[0, 0, 0] * torch.tensor(log_decay * (T - 1), dtype=F64).exp()
    torch.testing.assert_close(out[0, -1, 0], expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", DELTA_RULES)
def test_a_unit_key_written_at_full_strength_reads_its_value_under_any_decay(
    name: str, impl: str
) -> None:
    rule = RULES[name]
    inputs = draw_inputs(
        rule,
        T=70,
        log_decay=lambda shape, source: -20 * uniform(shape, source),
        strength=lambda shape, _: torch.ones(shape, dtype=F64),
    )
    inputs["q"] = inputs["k"]
    out = call(rule, inputs, impl=impl, scale=1.0)["out"]
    torch.testing.assert_close(out, inputs["v"], rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", RULES)
def test_derivatives_equal_finite_differences(name: str) -> None:
    rule = RULES[name]
    inputs = draw_inputs(rule, T=3, H=1, HV=2, K=2, V=2)
    leaves = [x.requires_grad_() for x in inputs.values()]

    def run(*values: Tensor) -> tuple[Tensor, ...]:
        named = dict(zip(inputs, values, strict=True))
        return tuple(call(rule, named, impl="reference").values())

    assert torch.autograd.gradcheck(run, leaves)


def test_unit_length_is_that_of_the_norm_op() -> None:
    inputs = draw_inputs(RULES["delta"], T=5, K=8)
    inputs["k"] = 4 * inputs["k"]
    inside = call(RULES["delta"], inputs, impl="reference", qk_l2norm=True)
    outside = {**inputs, "q": kernels.l2_norm(inputs["q"]), "k": kernels.l2_norm(inputs["k"])}
    torch.testing.assert_close(
        call(RULES["delta"], outside, impl="reference")["out"], inside["out"]
    )
    assert not torch.allclose(unit(inputs["k"]), inputs["k"])


def test_the_reference_imports_torch_alone() -> None:
    tree = ast.parse(Path(reference.__file__).read_text(encoding="utf-8"))
    modules = {
        (node.module or "") if isinstance(node, ast.ImportFrom) else name.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in node.names
    }
    assert {module.split(".")[0] for module in modules} == {
        "collections", "functools", "itertools", "operator", "torch", "typing",
    }  # fmt: skip


def test_the_room_named_kernels_is_the_checkouts_own() -> None:
    assert Path(kernels.__file__).parent == Path(__file__).parents[2] / "kernels"
