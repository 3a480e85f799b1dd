"""Modules that keep state: a forward that changes a buffer is refused, since what it keeps has no noise."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dpkernels.layers.base import Emit, Record, Rule


@contextmanager
def unchanged_buffers(module: nn.Module, path: str) -> Iterator[None]:
    """Raise RuntimeError if a buffer of ``module`` or below is written to or replaced within the context."""
    before = {name: (buffer, buffer._version) for name, buffer in module.named_buffers()}
    yield
    after = dict(module.named_buffers())
    for name, (buffer, version) in before.items():
        if after.get(name) is not buffer or buffer._version != version:
            raise RuntimeError(
                f"the forward of module {path!r} changed its buffer {name!r}: state computed from private data is not "
                "covered by the privacy guarantee. Remove the module, or what writes to the buffer; many modules leave "
                "their buffers alone in eval mode."
            )


class BufferGuard(Rule):
    """A module without parameters of its own, whose buffers must stay as they are."""

    def active(self) -> bool:
        return True

    def call(self, emit: Emit, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with unchanged_buffers(self.module, self.path):
            return forward(*args, **kwargs)

    def squared_norms(self, record: Record, slots: frozenset[str]) -> Tensor:
        return torch.zeros(record.output_grad.size(0), dtype=torch.float64)

    def clipped_sums(self, record: Record, weights: Tensor, slots: frozenset[str]) -> dict[str, Tensor]:
        return {}
