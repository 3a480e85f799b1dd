"""One list of awkward cases, on dpkernels and on Opacus: which update is right, which is wrong, what is refused.

    python -m benchmarks.correctness [--out benchmarks/results/correctness.md]

Each case takes one step without noise at learning rate 1, through the documented door of each library, and compares the
move of the parameters with the clipped sum of a loop over single examples in float64. Its deviation is the largest
difference of a parameter's move, relative to that parameter's largest entry; below 1% it counts as right. "Refused"
means an error when the library is attached to the model, "raises" one in the step. Some cases cannot be trained
privately as they are, or only by luck: there any error is a refusal, and right. Opacus is a dependency of this file
alone; without it its columns stay empty.
"""

from __future__ import annotations

import argparse
import copy
import importlib.metadata
import math
import platform
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.data import DataLoader, TensorDataset

import dpkernels as dpk
from tests.clipping.oracle import deviation, one_example_loop
from tests.configurations import Bag, Doubled, Recurrent, Scaled, SelfAttention, called_twice, tied

ROWS, CLASSES = 6, 3
RIGHT = 0.01


class Product(nn.Module):
    """A loss with a given gradient with respect to the output, in the manner of torch's losses."""

    def __init__(self) -> None:
        super().__init__()
        self.reduction = "mean"

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        losses = (output * target).flatten(1).sum(1)
        return losses if self.reduction == "none" else losses.mean()


@dataclass(frozen=True)
class Case:
    """A model, a batch for it, and what must become of it."""

    name: str
    make: Callable[[], nn.Module]
    x: Callable[[], Tensor]
    y: Callable[[], Tensor] = lambda: torch.arange(ROWS) % CLASSES
    criterion: Callable[[], nn.Module] = nn.CrossEntropyLoss
    refuse: bool = False  # to refuse it is right
    defined: bool = True  # whether there is a right update
    drop: tuple[int, ...] = ()  # examples that must not contribute
    freeze: Callable[[nn.Module], object] = field(default=lambda model: None)  # after the engine has attached
    sizes: tuple[int, ...] = (ROWS,)  # physical batches
    autocast: bool = False


def net(layer: nn.Module, features: int, *before: nn.Module) -> nn.Sequential:
    """The layer with a head of ``CLASSES`` outputs."""
    return nn.Sequential(*before, layer, nn.Tanh(), nn.Flatten(), nn.Linear(features, CLASSES))


def numbers(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(ROWS, *shape)


def tokens(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randint(0, 7, (ROWS, *shape))


def not_a_number() -> Tensor:
    x = torch.randn(ROWS, 5)
    x[2, 1] = math.nan
    return x


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, CLASSES))


def partly_frozen(*names: str) -> nn.Sequential:
    model = mlp()
    for name, p in model.named_parameters():
        p.requires_grad_(name not in names)
    return model


class GroupNorm(nn.GroupNorm):
    """A subclass that adds nothing."""


class Merged(nn.Module):
    """Merges batch and positions, [batch * positions, channels], before a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.flatten(0, 1)).view(*x.shape[:2], CLASSES).mean(1)


class Bypassed(nn.Module):
    """Calls a layer, and uses its weight once more by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 5)
        self.head = nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x) + F.linear(x, self.inner.weight))


class TimeFirst(nn.Module):
    """Lays its input out as [time, batch, channels] before a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.transpose(0, 1)).mean(0)


def cancelling() -> Tensor:
    """Output gradients at three positions that nearly cancel."""
    g = torch.randn(1, 40).expand(ROWS, 40)
    return torch.stack([g, -0.5 * g, -0.5 * g * (1 + 1e-4)], 1)


def once(shape: tuple[int, ...]) -> Callable[[], Tensor]:
    """The same activation at every position."""
    return lambda: torch.randn(ROWS, 1, shape[-1]).expand(ROWS, *shape).clone()


CASES = [
    Case("Linear on 3-D input", lambda: net(nn.Linear(5, 4), 28), numbers(7, 5)),
    Case("Linear on 4-D input", lambda: net(nn.Linear(5, 4), 24), numbers(2, 3, 5)),
    Case("a Linear called twice", lambda: net(called_twice(nn.Linear(5, 5)), 5), numbers(5)),
    Case("tied weights", lambda: net(tied(), 5), numbers(5)),
    Case("grouped convolution", lambda: net(nn.Conv2d(4, 8, 3, groups=2), 72), numbers(4, 5, 5)),
    Case("depthwise convolution", lambda: net(nn.Conv2d(4, 8, 3, groups=4), 72), numbers(4, 5, 5)),
    Case(
        "rectangular convolution",
        lambda: net(nn.Conv2d(4, 6, (3, 1), (2, 1), (1, 0), (1, 2)), 108),
        numbers(4, 6, 6),
    ),
    Case('padding="same", even kernel', lambda: net(nn.Conv2d(4, 6, (4, 2), padding="same"), 150), numbers(4, 5, 5)),
    Case("circular padding", lambda: net(nn.Conv2d(3, 4, 3, 1, 1, padding_mode="circular"), 100), numbers(3, 5, 5)),
    Case("reflect padding", lambda: net(nn.Conv2d(3, 4, 3, 1, 1, padding_mode="reflect"), 100), numbers(3, 5, 5)),
    Case("3-D convolution", lambda: net(nn.Conv3d(2, 3, 2), 24), numbers(2, 3, 3, 3)),
    Case("transposed convolution", lambda: net(nn.ConvTranspose2d(4, 6, 3, 2, groups=2), 294), numbers(4, 3, 3)),
    Case("a convolution called twice", lambda: net(called_twice(nn.Conv2d(3, 3, 3, padding=1)), 75), numbers(3, 5, 5)),
    Case("subclass of GroupNorm", lambda: net(GroupNorm(2, 4), 36, nn.Conv2d(3, 4, 3)), numbers(3, 5, 5)),
    Case("subclass of Linear, own forward", lambda: net(Doubled(5, 4), 4), numbers(5)),
    Case("RMSNorm", lambda: net(nn.RMSNorm(5), 15), numbers(3, 5)),
    Case("a bare parameter", lambda: net(Scaled(), 5), numbers(5)),
    Case("weight_norm", lambda: net(parametrizations.weight_norm(nn.Linear(5, 4)), 4), numbers(5)),
    Case("Embedding, padding and repeats", lambda: net(nn.Embedding(7, 4, padding_idx=0), 36), tokens(9)),
    Case("EmbeddingBag on 2-D input", lambda: net(nn.EmbeddingBag(7, 4), 4), tokens(9)),
    Case("weighted EmbeddingBag, padding", lambda: net(Bag(), 4), tokens(9)),
    Case("LSTM", lambda: net(Recurrent(nn.LSTM), 12), numbers(3, 5)),
    Case("multi-head attention", lambda: net(SelfAttention(), 24), numbers(4, 6)),
    Case("first layer frozen", lambda: partly_frozen("0.weight", "0.bias"), numbers(5)),
    Case("biases alone", lambda: partly_frozen("0.weight", "2.weight"), numbers(5)),
    Case("weights alone", lambda: partly_frozen("0.bias", "2.bias"), numbers(5)),
    Case("frozen after attaching", mlp, numbers(5), freeze=lambda model: model[0].requires_grad_(False)),
    Case("empty batch", mlp, lambda: torch.empty(0, 5), lambda: torch.empty(0, dtype=torch.long), sizes=(0,)),
    Case("two physical batches", mlp, numbers(5), sizes=(4, 2)),
    Case(
        "class weights in the loss",
        mlp,
        numbers(5),
        criterion=lambda: nn.CrossEntropyLoss(torch.tensor([0.2, 1.0, 5.0])),
    ),
    Case("one NaN example", mlp, not_a_number, drop=(2,)),
    Case("bfloat16 autocast", mlp, numbers(5), autocast=True),
    Case("positions that cancel", lambda: nn.Linear(40, 40, bias=False), once((3, 40)), cancelling, Product),
    Case(
        "1e25 times 1e-25",
        lambda: nn.Linear(1, 1, bias=False),
        lambda: torch.full((ROWS, 1), 1e25),
        lambda: torch.full((ROWS, 1), 1e-25),
        Product,
    ),
    Case("batch merged with positions", Merged, numbers(4, 5)),
    Case("time first", TimeFirst, numbers(4, 5)),
    Case("a weight used beside its module", Bypassed, numbers(5)),
    Case("BatchNorm in training mode", lambda: net(nn.BatchNorm1d(5), 5), numbers(5), refuse=True, defined=False),
    Case(
        "Embedding with max_norm",
        lambda: net(nn.Embedding(7, 4, max_norm=1.0), 36),
        tokens(9),
        refuse=True,
        defined=False,
    ),
    Case(
        "scale_grad_by_freq",
        lambda: net(nn.Embedding(7, 4, scale_grad_by_freq=True), 36),
        tokens(9),
        refuse=True,
        defined=False,
    ),
    Case(
        "spectral_norm",
        lambda: net(parametrizations.spectral_norm(nn.Linear(5, 4)), 4),
        numbers(5),
        refuse=True,
        defined=False,
    ),
]

Step = Callable[[Tensor, Tensor, bool], None]  # one physical batch, and whether it ends the logical one


def precision(case: Case) -> AbstractContextManager[object]:
    return torch.autocast("cpu", dtype=torch.bfloat16) if case.autocast else nullcontext()


def with_dpkernels(case: Case, model: nn.Module, bound: float) -> Step:
    optimizer = dpk.DPSGD(model, lr=1.0, noise_multiplier=0.0, batch_size=ROWS, max_grad_norm=bound)
    criterion = case.criterion().to(next(model.parameters()).dtype)
    criterion.reduction = "none"

    def step(x: Tensor, y: Tensor, last: bool) -> None:
        optimizer.begin_physical_batch(len(x), last)  # as the loader does
        with precision(case):
            losses = criterion(model(x), y)
        optimizer.backward(losses.float())
        optimizer.step()

    return step


def with_opacus(mode: str) -> Callable[[Case, nn.Module, float], Step]:
    def attach(case: Case, model: nn.Module, bound: float) -> Step:
        from opacus import PrivacyEngine

        everyone = TensorDataset(torch.zeros(ROWS), torch.zeros(ROWS))  # tells it the expected batch size
        made = PrivacyEngine(accountant="rdp").make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
            criterion=case.criterion(),
            data_loader=DataLoader(everyone, batch_size=ROWS),
            noise_multiplier=0.0,
            max_grad_norm=bound,
            poisson_sampling=False,
            grad_sample_mode=mode,
        )
        private, optimizer = made[:2]
        criterion = made[2] if mode == "ghost" else case.criterion()

        def step(x: Tensor, y: Tensor, last: bool) -> None:
            optimizer.zero_grad()
            optimizer.signal_skip_step(do_skip=not last)
            with precision(case):
                loss = criterion(private(x), y)
            loss.backward()
            optimizer.step()

        return step

    return attach


ENGINES: dict[str, Callable[[Case, nn.Module, float], Step]] = {
    "dpkernels": with_dpkernels,
    "Opacus, hooks": with_opacus("hooks"),
    "Opacus, ghost": with_opacus("ghost"),
}


class Refused(Exception):
    """The engine did not attach to the model."""


def expectation(case: Case, model: nn.Module, x: Tensor, y: Tensor) -> tuple[dict[str, Tensor], float]:
    """The clipped sum of the one-example loop, and the bound that it was clipped at: the median norm."""
    model, criterion = copy.deepcopy(model), case.criterion().double()
    case.freeze(model)
    criterion.reduction = "none"

    def losses(m: nn.Module, xs: Tensor, ys: Tensor) -> Tensor:
        return criterion(m(xs), ys.double() if ys.is_floating_point() else ys)

    keep = [i for i in range(len(x)) if i not in case.drop]
    _, norms = one_example_loop(model, losses, x[keep], y[keep], 1.0)
    bound = float(norms.median()) if len(norms) else 1.0
    return one_example_loop(model, losses, x[keep], y[keep], bound)[0], bound


def step_deviation(case: Case, engine: str, dtype: torch.dtype = torch.float32) -> float:
    """How far the engine's step lies from the expected one: NaN where a parameter is not finite, infinite where there
    is no right step.

    Raises:
        Refused: the engine does not attach. Any other error is one of the step.
    """
    torch.manual_seed(0)
    model, x, y = case.make().to(dtype), case.x(), case.y()
    x, y = (t.to(dtype) if t.is_floating_point() else t for t in (x, y))
    expected, bound = expectation(case, model, x, y) if case.defined else ({}, 1.0)
    before = {name: p.detach().double().clone() for name, p in model.named_parameters()}
    try:
        step = ENGINES[engine](case, model, bound)
    except ImportError:
        raise
    except Exception as error:
        raise Refused(type(error).__name__) from error
    case.freeze(model)
    for i, (xs, ys) in enumerate(zip(x.split(case.sizes), y.split(case.sizes), strict=True), 1):
        step(xs, ys, i == len(case.sizes))
    if not case.defined:
        return math.inf
    moved = {n: (before[n] - p.detach().double()) * ROWS for n, p in model.named_parameters() if n in expected}
    if not all(m.isfinite().all() for m in moved.values()):
        return math.nan
    return deviation(moved, expected) if len(x) else max(float(m.abs().max()) for m in moved.values())


def outcome(case: Case, engine: str) -> str:
    """What the engine does with the case, in a few words."""
    try:
        off = step_deviation(case, engine)
    except ImportError:
        return "not installed"
    except Refused as refusal:
        return f"refused ({refusal})"
    except Exception as error:
        return f"{'refused' if case.refuse else 'raises'} ({type(error).__name__})"
    if off < (0.05 if case.autocast else RIGHT):
        return f"right ({off:.0e})"
    if math.isinf(off):
        return "**accepted**"
    return "**wrong**, NaN" if math.isnan(off) else f"**wrong**, {off:.1e}"


def table() -> str:
    """The outcomes as Markdown, with versions."""
    try:
        opacus = importlib.metadata.version("opacus")
    except importlib.metadata.PackageNotFoundError:
        opacus = "not installed"
    lines = [
        f"dpkernels {dpk.__version__}, Opacus {opacus}, torch {torch.__version__}, Python {platform.python_version()}",
        "",
        f"| case | {' | '.join(ENGINES)} |",
        f"| --- |{' --- |' * len(ENGINES)}",
    ]
    for case in CASES:
        name = f"{case.name} *" if case.refuse else case.name
        lines.append(f"| {name} | {' | '.join(outcome(case, engine) for engine in ENGINES)} |")
    lines += [
        "",
        f"\\* to refuse it is right. Right: within {RIGHT:.0%} of the one-example loop in float64 (5% under bfloat16",
        "autocast); the deviation is in brackets. Opacus offers replacements of its own for LSTM and attention.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Print the table, and write it where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a file to write the table to")
    out = parser.parse_args().out
    warnings.simplefilter("ignore")
    text = table()
    print(text, end="")
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text)


if __name__ == "__main__":
    main()
