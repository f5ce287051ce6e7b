"""Unwritten memory is NaN in every test of the kernels, so that an output left unwritten shows."""

from collections.abc import Callable
from typing import Any

import pytest
import torch


def _poisoned(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def allocate_nan(*args: Any, **kwargs: Any) -> torch.Tensor:
        x = allocate(*args, **kwargs)
        return x.fill_(float("nan")) if x.is_floating_point() else x

    return allocate_nan


@pytest.fixture(autouse=True)
def nan_in_unwritten_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, name in (
        (torch, "empty"),
        (torch, "empty_like"),
        (torch, "empty_strided"),
        (torch.Tensor, "new_empty"),
    ):
        monkeypatch.setattr(owner, name, _poisoned(getattr(owner, name)))
