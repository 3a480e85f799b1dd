"""Memory that was freed comes back without the kernel, in a process of its own; a run lays maps as pooling likes."""

from __future__ import annotations

import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from dpkernels.models import create
from dpkernels.training import RunResult, TrainConfig, load_trained
from dpkernels.training.memory import placed

COUNT = """
import resource, torch
from dpkernels.training.memory import keep_freed_memory

assert keep_freed_memory()

def faults(): return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

sizes = (5, 40, 17, 64, 33)  # MiB
def step(): [torch.zeros(size << 18).add_(1) for size in sizes]

step()
before = faults()
for _ in range(4): step()
print((faults() - before) * resource.getpagesize() / 4 / sum(size << 20 for size in sizes))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is told to keep it")
def test_freed_memory_is_given_out_again() -> None:
    done = subprocess.run([sys.executable, "-c", COUNT], capture_output=True, text=True, check=True)
    fresh_share = float(done.stdout)  # of a step's bytes, on pages that the kernel had to provide anew: 0.9 by default
    assert fresh_share < 0.1


@pytest.mark.parametrize(
    ("model", "shape", "expected"),
    [
        ("mnist_cnn", (1, 28, 28), torch.channels_last),
        ("resnet20", (3, 32, 32), torch.contiguous_format),  # pools nothing
        ("linear", (12,), torch.contiguous_format),
    ],
)
def test_images_lie_as_the_model_pools(model: str, shape: tuple[int, ...], expected: torch.memory_format) -> None:
    images = torch.randn(2, *shape)
    lying = placed(images, create(model, shape, 10), "cpu")
    assert torch.equal(lying, images)
    assert lying.stride() == images.contiguous(memory_format=expected).clone(memory_format=expected).stride()


def test_a_run_and_its_model_pool_maps_whose_channels_lie_last(
    run: Callable[..., RunResult],
    small: Callable[..., TrainConfig],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pooled: set[tuple[bool, bool]] = set()  # in training, channels last
    pool = nn.MaxPool2d.forward

    def forward(self: nn.MaxPool2d, maps: Tensor) -> Tensor:
        if len(maps) > 1:  # one is the model's, which learns its sizes so
            pooled.add((self.training, maps.stride(1) == 1))
        return pool(self, maps)

    monkeypatch.setattr(nn.MaxPool2d, "forward", forward)
    run(small(model="simple_vgg_4x1_8", epochs=1.0), tmp_path / "run")
    assert pooled == {(True, True), (False, True)}
    pooled.clear()
    load_trained(tmp_path / "run")(torch.rand(2, 1, 8, 8))
    assert pooled == {(False, True)}
