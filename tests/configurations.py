"""One configuration after another of every layer type: what tests and benchmarks run through."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from dpkernels.layers.sparse import SparseConv2d, SparseLinear

CLASSES = 3


class Configuration(NamedTuple):
    """A layer, and the shape of one example: numbers, or indices below ``rows`` where that is given."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    rows: int = 0

    def sample(self, batch: int) -> Tensor:
        """A batch of examples."""
        if self.rows:
            return torch.randint(0, self.rows, (batch, *self.shape))
        return torch.randn(batch, *self.shape)


class Framed(nn.Module):
    """The layer, with random parameters, between two linear layers: its input's gradient matters, and so do others."""

    def __init__(self, configuration: Configuration) -> None:
        super().__init__()
        self.layer = configuration.make()
        self.shape = configuration.shape
        with torch.no_grad():
            output = self.layer(configuration.sample(1))
            for p in self.layer.parameters() if "Norm" in type(self.layer).__name__ else ():
                p.normal_()  # torch starts them at 0 and 1
        self.before = nn.Identity() if configuration.rows else nn.Linear(self.shape[-1], self.shape[-1])
        self.head = nn.Linear(output.numel(), CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.layer(self.before(x))).flatten(1))


def frozen_batch_norm(kind: type[nn.Module]) -> nn.Module:
    """A batch norm in eval mode with statistics other than 0 and 1."""
    norm = kind(4).eval()
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 2)
    return norm


class Several(nn.Module):
    """A chain of modules, some of which may be one and the same."""

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__()
        self.chain = nn.ModuleList(modules)

    def forward(self, x: Tensor) -> Tensor:
        for module in self.chain:
            x = torch.tanh(module(x))
        return x


def called_twice(module: nn.Module) -> nn.Module:
    """Uses the module on its own output."""
    return Several(module, module)


def tied() -> nn.Module:
    """Two linear layers of one weight."""
    first, second = nn.Linear(5, 5), nn.Linear(5, 5, bias=False)
    second.weight = first.weight
    return Several(first, second)


def selected(dense: nn.Conv2d | nn.Linear, share: float = 0.3) -> nn.Module:
    """The layer with a random share of its weights, and none of its first output's, trained."""
    mask = torch.rand(dense.weight.shape) < share
    mask[0] &= share == 1
    return (SparseConv2d if isinstance(dense, nn.Conv2d) else SparseLinear)(dense, mask)


class Bag(nn.Module):
    """A bag whose weights come from a table of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.weigh = nn.EmbeddingBag(7, 4, mode="sum", padding_idx=0), nn.Embedding(7, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.bag(x, per_sample_weights=self.weigh(x).squeeze(-1))


class Scaled(nn.Module):
    """A bare parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class Doubled(nn.Linear):
    """A subclass with a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Recurrent(nn.Module):
    """The outputs of a recurrent layer, without its hidden state."""

    def __init__(self, kind: type[nn.RNNBase], features: int = 5) -> None:
        super().__init__()
        self.recurrent = kind(features, 4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.recurrent(x)[0]


class SelfAttention(nn.Module):
    """Every position attends to those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        causal = torch.triu(torch.full((x.size(1), x.size(1)), -1e4, dtype=x.dtype), 1)
        return self.attention(x, x, x, attn_mask=causal, need_weights=False)[0]


class Convolutional(nn.Module):
    """Convolutions and group norms, down to classes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, 2)
        self.norm, self.head = nn.GroupNorm(2, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.first(x)))
        return self.head(torch.tanh(self.second(x)).mean((2, 3)))


class Classifier(nn.Module):
    """A recurrent layer over tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.recurrent, self.head = nn.Embedding(11, 6), Recurrent(nn.LSTM, 6), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.recurrent(self.tokens(x))[:, -1])


class MultiHead(nn.Module):
    """torch's own attention, a residual, a layer norm."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x + self.attention(x, x, x, need_weights=False)[0]).mean(1))


class Transformer(nn.Module):
    """Tokens and positions, scaled dot products of linear layers, and a feed-forward block."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(11, 8), nn.Embedding(5, 8)
        self.qkv, self.out, self.norm = nn.Linear(8, 24), nn.Linear(8, 8), nn.LayerNorm(8)
        self.up, self.down, self.head = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.tokens(x) + self.positions(torch.arange(5, device=x.device).expand(x.size(0), 5))
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, 4)).movedim(2, 0).transpose(2, 3)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        x = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return self.head(x.mean(1))


LINEAR = {
    "flat": Configuration(lambda: nn.Linear(5, 7), (5,)),
    "without bias": Configuration(lambda: nn.Linear(5, 7, bias=False), (5,)),
    "few outputs of many inputs": Configuration(lambda: nn.Linear(1030, 3), (1030,)),
    "on 3-D": Configuration(lambda: nn.Linear(5, 7), (4, 5)),
    "on 4-D": Configuration(lambda: nn.Linear(5, 7), (2, 3, 5)),
    "few positions": Configuration(lambda: nn.Linear(40, 30), (3, 40)),
    "many positions": Configuration(lambda: nn.Linear(5, 3), (150, 5)),
    "called twice": Configuration(lambda: called_twice(nn.Linear(5, 5)), (4, 5)),
    "tied weights": Configuration(tied, (5,)),
}

CONV = {
    "1-D": Configuration(lambda: nn.Conv1d(4, 6, 3, padding=1), (4, 11)),
    "1-D wide": Configuration(lambda: nn.Conv1d(24, 40, 3), (24, 6)),
    "2-D": Configuration(lambda: nn.Conv2d(4, 6, 3), (4, 7, 6)),
    "2-D wide": Configuration(lambda: nn.Conv2d(24, 40, 3, padding=1), (24, 3, 4)),
    "2-D strided": Configuration(lambda: nn.Conv2d(4, 6, 4, 2, 1), (4, 9, 8)),
    "2-D without bias": Configuration(lambda: nn.Conv2d(4, 6, 3, bias=False), (4, 5, 5)),
    "2-D rectangular": Configuration(lambda: nn.Conv2d(4, 6, (3, 1), (2, 1), (1, 0), (1, 2)), (4, 7, 6)),
    "3-D": Configuration(lambda: nn.Conv3d(4, 3, (2, 3, 1), (1, 2, 1), (1, 0, 1)), (4, 3, 5, 4)),
    "two groups": Configuration(lambda: nn.Conv2d(4, 8, 3, groups=2), (4, 5, 6)),
    "depthwise": Configuration(lambda: nn.Conv2d(4, 8, 3, groups=4), (4, 5, 6)),
    "same": Configuration(lambda: nn.Conv2d(4, 6, (3, 5), padding="same", dilation=(2, 1)), (4, 6, 7)),
    "same, even kernel": Configuration(lambda: nn.Conv2d(4, 6, (4, 3), padding="same"), (4, 6, 7)),
    "same, even kernel, circular": Configuration(
        lambda: nn.Conv1d(4, 6, 4, padding="same", padding_mode="circular"), (4, 9)
    ),
    "valid": Configuration(lambda: nn.Conv2d(4, 6, 2, padding="valid"), (4, 4, 4)),
    "reflect": Configuration(lambda: nn.Conv2d(4, 6, 3, padding=(2, 1), padding_mode="reflect"), (4, 5, 6)),
    "replicate": Configuration(lambda: nn.Conv3d(4, 2, 3, padding=1, padding_mode="replicate"), (4, 3, 2, 3)),
    "circular": Configuration(lambda: nn.Conv1d(4, 6, 3, 2, padding=2, padding_mode="circular"), (4, 9)),
    "called twice": Configuration(lambda: called_twice(nn.Conv2d(3, 3, 3, padding=1)), (3, 5, 4)),
    "transposed, called twice": Configuration(lambda: called_twice(nn.ConvTranspose2d(3, 3, 2)), (3, 5, 4)),
    "transposed 1-D": Configuration(lambda: nn.ConvTranspose1d(4, 6, 3, 2, output_padding=1), (4, 5)),
    "transposed 2-D": Configuration(
        lambda: nn.ConvTranspose2d(4, 6, (3, 2), (2, 3), (1, 0), (1, 2), groups=2), (4, 4, 3)
    ),
    "transposed 2-D, dilated": Configuration(lambda: nn.ConvTranspose2d(4, 3, 2, 1, 0, 1, dilation=2), (4, 4, 3)),
    "transposed 2-D, wide": Configuration(lambda: nn.ConvTranspose2d(40, 24, 3, padding=1), (40, 3, 4)),
    "transposed 3-D": Configuration(lambda: nn.ConvTranspose3d(4, 2, 2, 2, bias=False), (4, 2, 3, 2)),
}

NORM = {
    "group": Configuration(lambda: nn.GroupNorm(2, 4), (4, 3, 5)),
    "group 1-D": Configuration(lambda: nn.GroupNorm(2, 4), (4, 7)),
    "group flat": Configuration(lambda: nn.GroupNorm(1, 4), (4,)),
    "group 3-D": Configuration(lambda: nn.GroupNorm(4, 4), (4, 2, 3, 2)),
    "instance 1-D": Configuration(lambda: nn.InstanceNorm1d(4, affine=True), (4, 7)),
    "instance 2-D": Configuration(lambda: nn.InstanceNorm2d(4, affine=True), (4, 3, 5)),
    "instance 3-D": Configuration(lambda: nn.InstanceNorm3d(4, affine=True), (4, 2, 3, 2)),
    "layer": Configuration(lambda: nn.LayerNorm(5), (3, 5)),
    "layer flat": Configuration(lambda: nn.LayerNorm(5), (5,)),
    "layer deep": Configuration(lambda: nn.LayerNorm(5), (2, 3, 2, 5)),
    "layer over two": Configuration(lambda: nn.LayerNorm((3, 5)), (2, 3, 5)),
    "layer without bias": Configuration(lambda: nn.LayerNorm(5, bias=False), (3, 5)),
    "rms": Configuration(lambda: nn.RMSNorm(5), (3, 5)),
    "rms over two": Configuration(lambda: nn.RMSNorm((3, 5), eps=1e-3), (3, 5)),
    "batch 1-D flat": Configuration(lambda: frozen_batch_norm(nn.BatchNorm1d), (4,)),
    "batch 1-D": Configuration(lambda: frozen_batch_norm(nn.BatchNorm1d), (4, 7)),
    "batch 2-D": Configuration(lambda: frozen_batch_norm(nn.BatchNorm2d), (4, 3, 5)),
    "batch 3-D": Configuration(lambda: frozen_batch_norm(nn.BatchNorm3d), (4, 2, 3, 2)),
}

EMBEDDING = {
    "tokens": Configuration(lambda: nn.Embedding(7, 4), (9,), 7),
    "tokens with padding": Configuration(lambda: nn.Embedding(7, 4, padding_idx=0), (3, 4), 7),
    "bag of sums": Configuration(lambda: nn.EmbeddingBag(7, 4, mode="sum"), (9,), 7),
    "bag of means with padding": Configuration(lambda: nn.EmbeddingBag(7, 4, mode="mean", padding_idx=0), (9,), 7),
    "weighted bag": Configuration(Bag, (9,), 7),
}

SPARSE = {
    "2-D": Configuration(lambda: selected(nn.Conv2d(4, 6, 3)), (4, 7, 6)),
    "2-D wide": Configuration(lambda: selected(nn.Conv2d(24, 40, 3, padding=1), 0.05), (24, 3, 4)),
    "2-D strided, two groups": Configuration(
        lambda: selected(nn.Conv2d(4, 6, (4, 1), (2, 3), (1, 0), (1, 2), groups=2)), (4, 9, 8)
    ),
    "2-D without bias": Configuration(lambda: selected(nn.Conv2d(4, 6, 3, bias=False)), (4, 5, 5)),
    "same, even kernel": Configuration(lambda: selected(nn.Conv2d(4, 6, (4, 3), padding="same")), (4, 6, 7)),
    "reflect": Configuration(lambda: selected(nn.Conv2d(4, 6, 3, padding=(2, 1), padding_mode="reflect")), (4, 5, 6)),
    "2-D, everything selected": Configuration(lambda: selected(nn.Conv2d(4, 6, 3, padding=1), 1), (4, 12, 13)),
    "2-D, nothing selected": Configuration(lambda: selected(nn.Conv2d(4, 6, 3), 0), (4, 7, 6)),
    "2-D, called twice": Configuration(lambda: called_twice(selected(nn.Conv2d(3, 3, 3, padding=1))), (3, 5, 4)),
    "linear": Configuration(lambda: selected(nn.Linear(5, 7)), (5,)),
    "linear on 4-D": Configuration(lambda: selected(nn.Linear(5, 7)), (2, 3, 5)),
    "linear, many positions": Configuration(lambda: selected(nn.Linear(5, 3)), (150, 5)),
}

OPAQUE = {
    "bare parameter": Configuration(Scaled, (5,)),
    "own forward": Configuration(lambda: Doubled(5, 4), (3, 5)),
    "weight_norm": Configuration(lambda: parametrizations.weight_norm(nn.Linear(5, 4)), (5,)),
    "LSTM": Configuration(lambda: Recurrent(nn.LSTM), (3, 5)),
    "GRU": Configuration(lambda: Recurrent(nn.GRU), (3, 5)),
    "attention": Configuration(SelfAttention, (4, 6)),
}

LAYERS: dict[str, Configuration] = {
    f"{kind}: {name}": configuration
    for kind, group in {
        "linear": LINEAR,
        "conv": CONV,
        "norm": NORM,
        "embedding": EMBEDDING,
        "sparse": SPARSE,
        "other": OPAQUE,
    }.items()
    for name, configuration in group.items()
}

NETWORKS: dict[str, Configuration] = {
    "network: convolutions": Configuration(Convolutional, (3, 7, 6)),
    "network: LSTM over tokens": Configuration(Classifier, (4,), 11),
    "network: multi-head attention": Configuration(MultiHead, (5, 8)),
    "network: transformer": Configuration(Transformer, (5,), 11),
}
