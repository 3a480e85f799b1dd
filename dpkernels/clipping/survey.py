"""Looks over a model when the engine attaches, for what its type already says cannot be trained privately.

What a type does not say, the first backward proves (`clipping/proof.py`).
"""

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm


class UnsupportedModelError(ValueError):
    """The model has parts that cannot be trained privately; the message lists each with its module path and the fix."""


def survey(model: nn.Module) -> None:
    """Refuse what cannot be trained privately.

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
    if isinstance(module, _BatchNorm):
        return _batch_norm(module)
    if isinstance(module, _InstanceNorm):
        return _instance_norm(module)
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return _table(module)
    return None


def _batch_norm(module: _BatchNorm) -> str | None:
    if not module.training and module.running_mean is not None:
        return None
    mode = "in training mode" if module.training else "without running statistics"
    return (
        f"batch norm {mode} normalizes each example with the others' values. Replace it with "
        "dpkernels.models.replace_batch_norm(model), or put it in eval mode with public running statistics"
    )


def _instance_norm(module: _InstanceNorm) -> str | None:
    trains = any(p.requires_grad for p in module.parameters())
    if module.running_mean is None or not (module.training or trains):
        return None
    return (
        "instance norm with running statistics keeps averages over private examples. Construct it with "
        "track_running_stats=False, or put it in eval mode and freeze its parameters"
    )


def _table(module: nn.Embedding | nn.EmbeddingBag) -> str | None:
    if module.max_norm is not None:
        return "max_norm changes the table in the forward, by the rows that private examples use. Set max_norm=None"
    if module.scale_grad_by_freq:
        return (
            "scale_grad_by_freq divides an example's gradient by counts over the whole batch. Set "
            "scale_grad_by_freq=False"
        )
    if module.sparse:
        return "sparse=True cannot hold a private gradient: noise reaches every row. Set sparse=False"
    if isinstance(module, nn.EmbeddingBag) and module.mode == "max":
        return "an embedding bag of mode 'max' is not supported. Use mode 'sum' or 'mean'"
    return None
