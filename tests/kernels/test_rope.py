"""Rotary positions: lengths stay, and scores depend on distances alone."""

import math

import pytest
import torch

from kernels import rope, rope_tables
from tests.kernels.rules import generator, normal

F64 = torch.float64


def test_one_pair_turns_by_its_position_in_radians() -> None:
    cos, sin = rope_tables(torch.tensor([0, 1, 2]), 2, base=10_000.0)
    x = torch.tensor([1.0, 0.0]).expand(1, 3, 1, 2)
    turned = rope(x, cos, sin)[0, :, 0]
    expected = torch.tensor([[math.cos(t), math.sin(t)] for t in (0, 1, 2)])
    torch.testing.assert_close(turned, expected)


def test_channel_i_turns_with_channel_i_plus_half() -> None:
    cos, sin = rope_tables(torch.tensor([1]), 4, base=100.0)
    x = torch.tensor([0.0, 1.0, 0.0, 0.0])[None, None, None]
    turned = rope(x, cos, sin)[0, 0, 0]
    torch.testing.assert_close(turned, torch.tensor([0.0, math.cos(0.1), 0.0, math.sin(0.1)]))


def test_scores_depend_on_the_distance_and_lengths_stay() -> None:
    q, k = normal((1, 1, 2, 16), generator(0)).float(), normal((1, 1, 2, 16), generator(1)).float()
    positions = torch.arange(40)
    cos, sin = rope_tables(positions, 16, base=500_000.0)
    turned_q, turned_k = (rope(x.expand(1, 40, 2, 16), cos, sin) for x in (q, k))
    scores = torch.einsum("bihk,bjhk->hij", turned_q, turned_k)
    torch.testing.assert_close(scores[:, 1:, 1:], scores[:, :-1, :-1], rtol=1e-4, atol=1e-4)
    assert not torch.allclose(scores[:, 1:, 1:], scores[:, 1:, :-1], atol=1e-2)
    torch.testing.assert_close(turned_q.norm(dim=-1), q.norm(dim=-1).expand(1, 40, 2))


def test_far_positions_keep_their_angle() -> None:
    cos, sin = rope_tables(torch.tensor([1_000_003]), 4, base=3.0)
    angles = [1_000_003 / 3 ** (i / 2) for i in range(2)]
    assert cos[0].tolist() == pytest.approx([math.cos(angle) for angle in angles], abs=1e-7)
    assert sin[0].tolist() == pytest.approx([math.sin(angle) for angle in angles], abs=1e-7)


def test_positions_may_differ_between_rows() -> None:
    x = normal((2, 3, 1, 4), generator(0)).float()
    positions = torch.tensor([[0, 1, 2], [7, 0, 1]])
    together = rope(x, *rope_tables(positions, 4, base=100.0))
    for row in range(2):
        alone = rope(x[row : row + 1], *rope_tables(positions[row], 4, base=100.0))
        assert torch.equal(alone, together[row : row + 1])


def test_the_dtype_is_that_of_x_and_gradients_turn_back() -> None:
    cos, sin = rope_tables(torch.arange(5), 8, base=100.0)
    x = normal((1, 5, 1, 8), generator(0)).bfloat16().requires_grad_()
    out = rope(x, cos, sin)
    assert out.dtype == torch.bfloat16
    y = x.detach().float().requires_grad_()
    (gradient,) = torch.autograd.grad(rope(y, cos, sin), y, rope(y.detach(), cos, sin))
    torch.testing.assert_close(gradient, y.detach())


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="dim=3 is odd"):
        rope_tables(torch.arange(4), 3, base=100.0)
    with pytest.raises(ValueError, match=r"base=1.0; expected more than 1"):
        rope_tables(torch.arange(4), 4, base=1.0)
    cos, sin = rope_tables(torch.arange(4), 4, base=100.0)
    with pytest.raises(ValueError, match=r"cos has shape \[4, 2\], sin .*; expected \[5, 2\] or"):
        rope(torch.ones(1, 5, 1, 4), cos, sin)
