"""Selected weights of a model as its only trainable ones, and back (Luo et al. 2021, section 4.3).

The weights of a convolution or linear layer that a mask selects become a parameter of their own, a vector; the others a
buffer. Whatever trains the parameters of the model then trains, clips and perturbs the selected weights and no other.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from dpkernels.layers.sparse import SparseConv2d, SparseLinear

__all__ = ["SparseConv2d", "SparseLinear", "densify", "sparsify"]

_SPARSE: dict[type[nn.Module], type[SparseConv2d | SparseLinear]] = {nn.Conv2d: SparseConv2d, nn.Linear: SparseLinear}


def sparsify(model: nn.Module, masks: dict[str, Tensor]) -> None:
    """Make the selected weights of the named layers their trainable parameters, in place.

    The layers are replaced by :class:`SparseConv2d` and :class:`SparseLinear`, whose parameter ``values`` requires a
    gradient whether or not the dense weight did; everything else stays as it is, biases included. Do this before an
    optimizer or clipper is made.

    Args:
        model: has the layers as submodules; it is no such layer itself.
        masks: name of a weight in ``model.named_parameters()`` -> bool tensor of its shape, true where it is trained.

    Raises:
        ValueError: a name is no weight of an ``nn.Conv2d`` or ``nn.Linear`` of the model, the weight is shared with
            another module, or a mask does not fit. The model is then as it was.
        TypeError: a mask is no bool tensor.
    """
    modules = dict(model.named_modules())
    owners: dict[int, set[int]] = {}  # of each parameter
    for module in modules.values():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), set()).add(id(module))
    replaced: dict[int, nn.Module] = {}
    for name, mask in masks.items():
        path, _, leaf = name.rpartition(".")
        dense = modules.get(path)
        sparse_type = _SPARSE.get(type(dense)) if dense is not None else None
        if not path or leaf != "weight" or dense is None or sparse_type is None:
            raise ValueError(f"masks must name weights of nn.Conv2d and nn.Linear layers of the model, got {name!r}")
        if len(owners[id(dense.weight)]) > 1:
            raise ValueError(f"masks must name weights of one module each, got {name!r}, which several modules share")
        try:
            replaced[id(dense)] = sparse_type(dense, mask)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{name}: {error}") from error
    _replace(model, replaced)


def densify(model: nn.Module) -> None:
    """Undo :func:`sparsify` in place, with the weights as they are now: the state dict has the original model's names.

    The weights require a gradient. Biases and all other parameters stay the same objects.

    Raises:
        ValueError: a clipper is attached to the model, or a layer has hooks. The model is then as it was.
    """
    _replace(
        model,
        {id(m): m.dense() for m in model.modules() if isinstance(m, SparseConv2d | SparseLinear)},
    )


def _replace(model: nn.Module, replaced: dict[int, nn.Module]) -> None:
    """Put modules in the place of others, given by id, under every name that these have."""
    for parent, name, child in list(_children(model)):
        if id(child) in replaced:
            setattr(parent, name, replaced[id(child)])


def _children(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    for parent in model.modules():
        for name, child in parent._modules.items():
            if child is not None:
                yield parent, name, child
