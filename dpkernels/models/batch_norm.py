"""Turns a model with batch normalization into one that can be trained privately."""

from __future__ import annotations

import copy

from torch import nn

from dpkernels.models._shapes import check_count

_REPLACED = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def replace_batch_norm(model: nn.Module, *, max_groups: int = 32) -> nn.Module:
    """A copy of `model` in which a group normalization stands for every batch normalization; `model` is left alone.

    Batch normalization mixes the examples of a batch, so no gradient belongs to one example and none can be clipped;
    group normalization (Wu & He 2018) sees one example. It has the largest number of groups that divides the channels,
    is at most `max_groups` and leaves at least two channels in a group (a group of one number would always come out as
    zero). Weight, bias, eps, dtype, device, training mode and requires_grad are taken over; the running statistics are
    dropped, so a pre-trained model needs some more training. A module that stands in several places stays one module.

    Raises TypeError for a subclass of a batch normalization, whose forward may do more (named by its module path), and
    ValueError for a lazy one that has not seen its input.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    check_count("max_groups", max_groups)
    for path, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            _check_replaceable(path or "model", module)

    copied = copy.deepcopy(model)
    replacements: dict[nn.Module, nn.GroupNorm] = {
        module: _group_norm(module, max_groups)
        for module in copied.modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm)
    }
    if copied in replacements:
        return replacements[copied]
    for parent in list(copied.modules()):
        for name, child in parent._modules.items():
            if child in replacements:
                parent._modules[name] = replacements[child]
    return copied


def _check_replaceable(path: str, module: nn.Module) -> None:
    if isinstance(module, nn.modules.lazy.LazyModuleMixin):
        raise ValueError(
            f"model: {path} is a lazy batch normalization; run one forward first, so that its size is known"
        )
    if type(module) not in _REPLACED:
        raise TypeError(
            f"model: {path} is a {type(module).__name__}, a subclass of a batch normalization whose forward may do "
            "more; replace it by hand"
        )


def _group_norm(batch_norm: nn.modules.batchnorm._BatchNorm, max_groups: int) -> nn.GroupNorm:
    channels = batch_norm.num_features
    groups = next(g for g in range(max(1, min(max_groups, channels // 2)), 0, -1) if channels % g == 0)
    norm = nn.GroupNorm(groups, channels, eps=batch_norm.eps, affine=batch_norm.affine)
    if batch_norm.affine:
        norm.weight = batch_norm.weight
        norm.bias = batch_norm.bias
    return norm.train(batch_norm.training)
