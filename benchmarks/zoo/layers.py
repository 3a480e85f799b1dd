"""Layers of torch.nn itself, in small models around them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.zoo.base import CLASSES, SMALL, Build, Examples, Model, Size, class_losses, sentences


class Reader(nn.Module):
    """Embedding, a recurrent layer, and a classifier of its last output."""

    def __init__(self, vocabulary: int, layer: nn.Module, features: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, layer.input_size)  # type: ignore[arg-type]
        self.layer, self.head = layer, nn.Linear(features, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.embedding(x))[0][:, -1])


class Stepped(nn.Module):
    """A recurrent cell, called token by token."""

    def __init__(self, vocabulary: int, width: int, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.cell, self.head = nn.GRUCell(width, hidden), nn.Linear(hidden, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros(len(x), self.cell.hidden_size, dtype=self.head.weight.dtype)
        for embedded in self.embedding(x).unbind(1):
            state = self.cell(embedded, state)
        return self.head(state)


class Encoder(nn.Module):
    """A stack of nn.TransformerEncoderLayer."""

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.input, self.head = nn.Linear(features, width), nn.Linear(width, CLASSES)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.input(x)).mean(1))


class EncoderDecoder(nn.Module):
    """nn.Transformer, which decodes the first half of what it encodes."""

    def __init__(self, features: int, width: int, layers: int) -> None:
        super().__init__()
        self.input, self.head = nn.Linear(features, width), nn.Linear(width, CLASSES)
        self.transformer = nn.Transformer(width, 4, layers, layers, 2 * width, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.input(x)
        return self.head(self.transformer(h, h[:, : x.size(1) // 2]).mean(1))


class Odd(nn.Module):
    """Layers that few models have."""

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        half = width // 2
        self.input, self.slope, self.product = (
            nn.Linear(features, width),
            nn.PReLU(width),
            nn.Bilinear(width, width, half),
        )
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(half, half))
        self.temperature, self.head = nn.Parameter(torch.ones(())), nn.Linear(half, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.slope(self.input(x).transpose(1, 2)).mean(2)
        return self.head(F.relu(self.normed(self.product(h, h)))) * self.temperature


def recurrent(layer: Callable[..., nn.Module], width: int, hidden: int, **settings: Any) -> Build:
    """A classifier of sequences with a recurrent layer."""

    def build(size: Size) -> nn.Module:
        inputs, outputs = (8, 6) if size is SMALL else (width, hidden)
        ways = 2 if settings.get("bidirectional") else 1
        made = layer(inputs, outputs, batch_first=True, **settings)
        return Reader(size.vocabulary, made, ways * outputs)

    return build


# ---- the models ------------------------------------------------------------------------------------------------------


def _series(rows: int, steps: int) -> Examples:
    return Examples(rows, (steps, 48), (6, 8), (6,))


def _nn(what: str, build: Build, examples: Examples) -> Model:
    return Model("torch.nn", what, build, examples, class_losses)


MODELS: dict[str, Model] = {
    "lstm": _nn("LSTM", recurrent(nn.LSTM, 64, 128), sentences(64, 32)),
    "lstm-bidirectional": _nn(
        "LSTM, bidirectional, two layers",
        recurrent(nn.LSTM, 64, 64, num_layers=2, bidirectional=True),
        sentences(32, 24),
    ),
    "gru": _nn("GRU", recurrent(nn.GRU, 64, 128), sentences(32, 24)),
    "gru-cell": _nn(
        "GRUCell, token by token",
        lambda size: Stepped(size.vocabulary, *((8, 6) if size is SMALL else (64, 128))),
        sentences(32, 24),
    ),
    "transformer-encoder": _nn(
        "TransformerEncoder", lambda size: Encoder(*((8, 16) if size is SMALL else (48, 192))), _series(32, 64)
    ),
    "transformer": _nn(
        "Transformer", lambda size: EncoderDecoder(*((8, 16, 1) if size is SMALL else (48, 128, 2))), _series(16, 32)
    ),
    "odd-layers": _nn(
        "PReLU, Bilinear, weight_norm, a scalar",
        lambda size: Odd(*((8, 16) if size is SMALL else (48, 64))),
        _series(16, 32),
    ),
}
