"""Sequences packed into one row: each by itself, whatever stands beside it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.chunk_layout import ChunkLayout
from tests.kernels.rules import IMPLS, RULES, call, draw_inputs, evaluate, generator, normal
from tests.kernels.tolerances import assert_close

F32, F64 = torch.float32, torch.float64
ALL_IMPLS = ("reference", *IMPLS)


def bounds(*lengths: int) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def rows_of(inputs: dict[str, Tensor], i: int, cu_seqlens: Tensor) -> dict[str, Tensor]:
    """The inputs of sequence i alone."""
    start, end = cu_seqlens[i : i + 2].tolist()
    return {
        key: x[i : i + 1] if key.startswith("initial") else x[:, start:end]
        for key, x in inputs.items()
    }


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", RULES)
def test_packed_sequences_equal_the_loop_with_all_gradients(name: str, impl: str) -> None:
    rule, cu_seqlens = RULES[name], bounds(37, 1, 64, 70, 2)
    inputs = draw_inputs(rule, T=174, H=1, HV=2, K=8, V=12, sequences=5)
    expected = evaluate(rule, inputs, impl="reference", cu_seqlens=cu_seqlens)
    actual = evaluate(rule, inputs, impl=impl, dtype=F32, cu_seqlens=cu_seqlens.int())
    assert_close(actual, expected, F32)


@pytest.mark.parametrize("impl", ALL_IMPLS)
@pytest.mark.parametrize("name", RULES)
def test_a_packed_sequence_equals_itself_alone(name: str, impl: str) -> None:
    rule, cu_seqlens = RULES[name], bounds(37, 91)
    inputs = draw_inputs(rule, T=128, H=2, K=8, V=12, sequences=2)
    packed = call(rule, inputs, impl=impl, cu_seqlens=cu_seqlens)
    for i, (start, end) in enumerate([(0, 37), (37, 128)]):
        alone = call(rule, rows_of(inputs, i, cu_seqlens), impl=impl)
        part = {
            key: x[i : i + 1] if key.startswith("final") else x[:, start:end]
            for key, x in packed.items()
        }
        assert_close(part, alone, F64)


@pytest.mark.parametrize("impl", ALL_IMPLS)
@pytest.mark.parametrize("name", RULES)
def test_changing_the_first_sequence_leaves_the_second_bit_equal(name: str, impl: str) -> None:
    rule, cu_seqlens = RULES[name], bounds(37, 91)
    inputs = draw_inputs(rule, T=128, H=2, K=8, V=12, sequences=2)
    changed = {key: x.clone() for key, x in inputs.items()}
    for key, x in changed.items():
        first = x[:1] if key.startswith("initial") else x[:, :37]
        noise = normal(tuple(first.shape), generator(5))
        first.copy_(-noise.abs() if key == "log_decay" else noise)
    before = evaluate(rule, inputs, impl=impl, dtype=F32, cu_seqlens=cu_seqlens)
    after = evaluate(rule, changed, impl=impl, dtype=F32, cu_seqlens=cu_seqlens)
    for key, x in before.items():
        is_state = key.startswith(("final", "d_initial"))
        second = (slice(1, None),) if is_state else (slice(None), slice(37, None))
        assert torch.equal(x[second], after[key][second]), key
        assert not torch.equal(x, after[key]), key


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", ["linear-normalized", "gated-delta", "kimi-delta"])
def test_hundreds_of_short_sequences(name: str, impl: str) -> None:
    rule, source = RULES[name], generator(4)
    lengths = torch.randint(1, 4, (300,), generator=source)
    cu_seqlens = bounds(*lengths.tolist())
    inputs = draw_inputs(rule, T=int(cu_seqlens[-1]), H=2, K=4, V=4, sequences=300)
    results = call(rule, inputs, impl="reference", cu_seqlens=cu_seqlens)
    single = {key: x.float() for key, x in inputs.items()}
    assert_close(call(rule, single, impl=impl, cu_seqlens=cu_seqlens), results, F32)


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=8),
    size=st.sampled_from([1, 2, 8, 32]),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_the_layout_puts_every_token_into_one_slot_and_back(lengths: list[int], size: int) -> None:
    cu_seqlens = bounds(*lengths)
    T = sum(lengths)
    layout = ChunkLayout.of(1, T, cu_seqlens, size)
    x = 1 + torch.arange(T * 2 * 3, dtype=F64).view(1, T, 2, 3)
    chunks = layout.split(x)
    assert torch.equal(layout.join(chunks, 2), x)
    assert chunks.count_nonzero() == x.numel()
    assert sum(layout.active) * 2 == len(chunks)
    assert list(layout.active) == sorted(layout.active, reverse=True)
    assert layout.order is not None
    # The scan's first step holds the first chunk of each sequence, in the layout's order.
    for i, sequence in enumerate(layout.order.tolist()):
        assert torch.equal(chunks[2 * i, 0], x[0, cu_seqlens[sequence], 0])


@pytest.mark.parametrize(
    ("cu_seqlens", "message"),
    [
        (torch.tensor([1, 9]), r"cu_seqlens runs from \[1\] to \[9\]; expected 0 to T=9"),
        (torch.tensor([0, 8]), r"cu_seqlens runs from \[0\] to \[8\]; expected 0 to T=9"),
        (torch.tensor([0]), r"cu_seqlens runs from \[0\] to \[0\]"),
        (torch.tensor([0, 5, 5, 9]), r"cu_seqlens\[2\]=5 follows 5; expected boundaries that incr"),
        (torch.tensor([0, 6, 4, 9]), r"cu_seqlens\[2\]=4 follows 6"),
        (torch.tensor([0.0, 9.0]), r"dtype torch.float32; expected an int32 or int64"),
        (torch.tensor([[0, 9]]), r"cu_seqlens has shape \[1, 2\]"),
    ],
    ids=["start", "tail", "empty", "equal", "decreasing", "dtype", "rank"],
)
@pytest.mark.parametrize("name", ["linear", "gated-delta"])
def test_boundaries_that_miss_a_token_are_refused(
    name: str, cu_seqlens: Tensor, message: str
) -> None:
    inputs = draw_inputs(RULES[name], T=9)
    inputs.pop("initial_state")
    with pytest.raises(ValueError, match=message):
        call(RULES[name], inputs, impl="auto", cu_seqlens=cu_seqlens)


def test_packing_needs_a_batch_of_one() -> None:
    inputs = draw_inputs(RULES["delta"], B=2, T=9)
    with pytest.raises(ValueError, match="cu_seqlens with a batch of 2; expected 1 row"):
        call(RULES["delta"], inputs, impl="auto", cu_seqlens=bounds(4, 5))
