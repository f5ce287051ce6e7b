"""A memory of few digits stalls and drifts as its format says."""

import itertools
from collections.abc import Iterator

import pytest
import torch

from models.drift import Token, drift_table, measure_drift, random_tokens, updated

ONE = torch.ones(1, dtype=torch.float64)


def counting(decay: float = 1.0) -> Iterator[Token]:
    """The memory counts its updates: k = e₁, v = 1, q = e₁."""
    return itertools.repeat(Token(ONE, ONE, ONE, ONE * decay))


@pytest.mark.parametrize(
    ("dtype", "stall"), [(torch.bfloat16, 256), (torch.float16, 2_048)], ids=["bf16", "fp16"]
)
def test_a_counting_memory_stalls_where_its_mantissa_ends(dtype: torch.dtype, stall: int) -> None:
    at, twice, tenfold = measure_drift(counting(), dtype, [stall, 2 * stall, 10 * stall])
    assert at.state_error == 0
    assert twice.state_error == pytest.approx(0.5)
    assert tenfold.read_error == pytest.approx(0.9)


def test_float32_counts_to_two_to_the_24() -> None:
    token = next(counting()).narrowed()
    below, at = (torch.full((1, 1), float(2**24 - offset)) for offset in (1, 0))
    assert float(updated(below, token)) == 2**24
    assert float(updated(at, token)) == 2**24


def test_a_fading_memory_does_not_stall() -> None:
    """Σ 0.9^i tends to 10, where a bfloat16 has steps of 1/16: off by at most a few of them."""
    (drift,) = measure_drift(counting(0.9), torch.bfloat16, [1_000])
    assert 0 < drift.state_error < 4 / 16 / 10


def test_the_delta_rule_writes_its_value_whatever_was_there() -> None:
    """With β = 1 and a unit key, reading the key just written returns its value."""
    generator = torch.Generator().manual_seed(0)
    state = torch.zeros(8, 5, dtype=torch.float64)
    for token in itertools.islice(
        random_tokens(generator, key_dim=8, value_dim=5, decay=0.7, beta=1.0), 20
    ):
        state = updated(state, token)
        torch.testing.assert_close(state.T @ token.k, token.v)


def test_fewer_digits_drift_further() -> None:
    errors = []
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        tokens = random_tokens(
            torch.Generator().manual_seed(0), key_dim=16, value_dim=16, decay=0.999, beta=0.5
        )
        (drift,) = measure_drift(tokens, dtype, [300])
        errors.append(drift.state_error)
    assert errors[0] < 1e-5 < errors[1] < errors[2] < 0.1


def test_updates_that_cannot_be_measured_are_refused() -> None:
    with pytest.raises(ValueError, match="must ascend from 1"):
        measure_drift(counting(), torch.float32, [2, 1])
    with pytest.raises(ValueError, match="tokens ended before the 3 updates"):
        measure_drift(iter([next(counting())] * 2), torch.float32, [1, 3])


def test_the_table_has_a_line_for_each_rule_decay_and_type() -> None:
    lines = list(drift_table(updates=(1, 3)))
    assert len(lines) == 2 + 2 * 2 * 3
    assert lines[0] == "| rule | decay | state | 1 | 3 |"
    fp32, bf16 = (float(line.split("|")[5]) for line in lines[2:4])
    assert fp32 < 1e-6 < 1e-4 < bf16 < 1e-2
