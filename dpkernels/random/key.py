"""Keys of the secure generator, and the domains that keep its streams apart."""

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from fractions import Fraction

import torch
from torch import Tensor

from dpkernels.ops import noise


class Domain(IntEnum):
    """What a stream is drawn for. With the step it is the nonce: no two releases share a stream, see `Key.claim`."""

    NOISE = 0
    SAMPLING = 1
    NORMALIZATION = 2
    SELECTION = 3
    SCORE = 4


_forks = 0


def _count_fork() -> None:
    global _forks  # noqa: PLW0603
    _forks += 1


os.register_at_fork(after_in_child=_count_fork)


def _process() -> tuple[int, int]:
    """Tells this process from the one that it was forked from, in whatever way it was forked."""
    return os.getpid(), _forks


class Key:
    """A 256-bit ChaCha20 key.

    A fresh key exists in one process and one object only: it is in no file, and a copy, an unpickled object or a forked
    process draws a new one, so that noise is never used twice. A key from a seed keeps its seed, for tests and
    comparisons: what is drawn from it is reproducible and therefore not private.

    Reading a stream again gives the same values. Whoever draws for a release therefore claims the stream first, and the
    object refuses a second claim: one key may serve several releases, and none shares noise or a sample with another.
    """

    __slots__ = ("_free", "_process", "_seed", "_value")

    def __init__(self) -> None:
        """Draw a fresh key from the operating system."""
        self._seed: int | None = None
        self._renew()

    @classmethod
    def fresh(cls) -> "Key":
        """A new key from the operating system's entropy."""
        return cls()

    @classmethod
    def from_seed(cls, seed: int) -> "Key":
        """The key that belongs to ``seed``, any integer; not private.

        Raises:
            TypeError: ``seed`` is no integer.
        """
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise TypeError(f"seed must be an int, got {type(seed).__name__}")
        key = cls.__new__(cls)
        key._seed = seed
        key._renew()
        return key

    def _renew(self) -> None:
        if self._seed is None:
            value = os.urandom(32)
        else:
            value = hashlib.blake2b(str(self._seed).encode(), digest_size=32, person=b"dpkernels.seed").digest()
        self._value = torch.tensor(list(value), dtype=torch.uint8)
        self._free: dict[Domain, int] = {}  # the first step that nothing was claimed from
        self._process = _process()

    @property
    def seeded(self) -> bool:
        """Whether the key came from a seed: then nothing drawn from it is private."""
        return self._seed is not None

    @property
    def value(self) -> Tensor:
        """The key itself, uint8 [32], for operators; a fresh key is another one after a fork. Keep it nowhere."""
        self._follow_fork()
        return self._value

    def _follow_fork(self) -> None:
        if self._process != _process():
            self._renew()

    def free(self, domain: Domain) -> int:
        """The first step of ``domain`` from which on no stream was claimed."""
        self._follow_fork()
        return self._free.get(Domain(domain), 0)

    def claim(self, domain: Domain, step: int | None = None, *, count: int = 1) -> int:
        """Take ``count`` streams of ``domain`` for one release, those from ``step`` on; returns ``step``.

        Steps go up: one below a claimed step can no longer be claimed. By default the first free ones are taken.

        Raises:
            RuntimeError: the stream of ``step``, or of a later one, was claimed before.
        """
        free = self.free(domain)
        if step is None:
            step = free
        if step < free:
            raise RuntimeError(
                f"the {Domain(domain).name.lower()} stream of step {step} was drawn from this key before, and two "
                "releases must not share one. Give every run and every loader of another optimizer a key of its own, "
                "by leaving key out."
            )
        self._free[Domain(domain)] = step + count
        return step

    def give_back(self, domain: Domain, step: int) -> None:
        """Undo the claims from ``step`` on: nothing that was drawn from these streams is released, or the key is seeded
        and the same release is made again."""
        self._free[Domain(domain)] = min(step, self.free(domain))

    def bits(self, domain: Domain, step: int, count: int, *, offset: int = 0) -> Tensor:
        """Uniform 64-bit words: int64 [count], see :func:`dpkernels.ops.noise.random_bits`."""
        return noise.random_bits(self.value, Domain(domain), step, offset, count)

    def normal(self, domain: Domain, step: int, count: int, *, offset: int = 0) -> Tensor:
        """Standard normals: float64 [count], see :func:`dpkernels.ops.noise.gaussian`."""
        return noise.gaussian(self.value, Domain(domain), step, offset, count)

    def grid_normal(
        self, domain: Domain, step: int, count: int, *, noise_std: float, grid: float, offset: int = 0
    ) -> Tensor:
        """Normals rounded to multiples of ``grid``: float64 [count], see :func:`dpkernels.ops.noise.grid_gaussian`."""
        return noise.grid_gaussian(self.value, Domain(domain), step, offset, count, noise_std=noise_std, grid=grid)

    def sample(self, domain: Domain, step: int, size: int, rate: float) -> Tensor:
        """Poisson sample: indices, int64 and ascending, of the examples out of ``size`` that one step draws.

        There is a uniform 64-bit word for each example and step, and an example is drawn when its word lies below
        rate * 2^64: with probability floor(rate * 2^64) / 2^64, which is ``rate`` to within 2^-64 and never above it,
        since a higher one would cost more privacy than was planned. The word depends on key, domain, step and index
        only, so adding an example changes no other example's draws.
        """
        threshold = int(Fraction(rate) * 2**64)
        if threshold == 2**64:
            return torch.arange(size)
        words = self.bits(domain, step, size)
        # The words are unsigned, torch compares signed: flipping the top bit maps one order to the other.
        return ((words ^ -(2**63)) < threshold - 2**63).nonzero().squeeze(1)

    def __reduce__(self) -> tuple[Callable[..., "Key"], tuple[int, ...]]:
        return (Key.fresh, ()) if self._seed is None else (Key.from_seed, (self._seed,))

    def __repr__(self) -> str:
        return f"Key({'seeded' if self.seeded else 'fresh'})"


@dataclass(frozen=True, eq=False)
class Sample:
    """The Poisson sample of one logical batch, which its loader shows with each of the physical batches.

    It is told by its identity: a loader that draws the same step again makes another one.
    """

    key: Key
    step: int
