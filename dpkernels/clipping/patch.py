"""Replaces the forward of single module instances, without a trace in their copies, pickles and saved files."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

_ATTRIBUTES = ("forward", "__getstate__", "__deepcopy__")


def is_patched(module: nn.Module) -> bool:
    """Whether :func:`patch` replaced this instance's forward."""
    return "__getstate__" in vars(module)


def patch(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Make ``module(...)`` run ``forward``. Copying, pickling and saving the module behave as if it were unpatched."""

    def state() -> dict[str, Any]:
        inherited = getattr(type(module), "__getstate__", None)  # object has one from Python 3.11 on
        everything = inherited(module) if inherited is not None else vars(module)
        return {key: value for key, value in everything.items() if key not in _ATTRIBUTES}

    def deepcopy(memo: dict[int, Any]) -> nn.Module:
        # A class may copy vars(module) as it is, and a copied forward would still run on the original.
        hidden = {name: vars(module).pop(name) for name in _ATTRIBUTES}
        try:
            return copy.deepcopy(module, memo)
        finally:
            vars(module).update(hidden)

    vars(module).update(zip(_ATTRIBUTES, (forward, state, deepcopy), strict=True))


def unpatch(module: nn.Module) -> None:
    """Undo :func:`patch`."""
    for name in _ATTRIBUTES:
        vars(module).pop(name, None)


def release(modules: list[nn.Module], watched: dict[int, RemovableHandle]) -> None:
    """Leave the model as it was."""
    for module in modules:
        unpatch(module)
    for handle in watched.values():
        handle.remove()
    modules.clear()
    watched.clear()


def never_compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.compiler.disable`` where a compiler looks, and no wrapper otherwise."""
    outside = torch.compiler.disable(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (outside if torch.compiler.is_compiling() else function)(*args, **kwargs)

    return call
