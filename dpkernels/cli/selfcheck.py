"""The checks of `dpkernels doctor`: small, and each against a value that comes from elsewhere."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from dpkernels import _native, accounting
from dpkernels.clipping import check as compare_with_loop
from dpkernels.optim import DPSGD
from dpkernels.random import Domain, Key
from dpkernels.transfer import SparseConv2d, SparseLinear, sparsify


@dataclass(frozen=True)
class Check:
    """One line of the report."""

    name: str
    ok: bool
    detail: str


def self_checks() -> Iterator[Check]:
    """All checks, one after the other; an exception fails its check."""
    for module_type in SAMPLES:
        yield _run(f"clipping, {module_type.__name__}", partial(_layer, module_type))
    for name, function in _CHECKS.items():
        yield _run(name, function)


def _run(name: str, function: Callable[[], tuple[bool, str]]) -> Check:
    try:
        ok, detail = function()
    except Exception as error:  # whatever goes wrong is the finding
        return Check(name, False, f"{type(error).__name__}: {' '.join(str(error).split())}")
    return Check(name, ok, detail)


# ---- clipping: the layers of torch.nn against the loop over single examples, on all that runs kernels here

_BATCH = 5


def _images(channels: int, *sizes: int) -> Tensor:
    return torch.randn(_BATCH, channels, *sizes)


def _tokens() -> Tensor:
    return torch.randint(0, 7, (_BATCH, 6))


def _selected(module: nn.Module) -> nn.Module:
    """The module with about a third of its weights as its only ones."""
    model = nn.Sequential(module)
    sparsify(model, {"0.weight": torch.rand_like(module.get_parameter("weight")) < 0.3})
    return model[0]


#: For each module type, a module and its input.
SAMPLES: dict[type[nn.Module], Callable[[], tuple[nn.Module, Tensor]]] = {
    nn.Linear: lambda: (nn.Linear(7, 4), torch.randn(_BATCH, 3, 7)),
    nn.Conv1d: lambda: (nn.Conv1d(4, 6, 3, padding=1, groups=2), _images(4, 11)),
    nn.Conv2d: lambda: (nn.Conv2d(4, 6, 3, stride=2, padding=1), _images(4, 9, 8)),
    nn.Conv3d: lambda: (nn.Conv3d(2, 3, 2, dilation=2), _images(2, 5, 4, 6)),
    nn.ConvTranspose1d: lambda: (nn.ConvTranspose1d(4, 6, 3, stride=2), _images(4, 7)),
    nn.ConvTranspose2d: lambda: (nn.ConvTranspose2d(4, 6, 3, padding=1, groups=2), _images(4, 6, 5)),
    nn.ConvTranspose3d: lambda: (nn.ConvTranspose3d(2, 3, 2), _images(2, 3, 4, 3)),
    nn.GroupNorm: lambda: (nn.GroupNorm(2, 6), _images(6, 5, 4)),
    nn.LayerNorm: lambda: (nn.LayerNorm((5, 4)), torch.randn(_BATCH, 3, 5, 4)),
    nn.InstanceNorm1d: lambda: (nn.InstanceNorm1d(4, affine=True), _images(4, 9)),
    nn.InstanceNorm2d: lambda: (nn.InstanceNorm2d(4, affine=True), _images(4, 5, 6)),
    nn.InstanceNorm3d: lambda: (nn.InstanceNorm3d(4, affine=True), _images(4, 3, 4, 3)),
    nn.RMSNorm: lambda: (nn.RMSNorm(8), torch.randn(_BATCH, 3, 8)),
    nn.BatchNorm1d: lambda: (nn.BatchNorm1d(4).eval(), _images(4, 9)),
    nn.BatchNorm2d: lambda: (nn.BatchNorm2d(4).eval(), _images(4, 5, 6)),
    nn.BatchNorm3d: lambda: (nn.BatchNorm3d(4).eval(), _images(4, 3, 4, 3)),
    nn.Embedding: lambda: (nn.Embedding(7, 4, padding_idx=0), _tokens()),
    nn.EmbeddingBag: lambda: (nn.EmbeddingBag(7, 4, mode="mean"), _tokens()),
    SparseConv2d: lambda: (_selected(nn.Conv2d(4, 6, 3, stride=2, padding=1)), _images(4, 9, 8)),
    SparseLinear: lambda: (_selected(nn.Linear(7, 4)), torch.randn(_BATCH, 3, 7)),
}


class _Probe(nn.Module):
    """The module under test, and a readout that makes one loss an example of what it returns."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.module(x)).flatten(1)


def _layer(module_type: type[nn.Module]) -> tuple[bool, str]:
    worst, before = 0.0, _native.active_isa()
    places = _native.isas() + (["cuda"] if _native.has_cuda and torch.cuda.is_available() else [])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module, x = SAMPLES[module_type]()
        with torch.no_grad():
            target = torch.randn_like(_Probe(module)(x))
        try:
            for place in places:
                device = "cuda" if place == "cuda" else "cpu"
                if device == "cpu":
                    _native.set_isa(place)
                report = compare_with_loop(
                    _Probe(module).to(device),
                    lambda output, y: (output - y).square().sum(1),
                    x.to(device),
                    target.to(device),
                    max_grad_norm=0.5,
                )
                if not report.ok:
                    return False, f"{', '.join(report.wrong)} off by {max(report.deviations.values()):.1e} on {place}"
                worst = max(worst, *report.deviations.values())
        finally:
            _native.set_isa(before)
    return True, f"at most {worst:.0e} from the loop over single examples ({', '.join(places)})"


# ---- randomness


def _chacha20() -> tuple[bool, str]:
    """RFC 8439, section 2.3.2: key 00..1f, counter 1, nonce 00000009 0000004a 00000000 as words 09000000 4a000000 0.

    Streams are cut into groups of 16 blocks whose j-th words lie together: word j of block 1 has index 16 j + 1.
    """
    key = torch.arange(32, dtype=torch.uint8)
    words = torch.ops.dpkernels.random_bits(key, 0x09000000, 0x4A000000, 0, 128)[1::16]
    stream = words.numpy().astype("<i8").tobytes().hex()
    expected = (
        "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4e"
        "d2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e"
    )
    return stream == expected, "RFC 8439, section 2.3.2"


def _noise() -> tuple[bool, str]:
    """Mean, variance and the Kolmogorov-Smirnov distance of fresh normals; by chance one of 10^8 runs fails."""
    from scipy.special import ndtr

    count = 200_000
    values = np.sort(Key.fresh().normal(Domain.NOISE, 0, count).numpy())
    mean, variance = float(values.mean()), float(values.var())
    cdf = ndtr(values)
    distance = float(max((np.arange(1, count + 1) / count - cdf).max(), (cdf - np.arange(count) / count).max()))
    ok = abs(mean) < 6 / math.sqrt(count) and abs(variance - 1) < 6 * math.sqrt(2 / count)
    ok = ok and distance < 3.1 / math.sqrt(count)  # 2 exp(-2 * 3.1^2) = 9e-9
    return ok, f"mean {mean:+.4f}, variance {variance:.4f}, KS distance {distance:.4f} of {count} values"


def _step() -> tuple[bool, str]:
    """The update of an empty logical batch is noise alone, of standard deviation lr * sigma * C / batch_size."""
    model = nn.Linear(300, 200, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = DPSGD(model, noise_multiplier=2.0, batch_size=10, max_grad_norm=0.5, lr=1.0)
    optimizer.begin_physical_batch(0, True)
    optimizer.step()
    count, expected = model.weight.numel(), 2.0 * 0.5 / 10
    std = float(model.weight.detach().double().square().mean().sqrt())
    ok = abs(std / expected - 1) < 6 / math.sqrt(2 * count) + 1e-3
    return ok, f"an empty batch moves weights by {std:.5f}, sigma C / B is {expected:.5f}"


# ---- accounting


def _accountants() -> tuple[bool, str]:
    """Against values that have a closed form or are printed in papers."""
    plain = accounting.epsilon(noise_multiplier=10.0, sampling_rate=1.0, steps=100, delta=1e-5)
    sampled = accounting.epsilon(noise_multiplier=1.5, sampling_rate=0.01, steps=10_000, delta=1e-5, accountant="rdp")
    ok = 4.3771 <= plain <= 4.3773 * 1.001 and abs(sampled - 3.459) < 1e-3
    return ok, f"plain Gaussian {plain:.4f} (exactly 4.3772), subsampled by RDP {sampled:.3f} (printed 3.459)"


_CHECKS: dict[str, Callable[[], tuple[bool, str]]] = {
    "ChaCha20": _chacha20,
    "noise": _noise,
    "private step": _step,
    "accountants": _accountants,
}
