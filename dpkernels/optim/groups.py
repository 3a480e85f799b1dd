"""What a private optimizer's parameter groups must be for a step to release nothing but noised sums."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Set
from typing import Any

from torch import nn

Parameters = Iterable[nn.Parameter] | Iterable[dict[str, Any]]

ANEW = (
    "Construct the optimizer anew, with ledger=optimizer.ledger so that what was spent stays counted, after "
    "optimizer.clipper.detach()"
)


def require_groups(groups: Iterable[Mapping[str, Any]], names: Mapping[int, str], fixed: Set[str]) -> None:
    """Raise ValueError unless the groups hold parameters of the model alone, each once, and no option of ``fixed``.

    names: of the model's parameters when the optimizer was made, by id.
    """
    seen: set[int] = set()
    for group in groups:
        if common := sorted(fixed & group.keys()):
            raise ValueError(
                f"{common[0]} is one for all parameters and cannot differ between groups: give it to the optimizer, or "
                "to the plan"
            )
        for p in group["params"]:
            if id(p) not in names:
                raise ValueError(
                    f"params must be parameters of model, got one of shape {tuple(p.shape)} that is not, or came into "
                    f"it after the optimizer was made: the model must be complete before. {ANEW}"
                )
            if id(p) in seen:
                raise ValueError(
                    f"params holds {names[id(p)]} twice: its sum would be released twice, with other noise. List every "
                    "parameter once, tied ones too"
                )
            seen.add(id(p))


def require_whole(groups: Iterable[Mapping[str, Any]], model: nn.Module, names: Mapping[int, str]) -> None:
    """Raise ValueError unless the groups cover what is trainable in the model now, and that was there before.

    names: as for ``require_groups``, which is called first.
    """
    listed = {id(p): p for group in groups for p in group["params"]}
    here = {id(p): (name, p) for name, p in model.named_parameters() if p.requires_grad}
    if added := [name for p, (name, _) in here.items() if p not in names]:
        raise ValueError(f"{', '.join(added)} came into the model after the optimizer was made. {ANEW}")
    if left_out := [name for p, (name, _) in here.items() if p not in listed]:
        raise ValueError(
            f"params must cover every trainable parameter; freeze or add {', '.join(left_out)}: with "
            "requires_grad_(False), or to the params that the optimizer is made with, or by add_param_group"
        )
    if gone := [names[p] for p, parameter in listed.items() if parameter.requires_grad and p not in here]:
        raise ValueError(f"{', '.join(gone)} left the model after the optimizer was made. {ANEW}")
    device = None
    for name, p in here.values():
        device = p.device if device is None else device
        if not p.is_floating_point() or p.device != device:
            raise ValueError(f"{name} must be real floating-point on {device}, got {p.dtype} on {p.device}")


def require_range(name: str, value: float, low: float, high: float = math.inf) -> None:
    """Raise unless ``value`` is a number with low <= value < high."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value < high:
        raise ValueError(f"{name} must be a number in [{low:g}, {high:g}), got {value!r}")


def as_groups(model: nn.Module, params: Parameters | None) -> list[dict[str, Any]]:
    """Parameter groups as torch takes them; all parameters of the model where none are given.

    Frozen ones are among them, so that they are trained once they are unfrozen.
    """
    if params is None:
        return [{"params": list(model.parameters())}]
    groups = list(params)
    if groups and not isinstance(groups[0], dict):
        return [{"params": groups}]
    return groups  # type: ignore[return-value]
