"""Layer types: how each is captured, its per-example norms and its clipped sums. :data:`REGISTRY` lists them all."""

from torch import nn

from dpkernels.layers.base import Layer, Record, Rule
from dpkernels.layers.linear import LinearLayer
from dpkernels.layers.opaque import OpaqueModule
from dpkernels.layers.state import BufferGuard

#: The layer that serves each module type. A subclass that inherits its base's forward is served by the base's layer.
REGISTRY: dict[type[nn.Module], type[Layer]] = {
    module_type: layer for layer in (LinearLayer,) for module_type in layer.module_types
}

__all__ = ["REGISTRY", "BufferGuard", "Layer", "OpaqueModule", "Record", "Rule"]
