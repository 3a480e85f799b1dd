"""Laplace noise on integers, sampled exactly: no floating point is involved.

Laplace noise in floating point gives the secret away through the low bits of what it is added to (Mironov 2012). The
discrete Laplace distribution, P(Z = z) proportional to exp(-epsilon |z|) over all integers, has none; it is the noise
of the geometric mechanism (Ghosh, Roughgarden & Sundararajan 2009). It is drawn by Algorithm 2 of Canonne, Kamath &
Steinke 2020, The Discrete Gaussian for Differential Privacy, which needs uniform integers only: epsilon is the fraction
that its double is. How long a draw takes depends on what is drawn, and is not hidden.
"""

from __future__ import annotations

import math
from fractions import Fraction

import torch
from torch import Tensor

from dpkernels.random.key import Domain, Key

_CHUNK = 4096  # words drawn at once
_SMALLEST = 2.0**-40  # noise stays within 2^48, far from where int64 ends


def discrete_laplace(key: Key, domain: Domain, step: int, count: int, *, epsilon: float) -> Tensor:
    """Independent integers with P(z) = (1 - r) / (1 + r) r^|z| for r = exp(-epsilon): int64 [count].

    Added to integers of which an example changes one, by one, they are epsilon-differentially private, and the loss is
    epsilon or -epsilon always: what `dpkernels.accounting.PureEpsilon` describes. `Laplace(1 / epsilon)` would promise
    more than holds, since continuous noise leaves losses in between. The variance is 2 r / (1 - r)^2.

    key, domain, step: the stream, which is to be used for nothing else. epsilon: at least 2^-40. Raises ValueError or
    TypeError for another one, or a negative count.
    """
    if isinstance(epsilon, bool) or not isinstance(epsilon, (int, float)):
        raise TypeError(f"epsilon must be a number, got {type(epsilon).__name__}")
    if not _SMALLEST <= epsilon < math.inf:
        raise ValueError(f"epsilon must be a finite number >= 2^-40, got {epsilon!r}")
    if count < 0:
        raise ValueError(f"count must be 0 or more, got {count}")
    words, rate = _Words(key, domain, step), Fraction(epsilon)
    return torch.tensor([_laplace(words, rate) for _ in range(count)], dtype=torch.int64)


class _Words:
    """Uniform integers, from the words of one stream in turn."""

    def __init__(self, key: Key, domain: Domain, step: int) -> None:
        self._stream = key, domain, step
        self._words: list[int] = []
        self._drawn = 0

    def below(self, limit: int) -> int:
        """Uniform in 0 .. limit - 1: as many bits as that needs, drawn again until they are below."""
        bits = (limit - 1).bit_length()
        while True:
            value, left = 0, bits
            while left > 0:
                value, left = value << 64 | self._next(), left - 64
            value >>= -left
            if value < limit:
                return value

    def _next(self) -> int:
        if not self._words:
            key, domain, step = self._stream
            self._words = key.bits(domain, step, _CHUNK, offset=self._drawn).tolist()
            self._drawn += _CHUNK
        return self._words.pop() & (2**64 - 1)


def _laplace(words: _Words, rate: Fraction) -> int:
    s, t = rate.numerator, rate.denominator
    while True:
        part = words.below(t)
        if not _exp(words, part, t):
            continue
        whole = 0
        while _exp(words, 1, 1):
            whole += 1
        magnitude = (part + t * whole) // s
        negative = words.below(2)
        if magnitude or not negative:  # 0 has one sign only
            return -magnitude if negative else magnitude


def _exp(words: _Words, numerator: int, denominator: int) -> bool:
    """True with probability exp(-numerator / denominator), for a fraction of at most 1."""
    k = 1
    while words.below(denominator * k) < numerator:
        k += 1
    return k % 2 == 1
