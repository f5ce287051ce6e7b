"""The implementation of an op: a name that is resolved once, or refused with those that serve."""

import pytest
import torch

from kernels import launch
from tests.kernels.rules import RULES, TABLES, call, draw_inputs


@pytest.mark.parametrize("op", TABLES)
def test_auto_is_the_chunked_form_on_a_cpu(op: str) -> None:
    assert launch.resolve("auto", "cpu", op) == "chunked"


@pytest.mark.parametrize("op", TABLES)
@pytest.mark.parametrize("impl", ["reference", "chunked"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_named_implementation_is_itself(device: str, impl: str, op: str) -> None:
    assert launch.resolve(impl, device, op) == impl


def test_auto_on_cuda_is_triton_exactly_where_the_kernels_are_proven(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launch, "PROVEN_OPS", frozenset({"delta_rule"}))
    assert launch.resolve("auto", "cuda", "delta_rule") == "triton"
    assert launch.resolve("auto", torch.device("cuda", 0), "gated_delta_rule") == "chunked"


def test_what_is_proven_has_kernels() -> None:
    assert not launch.PROVEN_OPS - launch.TRITON_OPS - {"decode"}


def test_triton_is_refused_where_it_cannot_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(launch, "TRITON_OPS", frozenset({"delta_rule"}))
    with pytest.raises(
        ValueError, match=r"Triton needs a CUDA device .* lie on cpu; use reference or chunked"
    ):
        launch.resolve("triton", "cpu", "delta_rule")
    with pytest.raises(ValueError, match="gated_delta_rule has no Triton kernels; use reference"):
        launch.resolve("triton", "cuda", "gated_delta_rule")


def test_triton_serves_a_cpu_in_its_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(launch, "TRITON_OPS", frozenset({"delta_rule"}))
    assert launch.resolve("triton", "cpu", "delta_rule") == "triton"
    assert launch.resolve("auto", "cpu", "delta_rule") == "chunked"


def test_an_unknown_name_is_refused_with_those_that_exist() -> None:
    inputs = draw_inputs(RULES["delta"], T=5)
    with pytest.raises(ValueError, match="impl='fast' is none of auto, reference, chunked, triton"):
        call(RULES["delta"], inputs, impl="fast")


@pytest.mark.parametrize("op", TABLES)
def test_an_op_is_listed_as_served_by_triton_exactly_where_its_table_has_it(op: str) -> None:
    assert ("triton" in TABLES[op]) == (op in launch.TRITON_OPS)
    assert set(TABLES[op]) <= set(launch.IMPLEMENTATIONS)


@pytest.mark.parametrize("impl", ["reference", "chunked"])
def test_the_named_implementation_is_the_one_that_runs(
    impl: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = draw_inputs(RULES["kimi-delta"], T=5)
    other = "chunked" if impl == "reference" else "reference"
    monkeypatch.delitem(TABLES["kimi_delta_rule"], other)
    assert call(RULES["kimi-delta"], inputs, impl=impl)["out"].isfinite().all()
