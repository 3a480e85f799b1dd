"""The outputs of a model's layers during one forward: pre-activations, and the logits last."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils import parametrize


def weighted_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The linear and convolutional layers of ``model`` by name.

    A module with parameters of its own is a layer as a whole; what lies below it is part of it.
    """
    found: dict[str, nn.Module] = {}

    def look(module: nn.Module, path: str) -> None:
        if isinstance(module, (nn.Linear, _ConvNd)):
            if not any(module is other for other in found.values()):  # one module under two names
                found[path] = module
        elif not (parametrize.is_parametrized(module) or any(True for _ in module.parameters(recurse=False))):
            for name, child in module.named_children():
                look(child, f"{path}.{name}" if path else name)

    look(model, "")
    return found


@contextmanager
def recorded_outputs(model: nn.Module, layers: Mapping[str, nn.Module]) -> Iterator[list[tuple[str, Tensor]]]:
    """While it lasts, every call of one of the ``layers`` of ``model`` adds (name, output) to the list that it yields.

    The hooks that do it are gone afterwards, so that copies and pickles of the model hold none; the list is the
    caller's, and with it the graph that its tensors hang on. An activation module that works in place gets a copy.
    Raises TypeError where an output is no tensor, RuntimeError where it was overwritten all the same.
    """
    outputs: list[tuple[str, Tensor]] = []
    versions: list[int] = []
    in_place = any(getattr(module, "inplace", False) for module in model.modules())

    def recorder(name: str) -> Callable[..., Tensor | None]:
        def record(module: nn.Module, args: Any, output: Any) -> Tensor | None:
            if not isinstance(output, Tensor):
                raise TypeError(f"layer {name!r} must return a tensor, got {type(output).__name__}")
            outputs.append((name, output))
            versions.append(output._version)
            return output.clone() if in_place else None

        return record

    handles = [module.register_forward_hook(recorder(name)) for name, module in layers.items()]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()
    for (name, output), version in zip(outputs, versions, strict=True):
        if output._version != version:
            raise RuntimeError(
                f"the output of layer {name!r} was overwritten: call its activation without inplace=True"
            )
