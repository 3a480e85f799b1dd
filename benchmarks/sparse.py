"""What the gradients of selected weights cost beside those of all weights.

    python -m benchmarks.sparse [--batch 64] [--rounds 7] [--shares 0.01 0.1]

A row is a 3x3 convolution of a ResNet-18 on 32x32 images. *Dense* is the engine's way to the norms and the clipped sum
of all weights, chosen by its cost model; a share has its selected weights at random, and counts gradients, norms and
clipped sum. The last row is forward, backward and clipping of the whole network, normalization and classifier trained
throughout. Times are of one thread's processor, the best of a few rounds in which all take turns.
"""

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.models import sparse_resnet18
from dpkernels import GhostClipper, models
from dpkernels.bench import machine
from dpkernels.ops.clip import row_squared_norms, weighted_row_sum
from dpkernels.ops.conv import conv_clipped_sums, conv_squared_norms
from dpkernels.ops.sparse import sparse_gradients

SHAPES = [(64, 32), (128, 16), (256, 8), (512, 4)]  # channels, side of the map
SETTINGS = {"kernel_size": (3, 3), "stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "groups": 1}


def dense(x: Tensor, g: Tensor, weights: Tensor) -> None:
    """Norms and clipped sum of all weights."""
    _, stored, _ = conv_squared_norms(x, g, bias=False, store=None, **SETTINGS)
    if stored is None:
        conv_clipped_sums(x, g, weights, bias=False, **SETTINGS)
    else:
        weighted_row_sum(stored.movedim(1, -1).flatten(1), weights)


def selected(x: Tensor, g: Tensor, weights: Tensor, entries: Tensor) -> None:
    """Norms and clipped sum of the selected weights."""
    gradients = sparse_gradients(x, g, entries, **SETTINGS)
    row_squared_norms(gradients)
    weighted_row_sum(gradients, weights)


def network(model: nn.Module, x: Tensor, y: Tensor) -> Callable[[], None]:
    """Forward, backward and clipping of a model."""

    def call() -> None:
        with GhostClipper(model, 1.0) as clipper:
            clipper.backward(F.cross_entropy(model(x), y, reduction="none"))

    return call


def ordinary(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """Forward and backward of a model, without clipping."""
    F.cross_entropy(model(x), y).backward()
    model.zero_grad()


def best(calls: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Milliseconds of each."""
    times = dict.fromkeys(calls, float("inf"))
    for call in calls.values():
        call()
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.thread_time()
            call()
            times[name] = min(times[name], 1e3 * (time.thread_time() - start))
    return times


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.01, 0.1])
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(", ".join(f"{key} {value}" for key, value in machine().items()))
    print(
        f"\n| layer, batch {options.batch} | dense, ms |"
        + "".join(f" {s:.0%}, ms | of dense |" for s in options.shares)
    )
    print("| --- | ---: |" + " ---: | ---: |" * len(options.shares))
    weights = torch.rand(options.batch, dtype=torch.float64)
    for channels, side in SHAPES:
        x, g = (torch.randn(options.batch, channels, side, side) for _ in range(2))
        calls: dict[str, Callable[[], None]] = {"dense": lambda x=x, g=g: dense(x, g, weights)}
        for share in options.shares:
            entries = (torch.rand(channels * channels * 9) < share).nonzero().squeeze(1)
            calls[f"{share}"] = lambda x=x, g=g, entries=entries: selected(x, g, weights, entries)
        row(f"{channels} -> {channels}, {side}x{side}", best(calls, options.rounds), options.shares)
    x, y = torch.randn(options.batch, 3, 32, 32), torch.randint(0, 10, (options.batch,))
    plain = models.resnet18(10, stem="cifar")
    calls = {"ordinary": lambda: ordinary(plain, x, y), "dense": network(models.resnet18(10, stem="cifar"), x, y)}
    calls |= {f"{share}": network(sparse_resnet18(share), x, y) for share in options.shares}
    times = best(calls, max(1, options.rounds // 3))
    row("the whole network", times, options.shares)
    print(f"\nAn ordinary forward and backward of the whole network: {times['ordinary']:.0f} ms.")


def row(name: str, times: dict[str, float], shares: list[float]) -> None:
    """Print a row of the table."""
    cells = "".join(f" {times[f'{s}']:.1f} | {times[f'{s}'] / times['dense']:.3f} |" for s in shares)
    print(f"| {name} | {times['dense']:.1f} |{cells}", flush=True)


if __name__ == "__main__":
    main()
