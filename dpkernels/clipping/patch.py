"""Replaces the forward of single module instances, without a trace in their copies, pickles and saved files."""

import copy
from collections.abc import Callable
from typing import Any

from torch import nn

_ATTRIBUTES = ("forward", "__getstate__", "__deepcopy__")


def patch(module: nn.Module, forward: Callable[..., Any]) -> Callable[[], None]:
    """Make ``module(...)`` run ``forward``. Copying, pickling and saving the module behave as if it were unpatched.

    Returns:
        What undoes it, and leaves alone a forward that somebody else set afterwards.
    """
    before = {name: vars(module)[name] for name in _ATTRIBUTES if name in vars(module)}

    def state() -> dict[str, Any]:
        inherited = getattr(type(module), "__getstate__", None)  # object has one from Python 3.11 on
        everything = inherited(module) if inherited is not None else vars(module)
        return {key: value for key, value in everything.items() if key not in _ATTRIBUTES} | before

    def deepcopy(memo: dict[int, Any]) -> nn.Module:
        # A class may copy vars(module) as it is, and a copied forward would still run on the original.
        hidden = {name: vars(module).pop(name) for name in _ATTRIBUTES}
        vars(module).update(before)
        try:
            return copy.deepcopy(module, memo)
        finally:
            vars(module).update(hidden)

    def undo() -> None:
        for name, own in mine.items():
            if vars(module).get(name) is own:
                del vars(module)[name]
                vars(module).update({name: before[name]} if name in before else {})

    mine = dict(zip(_ATTRIBUTES, (forward, state, deepcopy), strict=True))
    vars(module).update(mine)
    return undo
