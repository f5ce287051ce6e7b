"""Unwritten memory is NaN in every test of the kernels, so that an output left unwritten shows."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

from kernels.launch import is_interpreted


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


@pytest.fixture(autouse=True, scope="session")
def language_patched_once_a_launch() -> Iterator[None]:
    """The interpreter's own functions take the place of the language's once, at a launch.

    Triton looks all of them up again whenever a kernel calls a device function, and finds nothing
    left to replace: a quarter of the time of these tests.
    """
    if not is_interpreted():
        yield
        return
    patch_all = interpreter._patch_lang

    def patch_what_is_left(fn: Callable[..., Any]) -> Any:
        used = [x for x in fn.__globals__.values() if x is tl or x is tl.core]
        if any(tl.core.is_builtin(language.load) for language in used):
            return patch_all(fn)
        return interpreter._LangPatchScope()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", patch_what_is_left)
        yield
