"""Every epsilon that the paper prints for a noise multiplier that it prints, beside ours.

The paper's function (TF-Privacy of February 2022) takes the Rényi divergence at the orders ORDERS and converts it as
Canonne, Kamath & Steinke do (our accountant "rdp", which searches all real orders); its noise multiplier is that of
eight replicas together, sqrt(8) times what one adds. Its runs go on to a multiple of the steps between two evaluations:
Tables 4 and 8 are those of 13,000 steps, where 10 epochs of batches of 1,024 have 12,512.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from dpkernels.accounting import Bound, SampledGaussian, bound, noise_multiplier
from dpkernels.accounting.rdp import convert, divergence

IMAGENET = 1_281_167
ORDERS = (1.25, 1.5, 1.75, 2.0, 2.25, 2.5, 3.0, 3.5, 4.0, 4.5, *range(5, 64), 128, 256, 512)


@dataclass(frozen=True)
class Printed:
    """An epsilon as printed, and what it is of."""

    where: str
    epsilon: str
    noise_multiplier: float
    batch_size: int
    epochs: int
    dataset_size: int = IMAGENET
    delta: float = 1e-6
    steps_of_run: int | None = None
    """Where they differ from those of the epochs."""

    @property
    def steps(self) -> int:
        return self.steps_of_run or math.ceil(self.epochs * self.dataset_size / self.batch_size)

    @property
    def event(self) -> SampledGaussian:
        return SampledGaussian(self.noise_multiplier, self.batch_size / self.dataset_size, self.steps)

    def by_its_function(self) -> float:
        """Epsilon by the paper's orders and conversion."""
        return min(convert(order, divergence([self.event], order), self.delta) for order in ORDERS)

    def ours(self, accountant: str = "auto") -> Bound:
        return bound([self.event], self.delta, accountant)  # type: ignore[arg-type]

    def agrees(self, value: float) -> bool:
        """Whether `value` is the printed one, up to one unit of its last digit (the paper rounds both ways) or 1%."""
        digits, _, power = self.epsilon.partition("e")
        unit = 10.0 ** -len(digits.partition(".")[2]) * 10.0 ** int(power or 0)
        return abs(value - float(self.epsilon)) <= max(unit, 0.01 * value)


def _table_4() -> list[Printed]:
    rows = {0.2: "4.57", 0.15: "13.2", 0.1: "71.5", 0.01: "9.7e6"}  # with Table 8's digits where it has more
    return [
        Printed("Tables 4 and 8", text, sigma * math.sqrt(8), 1024, 10, steps_of_run=13_000)
        for sigma, text in rows.items()
    ]


def _table_9() -> list[Printed]:
    rows = {
        10: ("9.8e8", "1.5e7", "2.2e5", "1.1e3", "23", "5.6"),
        20: ("2.0e9", "3.0e7", "4.4e5"),
        40: ("3.9e9", "6.1e7", "8.9e5", "4.2e3", "48", "11.9"),
        80: ("", "", "1.8e6"),
        160: ("", "", "3.5e6", "1.7e4", "120", "28"),
        640: ("", "", "", "6.7e4", "326", "72.3"),
    }
    return [
        Printed("Tables 5 and 9", text, 0.001 * math.sqrt(8) * 4**column, 1024 * 4**column, epochs)
        for epochs, texts in rows.items()
        for column, text in enumerate(texts)
        if text
    ]


def _appendix_h() -> list[Printed]:
    rows = {0.5: "47.41", 1.5: "3.45", 3.5: "1.20"}
    return [Printed("Appendix H", text, sigma, 500, 100, 50_000, 1e-5) for sigma, text in rows.items()]


PRINTED = [*_table_4(), *_table_9(), *_appendix_h()]


def epsilons(_: object = None) -> None:
    """Print the table of all of PRINTED."""
    print("| where | batch | epochs | steps | sigma | printed | its function | rdp-classic | rdp | tight |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- |")
    for row in PRINTED:
        found = row.ours()
        tight = f"{found.upper:.4g} ({found.accountant})"
        cells = [row.where, f"{row.batch_size:,}", row.epochs, f"{row.steps:,}", f"{row.noise_multiplier:.4g}"]
        values = [row.by_its_function(), row.ours("rdp-classic").upper, row.ours("rdp").upper]
        print(f"| {' | '.join(map(str, [*cells, row.epsilon, *(f'{value:.4g}' for value in values), tight]))} |")


def noises(_: object = None) -> None:
    """Print the noise multipliers of 70 epochs at epsilon 10 (Table 7, section 3.6), by its function and by ours."""
    print("| batch | steps | sigma, its function | sigma, tight | less noise |")
    print("| ---: | ---: | ---: | ---: | ---: |")
    for batch in (4096, 16_384, 65_536, 262_144, 1_048_576):
        theirs = _noise_by_its_function(10.0, batch, 70)
        rate, steps = batch / IMAGENET, Printed("", "", theirs, batch, 70).steps
        tight = noise_multiplier(target_epsilon=10.0, delta=1e-6, sampling_rate=rate, steps=steps)
        print(f"| {batch:,} | {steps:,} | {theirs:.4f} | {tight:.4f} | {1 - tight / theirs:.1%} |")


def _noise_by_its_function(epsilon: float, batch: int, epochs: int) -> float:
    """By bisection with geometric means (appendix C)."""
    low, high = 1e-2, 1e3
    while high / low > 1 + 1e-5:
        middle = math.sqrt(low * high)
        if Printed("", "", middle, batch, epochs).by_its_function() > epsilon:
            low = middle
        else:
            high = middle
    return high
