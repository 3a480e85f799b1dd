"""Random words and Gaussian noise from ChaCha20 streams.

``csrc/common/rng.h`` and ``csrc/common/exact_normal.h`` define them. A stream is selected by a 32-byte key, a domain in
[0, 2^31) and a step in [0, 2^63), and has 2^35 values. A value depends on key, domain, step and index alone, not on how
a range is cut or on the number of threads. Calling twice with the same arguments gives the same values: never add them
to two different secrets.
"""

import math

import torch
from torch import Tensor

from dpkernels import _native  # noqa: F401  (loads the operators)

STREAM_LENGTH = 2**35
_GRID_RANGE = (2.0**-200, 2.0**199)
_MAX_SCALE = 2.0**40
_EXACT_ERROR = 2.0**-100


def require_stream(key: Tensor, domain: int, step: int, offset: int, count: int) -> None:
    """Raise unless the arguments select a range of a stream."""
    if not isinstance(key, Tensor) or key.dtype != torch.uint8 or key.shape != (32,) or key.device.type != "cpu":
        got = f"{key.dtype} {list(key.shape)} on {key.device}" if isinstance(key, Tensor) else type(key).__name__
        raise TypeError(f"key must be a uint8 CPU tensor [32], got {got}")
    if not 0 <= domain < 2**31:
        raise ValueError(f"domain must be in [0, 2^31), got {domain}")
    if not 0 <= step < 2**63:
        raise ValueError(f"step must be in [0, 2^63), got {step}")
    if offset < 0 or count < 0 or offset + count > STREAM_LENGTH:
        raise ValueError(f"offset and count must stay within a stream's 2^35 values, got {offset} and {count}")


def require_grid(noise_std: float, grid: float) -> None:
    """Raise unless noise of standard deviation ``noise_std`` can be rounded to multiples of ``grid``."""
    low, high = _GRID_RANGE
    if not (low <= grid <= high and math.frexp(grid)[0] == 0.5):
        raise ValueError(f"grid must be a power of two in [2^-200, 2^199], got {grid}")
    if not 0 < noise_std <= _MAX_SCALE * grid:
        raise ValueError(f"noise_std must be in (0, 2^40 grid = {_MAX_SCALE * grid:g}], got {noise_std}")


def random_bits(key: Tensor, domain: int, step: int, offset: int, count: int) -> Tensor:
    """Uniform 64-bit words: int64 [count], the words ``offset <= i < offset + count`` of a stream.

    Args:
        key: uint8 [32].
        domain, step: the nonce; see the module.
        offset, count: the range of the stream.

    Raises:
        ValueError, TypeError: the arguments select no range of a stream.
    """
    require_stream(key, domain, step, offset, count)
    return torch.ops.dpkernels.random_bits(key.contiguous(), domain, step, offset, count)


def gaussian(key: Tensor, domain: int, step: int, offset: int, count: int) -> Tensor:
    """Standard normals: float64 [count], by Box and Muller from two words each pair; they reach 13 sigma.

    The error is below 2^-46 absolute. Noise that hides a secret should be :func:`grid_gaussian`.

    Raises:
        ValueError, TypeError: the arguments select no range of a stream.
    """
    require_stream(key, domain, step, offset, count)
    return torch.ops.dpkernels.gaussian(key.contiguous(), domain, step, offset, count)


def grid_gaussian(
    key: Tensor, domain: int, step: int, offset: int, count: int, *, noise_std: float, grid: float
) -> Tensor:
    """Normals of standard deviation ``noise_std``, rounded to the nearest multiple of ``grid``: float64 [count].

    The rounding is that of the exact normal, decided in higher precision where double is not enough: the same multiples
    on every machine, and a distribution within :func:`total_variation` of the ideal one. Added to a value on the grid
    they leak nothing through their low bits (Mironov 2012): ``x + round(Z) == round(x + Z)`` for x on the grid.

    Args:
        noise_std: in (0, 2^40 grid].
        grid: a power of two.

    Raises:
        ValueError, TypeError: the arguments do not fit.
    """
    require_stream(key, domain, step, offset, count)
    require_grid(noise_std, grid)
    return torch.ops.dpkernels.grid_gaussian(key.contiguous(), domain, step, offset, count, noise_std, grid)


def total_variation(count: int, *, noise_std: float, grid: float) -> float:
    """Bound on the total-variation distance between ``count`` values of :func:`grid_gaussian` and ideal ones.

    That is 2 (noise_std / grid + 1) 2^-100 for each value, as ``csrc/common/exact_normal.h`` derives for uniform words;
    ChaCha20's are computationally indistinguishable from those.
    """
    require_grid(noise_std, grid)
    return count * 2 * (noise_std / grid + 1) * _EXACT_ERROR


def box_muller(words: Tensor) -> tuple[Tensor, Tensor]:
    """Pairs of normals from given words: the definition behind the streams, for tests and checks.

    Args:
        words: int64 [pairs, 4], read as unsigned: radius, angle, and 64 more bits of each.

    Returns:
        float64 [pairs, 2, 2], both normals as unevaluated sums of two doubles, and float64 [pairs, 2], what vector code
        computes in double, NaN where it leaves a pair to the former.

    Raises:
        TypeError: ``words`` is no int64 tensor [pairs, 4].
    """
    if not isinstance(words, Tensor) or words.dtype != torch.int64 or words.dim() != 2 or words.size(1) != 4:
        raise TypeError(f"words must be int64 [pairs, 4], got {getattr(words, 'dtype', type(words).__name__)}")
    return torch.ops.dpkernels.box_muller(words.contiguous())


@torch.library.register_fake("dpkernels::random_bits")
def _(key: Tensor, domain: int, step: int, offset: int, count: int) -> Tensor:
    return key.new_empty(count, dtype=torch.int64)


@torch.library.register_fake("dpkernels::gaussian")
def _(key: Tensor, domain: int, step: int, offset: int, count: int) -> Tensor:
    return key.new_empty(count, dtype=torch.float64)


@torch.library.register_fake("dpkernels::grid_gaussian")
def _(key: Tensor, domain: int, step: int, offset: int, count: int, noise_std: float, grid: float) -> Tensor:
    return key.new_empty(count, dtype=torch.float64)


@torch.library.register_fake("dpkernels::box_muller")
def _(words: Tensor) -> tuple[Tensor, Tensor]:
    new = lambda *shape: words.new_empty(shape, dtype=torch.float64)  # noqa: E731
    return new(words.size(0), 2, 2), new(words.size(0), 2)
