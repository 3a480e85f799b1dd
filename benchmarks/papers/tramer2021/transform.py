"""Times the scattering transform beside kymatio's torch front end, in turns, and tells how far features lie apart.

python -m benchmarks.papers.tramer2021.transform [--seconds 20]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import torch
from kymatio.scattering2d.frontend.torch_frontend import ScatteringTorch2D  # kymatio.torch needs an older SciPy

from dpkernels.features import ScatterNet

SHAPES = {(3, 32, 32): 64, (1, 28, 28): 192}  # images at a time


def seconds_of(transform: torch.nn.Module | ScatteringTorch2D, images: torch.Tensor) -> float:
    start = time.perf_counter()
    transform(images)
    return time.perf_counter() - start


@torch.no_grad()
def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0, help="for each shape (default 20)")
    options = parser.parse_args(arguments)
    print(f"{torch.get_num_threads()} threads; images a second: best (median)")
    print("| images | kymatio | ours | times | largest difference |")
    print("| --- | --- | --- | --- | --- |")
    for shape, count in SHAPES.items():
        images = torch.rand(count, *shape)
        ours, kymatio = ScatterNet(shape), ScatteringTorch2D(J=2, shape=shape[1:], L=8)
        apart = (ours(images) - kymatio(images).reshape(count, *ours.feature_shape)).abs().max()
        times: list[tuple[float, float]] = []
        until = time.perf_counter() + options.seconds
        while len(times) < 3 or time.perf_counter() < until:
            times.append((seconds_of(kymatio, images), seconds_of(ours, images)))
        theirs, mine = (sorted(column) for column in zip(*times, strict=True))
        rates = [f"{count / column[0]:,.0f} ({count / column[len(column) // 2]:,.0f})" for column in (theirs, mine)]
        size = "x".join(map(str, shape))
        print(f"| {size} | {rates[0]} | {rates[1]} | {theirs[0] / mine[0]:.1f} | {apart:.1e} |")


if __name__ == "__main__":
    main()
