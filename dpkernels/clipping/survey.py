"""Looks over a model when the engine attaches: which rule serves which module, and what cannot be trained privately."""

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from dpkernels.layers import REGISTRY, BufferGuard, Layer, OpaqueModule, Rule


class UnsupportedModelError(ValueError):
    """The model has parts that cannot be trained privately; the message lists each with its module path and the fix."""


def survey(model: nn.Module) -> list[Rule]:
    """A rule for every module that owns parameters or that must be watched.

    Raises:
        UnsupportedModelError: the model mixes examples, changes state in a training forward, or has nothing to train.
        TypeError: ``model`` is not an ``nn.Module``.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    problems = [f"  {path or '(the model)'}: {reason}" for path, reason in _refusals(model)]
    if problems:
        raise UnsupportedModelError("\n".join(["model cannot be trained privately as it is:", *problems]))
    if not any(p.requires_grad for p in model.parameters()):
        raise UnsupportedModelError("model has no trainable parameter: set requires_grad on what is to be trained")
    return list(_rules(model, "", set()))


def layer_type(module: nn.Module) -> type[Layer] | None:
    """The registered layer that serves ``module``; None if its forward, weights or parameters are not the layer's."""
    base = registered_base(module)
    if base is None or type(module).forward is not base.forward or "forward" in vars(module):
        return None
    own_parameters = {name for name, _ in module.named_parameters(recurse=False)}
    plain = not parametrize.is_parametrized(module) and own_parameters <= REGISTRY[base].parameters
    return REGISTRY[base] if plain and not list(module.children()) else None


def registered_base(module: nn.Module) -> type[nn.Module] | None:
    """The registered type that ``module`` is an instance of."""
    return next((base for base in type(module).__mro__ if base in REGISTRY), None)


def _rules(module: nn.Module, path: str, seen: set[int]) -> Iterator[Rule]:
    if id(module) in seen:  # one module under two names
        return
    seen.add(id(module))
    layer = layer_type(module)
    if layer is not None:
        yield layer(module, path)
    elif _own_parameters(module) or parametrize.is_parametrized(module):
        seen.update(id(below) for below in module.modules())
        yield OpaqueModule(module, path)
    else:
        if any(True for _ in module.buffers(recurse=False)):
            yield BufferGuard(module, path)
        for name, child in module.named_children():
            yield from _rules(child, f"{path}.{name}" if path else name, seen)


def _own_parameters(module: nn.Module) -> bool:
    """Whether the module's forward uses parameters that no other's does: its own, and those of lists and containers."""
    if any(True for _ in module.parameters(recurse=False)):
        return True
    containers = [child for child in module.children() if type(child).forward is nn.Module.forward]
    return any(True for child in containers for _ in child.parameters(recurse=False))


def _refusals(model: nn.Module) -> Iterator[tuple[str, str]]:
    for path, module in model.named_modules():
        reason = _refusal(module)
        if reason is not None:
            yield path, reason


def _refusal(module: nn.Module) -> str | None:
    if isinstance(module, torch.jit.ScriptModule):
        return "a TorchScript module cannot be captured. Attach to the Python module that it was made from"
    if any(isinstance(p, nn.parameter.UninitializedParameter) for p in module.parameters(recurse=False)):
        return "its parameters are not initialized. Run one forward pass before attaching"
    for name, parameter in module.named_parameters(recurse=False):
        if parameter.is_complex() and parameter.requires_grad:
            return (
                f"its parameter {name!r} is complex ({parameter.dtype}), whose gradients are not clipped. Hold it as a "
                "real parameter, torch.view_as_real(weight), and use torch.view_as_complex in the forward"
            )
    hooks = module._forward_pre_hooks.values()
    if isinstance(module, _SpectralNorm) or any(isinstance(hook, SpectralNorm) for hook in hooks):
        return "spectral normalization updates a buffer in every training forward. Remove it"
    if any(isinstance(hook, WeightNorm) for hook in hooks):
        return "weight_norm computes the weight in a hook. Use torch.nn.utils.parametrizations.weight_norm"
    if isinstance(module, (nn.RNNBase, nn.MultiheadAttention)) and not module.batch_first:
        return "its input is laid out [time, batch, features]. Construct it with batch_first=True"
    base = registered_base(module)  # of subclasses too: they inherit what makes the base mix examples
    return REGISTRY[base].refusal(module) if base is not None else None
