"""What the parameters of a model are there for, and so which of them are trained, and how fast."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from torch import nn

from dpkernels.transfer.sparse import SparseConv2d, SparseLinear

Role = Literal["classifier", "norm", "sparse", "body"]
"""Of a parameter: the classifier's, a normalization layer's, selected weights of a layer (`sparsify`), any other."""

ROLES: tuple[Role, ...] = get_args(Role)
_NORMS = (nn.GroupNorm, nn.LayerNorm, nn.RMSNorm, nn.modules.batchnorm._NormBase)


def classifier_of(model: nn.Module) -> str:
    """The name of the last linear layer of `model`, which its classes come out of.

    Raises ValueError where there is none: the functions of this room take the name as `classifier` then.
    """
    _check_model(model)
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and name]
    if not linear:
        raise ValueError("model must have a linear layer as its classifier, got none; name the module in its place")
    return linear[-1]


def roles(model: nn.Module, classifier: str | None = None) -> dict[str, Role]:
    """The role of every parameter of `model`, by name, those that are frozen too.

    classifier: the module that is the classifier, all below it included; else that of `classifier_of`. Raises
    ValueError for a name that the model does not have.
    """
    head = classifier_of(model) if classifier is None else classifier
    covers(model, head)
    own: dict[int, Role] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if isinstance(module, (SparseConv2d, SparseLinear)) and name == "values":
                own[id(parameter)] = "sparse"
            elif isinstance(module, _NORMS):
                own[id(parameter)] = "norm"
    return {
        name: "classifier" if within(name, head) else own.get(id(parameter), "body")
        for name, parameter in model.named_parameters()
    }


def freeze(model: nn.Module, *what: str, block_groups: int = 0, classifier: str | None = None) -> list[str]:
    """Stop training parts of `model`, and return the names of the parameters that were trained before.

    what: names of modules or of parameters, or the roles "classifier", "norm" and "body" (what is neither). A model's
        own name wins over a role.
    block_groups: for a model that says what its block groups are (`models.ResNet.block_groups`): freeze the first so
        many. The stem goes with the first, and with all of them only the classifier is left (Kurakin et al. 2022,
        appendix G).

    Raises ValueError for a name that the model does not have, or more block groups than it has; then nothing was
    frozen.
    """
    parameters = dict(model.named_parameters())
    own = roles(model, classifier)
    frozen: set[str] = set()
    for name in (*what, *_first_block_groups(model, block_groups)):
        if name in ROLES and not _is_known(model, name):
            frozen.update(parameter for parameter, role in own.items() if role == name)
        else:
            covers(model, name)
            frozen.update(parameter for parameter in parameters if within(parameter, name))
    changed = [name for name, parameter in parameters.items() if name in frozen and parameter.requires_grad]
    for name in changed:
        parameters[name].requires_grad_(False)
    return changed


def parameter_groups(
    model: nn.Module, lr: float | Mapping[str, float], classifier: str | None = None
) -> list[dict[str, Any]]:
    """The trained parameters of `model` as an optimizer's groups, one a role, the classifier first.

    lr: of all, or by role. One bound on the gradient norm and one noise hold for all groups together, so their learning
    rates cost no privacy. Each group has its role as "name". Raises ValueError where a role that is trained has no
    learning rate, or a key is no role.
    """
    rates = dict(lr) if isinstance(lr, Mapping) else dict.fromkeys(ROLES, lr)
    if unknown := sorted(set(rates) - set(ROLES)):
        raise ValueError(f"lr must be given by the roles {', '.join(ROLES)}, got {', '.join(unknown)}")
    own = roles(model, classifier)
    groups = []
    for role in ROLES:
        params = [p for name, p in model.named_parameters() if own[name] == role and p.requires_grad]
        if params and role not in rates:
            raise ValueError(f"lr must be given for {role}, of which {len(params)} parameters are trained, got {rates}")
        if params:
            groups.append({"params": params, "lr": rates[role], "name": role})
    return groups


def trained(model: nn.Module, classifier: str | None = None) -> dict[str, tuple[int, int]]:
    """By role: how many numbers are trained, and how many there are."""
    own = roles(model, classifier)
    counts = dict.fromkeys(own.values(), (0, 0))
    for name, parameter in model.named_parameters():
        some, every = counts[own[name]]
        counts[own[name]] = some + parameter.numel() * parameter.requires_grad, every + parameter.numel()
    return {role: counts[role] for role in ROLES if role in counts}


def within(parameter: str, name: str) -> bool:
    """Whether the parameter is `name`, or lies below the module of that name."""
    return parameter == name or parameter.startswith(f"{name}.")


def covers(model: nn.Module, name: str) -> None:
    """Raise ValueError unless `name` is a module or a parameter of `model`."""
    if not _is_known(model, name):
        known = ", ".join(child for child, _ in model.named_children())
        raise ValueError(f"the model has no module or parameter {name!r}; it has {known}, and what lies below them")


def _is_known(model: nn.Module, name: str) -> bool:
    _check_model(model)
    return bool(name) and (name in dict(model.named_modules()) or name in dict(model.named_parameters()))


def _first_block_groups(model: nn.Module, count: int) -> Sequence[str]:
    if isinstance(count, bool) or not isinstance(count, int):
        raise TypeError(f"block_groups must be an int, got {count!r} of type {type(count).__name__}")
    if count == 0:
        return ()
    for path, module in model.named_modules():  # a normalization of the input may stand before the network
        groups = getattr(module, "block_groups", None)
        if groups is not None:
            if not 0 <= count <= len(groups):
                raise ValueError(f"block_groups must be from 0 to {len(groups)}, got {count}")
            return [f"{path}.{name}" if path else name for group in groups[:count] for name in group]
    raise ValueError("block_groups must be 0 for a model that does not tell them; freeze modules by their names")


def _check_model(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
