"""What a model of the zoo is: a builder for two sizes, examples and losses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dpkernels.bench.engines import Losses

CLASSES = 10


@dataclass(frozen=True)
class Size:
    """The measures that a builder needs."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    positions: int  #: at least as many as there are in an example


FULL, SMALL = Size(3, 256, 4, 2000, 128), Size(2, 16, 2, 30, 16)
Build = Callable[[Size], nn.Module]


@dataclass(frozen=True)
class Examples:
    """Random examples of a model.

    Attributes:
        rows: of the benchmark's batch.
        shape: of an example in the benchmark.
        small: of one for the small size.
        coincident: numbers of examples that equal a number of positions in the small model, which must not matter.
        tokens: whether an example is a sequence of tokens, else of numbers.
        every: whether every token has a label, else every example.
    """

    rows: int
    shape: tuple[int, ...]
    small: tuple[int, ...]
    coincident: tuple[int, ...]
    tokens: bool = False
    every: bool = False

    def make(self, size: Size, rows: int) -> tuple[Tensor, Tensor]:
        """Examples [rows, ...] and labels [rows] or [rows, tokens]."""
        shape = (rows, *(self.small if size is SMALL else self.shape))
        x = torch.randint(5, size.vocabulary, shape) if self.tokens else torch.randn(shape)
        labels = torch.randint(5, size.vocabulary, shape) if self.every else torch.randint(0, CLASSES, (rows,))
        return x, labels


@dataclass(frozen=True)
class Model:
    """A class of models and how it is trained."""

    library: str
    what: str  #: the class, and what is unlike an ordinary training of it
    build: Build
    examples: Examples
    losses: Losses

    def make(self, size: Size = FULL, rows: int | None = None) -> tuple[nn.Module, Tensor, Tensor]:
        """The model in training mode with a batch; the same at every call."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = self.build(size).train()
            if size is SMALL:
                _stir(model)
            return model, *self.examples.make(size, self.examples.rows if rows is None else rows)


@torch.no_grad()
def _stir(model: nn.Module) -> None:
    """Move all weights from where they start: behind gates and scales of zero, any gradient would be right."""
    for p in model.parameters():
        p.add_(torch.randn_like(p), alpha=0.1)


def only(base: Build, trained: Callable[[str], bool]) -> Build:
    """Trains the parameters whose names are chosen."""

    def build(size: Size) -> nn.Module:
        model = base(size)
        for name, p in model.named_parameters():
            p.requires_grad_(trained(name))
        return model

    return build


# ---- losses ----------------------------------------------------------------------------------------------------------


def class_losses(model: Callable[..., Any], x: Tensor, y: Tensor) -> Tensor:
    """Cross entropy of every example."""
    output = model(x)
    return F.cross_entropy(getattr(output, "logits", output), y, reduction="none")


def token_losses(model: Callable[..., Any], x: Tensor, y: Tensor) -> Tensor:
    """Mean cross entropy of every sequence's tokens."""
    return _of_tokens(model(x).logits, y)


def translation_losses(model: Callable[..., Any], x: Tensor, y: Tensor) -> Tensor:
    """Of an encoder that reads x and a decoder that writes y."""
    return _of_tokens(model(input_ids=x, decoder_input_ids=y).logits, y)


def prompted_losses(model: Callable[..., Any], x: Tensor, y: Tensor) -> Tensor:
    """Of a model that puts a trained prompt before its input."""
    return _of_tokens(model(input_ids=x, attention_mask=torch.ones_like(x)).logits[:, -x.size(1) :], y)


def _of_tokens(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits.transpose(1, 2), y, reduction="none").mean(1)


# ---- examples --------------------------------------------------------------------------------------------------------


def sentences(rows: int = 16, tokens: int = 64) -> Examples:
    """Sequences of tokens, with a class each."""
    return Examples(rows, (tokens,), (5,), (5,), tokens=True)


def texts(rows: int = 8, tokens: int = 64) -> Examples:
    """Sequences of tokens, with a label for each."""
    return Examples(rows, (tokens,), (5,), (5,), tokens=True, every=True)


def images(rows: int = 16, side: int = 64, *, small: int = 16, coincident: tuple[int, ...] = (4,)) -> Examples:
    """Images, with a class each."""
    return Examples(rows, (3, side, side), (3, small, small), coincident)


VIT_TOKENS = (4, 5)  #: coincident with the patches of a small image, and with a class token beside them


def named(name: str, what: str = "") -> str:
    """The class, and what is unlike an ordinary training of it."""
    return f"{name}, {what}" if what else name
