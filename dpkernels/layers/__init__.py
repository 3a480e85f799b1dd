"""Layer types: how each is captured, its per-example norms and its clipped sums. :data:`REGISTRY` lists them all."""

from torch import nn

from dpkernels.layers.base import OUTPUT_OF, Layer, Record, Rule
from dpkernels.layers.conv import ConvLayer, ConvTransposeLayer
from dpkernels.layers.embedding import EmbeddingBagLayer, EmbeddingLayer
from dpkernels.layers.linear import LinearLayer
from dpkernels.layers.norm import BatchNormLayer, GroupNormLayer, InstanceNormLayer, LayerNormLayer, RMSNormLayer
from dpkernels.layers.opaque import OpaqueModule
from dpkernels.layers.sparse import SparseConvLayer, SparseLinearLayer
from dpkernels.layers.state import BufferGuard

_LAYERS: tuple[type[Layer], ...] = (
    LinearLayer,
    ConvLayer,
    ConvTransposeLayer,
    GroupNormLayer,
    InstanceNormLayer,
    LayerNormLayer,
    RMSNormLayer,
    BatchNormLayer,
    EmbeddingLayer,
    EmbeddingBagLayer,
    SparseConvLayer,
    SparseLinearLayer,
)

#: The layer that serves each module type. A subclass that inherits its base's forward is served by the base's layer.
REGISTRY: dict[type[nn.Module], type[Layer]] = {
    module_type: layer for layer in _LAYERS for module_type in layer.module_types
}

__all__ = ["OUTPUT_OF", "REGISTRY", "BufferGuard", "Layer", "OpaqueModule", "Record", "Rule"]
