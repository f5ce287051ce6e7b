"""A compiled kernel is launched again only for arguments that Triton would compile the same for."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kernels import launcher
from kernels.launcher import launch_kernel


class _Compiled:
    def __init__(self, launches: list[tuple[Any, ...]]) -> None:
        self.launches = launches

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        return lambda *arguments: self.launches.append((grid, *arguments))


class _Kernel:
    """Stands for a `triton.jit` function, counting what is bound and what is launched directly."""

    arg_names = ("x", "n", "scale", "BLOCK")

    def __init__(self, *, interpreted: bool = False) -> None:
        self.interpreted = interpreted
        self.bound: list[dict[str, Any]] = []
        self.direct: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int]) -> Any:
        def call(**arguments: Any) -> _Compiled | None:
            self.bound.append(arguments)
            return None if self.interpreted else _Compiled(self.direct)

        return call


@pytest.fixture(autouse=True)
def _nothing_kept() -> Iterator[None]:
    launcher._kept.clear()
    yield
    launcher._kept.clear()


BUFFER = torch.zeros(64)
ALIGNED = BUFFER[(-BUFFER.data_ptr() % 16) // 4 :][:16]
ARGUMENTS: dict[str, Any] = {"scale": 0.5, "x": ALIGNED, "BLOCK": 64, "n": 3, "num_warps": 4}


def test_a_second_call_hands_over_declared_arguments_in_order() -> None:
    kernel = _Kernel()
    launch_kernel(kernel, 5, **ARGUMENTS)
    other = BUFFER[32 + (-BUFFER.data_ptr() % 16) // 4 :][:16]
    launch_kernel(kernel, 7, **{**ARGUMENTS, "x": other})
    assert len(kernel.bound) == 1
    assert kernel.direct == [((7, 1, 1), other, 3, 0.5, 64)]


@pytest.mark.parametrize(
    "change",
    [
        {"n": 16},
        {"n": 1},
        {"n": 3.0},
        {"scale": 1},
        {"BLOCK": 32},
        {"num_warps": 8},
        {"x": None},
        {"x": ALIGNED.double()},
        {"x": ALIGNED[1:]},
    ],
    ids=str,
)
def test_what_triton_tells_apart_is_bound_anew(change: dict[str, Any]) -> None:
    kernel = _Kernel()
    launch_kernel(kernel, 5, **ARGUMENTS)
    launch_kernel(kernel, 5, **{**ARGUMENTS, **change})
    assert len(kernel.bound) == 2
    assert not kernel.direct


def test_kernels_do_not_share_what_is_kept() -> None:
    first, second = _Kernel(), _Kernel()
    launch_kernel(first, 5, **ARGUMENTS)
    launch_kernel(second, 5, **ARGUMENTS)
    assert len(second.bound) == 1


def test_the_interpreter_gets_every_call() -> None:
    kernel = _Kernel(interpreted=True)
    for _ in range(2):
        launch_kernel(kernel, 5, **ARGUMENTS)
    assert len(kernel.bound) == 2


def test_lengths_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "MOST_KEPT", 8)
    kernel = _Kernel()
    for n in range(100):
        launch_kernel(kernel, 5, **{**ARGUMENTS, "n": n})
    assert len(launcher._kept) <= 8


def test_an_option_that_is_not_known_is_refused() -> None:
    kernel = _Kernel()
    launch_kernel(kernel, 5, **ARGUMENTS)
    with pytest.raises(TypeError, match="num_ctas: none of the arguments"):
        launch_kernel(kernel, 5, **ARGUMENTS, num_ctas=2)
