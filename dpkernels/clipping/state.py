"""State that a forward computes from private data and keeps: it has no noise, so it is refused.

Parameters, buffers and tensors in plain attributes of all modules are fingerprinted when the first module of a batch
is called and compared when the backward begins: by contents, because neither ``.data`` nor a new tensor under the same
name shows in a version counter. This is done at the first steps, then at growing intervals, and after every
step at which a buffer's version had changed.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from dpkernels.clipping import fingerprint


class StateWatch:
    """Watches one model from :meth:`arm` to the backward after it."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._modules = {id(module) for module in model.modules()}
        self._handle: RemovableHandle | None = None
        self._before: dict[tuple[str, str, str], tuple[Any, Tensor]] | None = None
        self._batches = 0
        self._versions: list[tuple[Tensor, int]] = []  # of buffers at the last backward
        self._arm()

    def compare(self) -> None:
        """A backward begins.

        Raises:
            RuntimeError: something changed since the forward began.
        """
        before, self._before = self._before, None
        if any(buffer._version != version for buffer, version in self._versions):
            self._batches = 0
        self._batches += 1
        following = self._batches + 1
        buffers = [buffer for buffer, _ in self._versions]
        if following & (following - 1) == 0 or following <= 3:
            self._arm()
            buffers = list(self._model.buffers())
        else:
            self._disarm()
        self._versions = [(buffer, buffer._version) for buffer in buffers]
        if before is None:
            return
        now = dict(self._state())
        changed = []
        for key, (form, print_) in before.items():
            form_now, print_now = now.get(key, (None, print_))
            if form_now != form or not torch.equal(print_now, print_):
                changed.append(key)
        if changed:
            self._batches = 0  # look again at the next batches
            self._arm()
            path, kind, name = changed[0]
            more = f" (and {len(changed) - 1} more)" if len(changed) > 1 else ""
            raise RuntimeError(
                f"{kind} {name!r} of module {path or '(the model)'!r}{more} changed between the start of the forward "
                "and the backward: state that a forward computes from private data has no noise and is not covered by "
                f"the privacy guarantee. {_FIXES[kind]}"
            )

    def discard(self) -> None:
        """Forget the forward at hand; its successor is watched instead."""
        self._before = None

    def close(self) -> None:
        """Watch no longer."""
        self._before = None
        self._disarm()

    def _arm(self) -> None:
        if self._handle is None:
            watch = weakref.ref(self)

            def entered(module: nn.Module, _: Any) -> None:
                alive = watch()
                if alive is not None:
                    alive._entered(module)

            self._handle = register_module_forward_pre_hook(entered)

    def _disarm(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def __del__(self) -> None:
        self._disarm()

    def _entered(self, module: nn.Module) -> None:
        if id(module) not in self._modules or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return
        if torch._C._current_graph_task_id() != -1:  # checkpointing recomputes
            return
        if self._before is None or module is self._model:  # a forward that nothing came of is no beginning
            self._before = dict(self._state())

    def _state(self) -> Iterator[tuple[tuple[str, str, str], tuple[Any, Tensor]]]:
        """(module path, kind, name) of every tensor, its shape and type, and its fingerprint."""
        seen: set[int] = set()
        for path, module in self._model.named_modules():
            own = vars(module)
            for kind, tensors in (
                ("parameter", own["_parameters"].items()),
                ("buffer", own["_buffers"].items()),
                ("tensor attribute", _attributes(own)),
            ):
                for name, tensor in tensors:
                    if tensor is None or id(tensor) in seen or not _has_bits(tensor):
                        continue
                    seen.add(id(tensor))
                    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
                        raise RuntimeError(
                            f"{kind} {name!r} of module {path or '(the model)'!r} was computed in a forward and kept. "
                            f"{_FIXES[kind]}"
                        )
                    about = (tuple(tensor.shape), tensor.dtype, tensor.device)
                    yield (path, kind, name), (about, fingerprint.of_whole(tensor))


def _attributes(own: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    for name, value in own.items():
        if isinstance(value, Tensor):
            yield name, value
        elif isinstance(value, (list, tuple)):
            yield from ((f"{name}[{i}]", t) for i, t in enumerate(value) if isinstance(t, Tensor))
        elif isinstance(value, dict) and not name.startswith("_"):
            yield from ((f"{name}[{key!r}]", t) for key, t in value.items() if isinstance(t, Tensor))


def _has_bits(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_meta and not tensor.is_quantized


_FIXES = {
    "parameter": (
        "Initialize parameters before training, from public data or at random, and let nothing but the optimizer "
        "write to them."
    ),
    "buffer": "Remove what writes to it in a forward, or compute it before training from public data.",
    "tensor attribute": "Keep what a forward computes in a local variable, or return it.",
}
