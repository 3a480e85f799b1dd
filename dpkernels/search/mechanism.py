"""The mechanism of `tune`, all of it public: what is drawn and how, what runs are scored by, and their noise."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from dpkernels.accounting import Bound, Entry, Plan
from dpkernels.accounting.planning import planned_steps
from dpkernels.accounting.statement import statement
from dpkernels.accounting.tuning import TrainingRun, best_of_random_runs, most_runs, noise_multipliers
from dpkernels.data import ImageDataset
from dpkernels.random import total_variation
from dpkernels.search.draws import FREE, Draw
from dpkernels.training.config import TrainConfig, resolve

SCORES = ("test", "train")
SCORE_NOISE = 20.0
"""Of a count of right answers on the training data: next to nothing beside training, and 1.4% of digits."""
NOISE_SHARE = 2.0**-8
"""Of delta, for what the noise of all runs differs from ideal."""
CUT_SHARE = 1e-3  # of delta, for the numbers of runs that constant time leaves out


@dataclass(frozen=True)
class Search:
    """The mechanism, all of it public. Raises ValueError that names what is wrong."""

    fields: Mapping[str, Any]
    """Of `TrainConfig`, for all runs."""
    draws: tuple[Draw, ...]
    epsilon: float
    """Of the whole search, at the `delta` of the configuration."""
    score: str = "test"
    """"test": accuracy on the test set, which is treated as public. "train": a noisy count on the training data."""
    mean_runs: float = 10.0
    shape: float = 1.0
    """Of K's distribution, as `best_of_random_runs` takes them."""
    constant_time: bool = False

    def __post_init__(self) -> None:
        if not self.draws:
            raise ValueError("draw must be given, once at least")
        names = [draw.field for draw in self.draws]
        if len(set(names)) < len(names):
            raise ValueError(f"draw must be of different fields, got {', '.join(names)}")
        if self.score not in SCORES:
            raise ValueError(f"score must be one of {', '.join(SCORES)}, got {self.score!r}")
        if not 0 < self.epsilon < math.inf:
            raise ValueError(f"epsilon must be a finite number > 0, got {self.epsilon!r}")
        for name in {"epsilon", "noise_multiplier", "seed"} & self.fields.keys():
            raise ValueError(f"{name} must not be among the fields of every run")
        if (self.fields.get("score_noise_multiplier") is not None) != (self.score == "train"):
            raise ValueError("score_noise_multiplier must be given with score='train' and only then")

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "shape": "inf" if self.shape == math.inf else self.shape}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Search:
        """The search that `to_dict` described."""
        draws = tuple(Draw(**{**draw, "values": tuple(draw["values"])}) for draw in values["draws"])
        return cls(**{**values, "draws": draws, "shape": float(values["shape"])})


@dataclass(frozen=True)
class Calibrated:
    """What a search costs, and the noise that makes it so."""

    search: Search
    delta: float
    noise: Mapping[TrainingRun, float]
    bound: Bound
    """At delta, the cut included."""
    slots: int | None
    """Runs that are made in constant time."""

    def check_noise(self, config: TrainConfig, parameters: int, channels: int) -> None:
        """Raise ValueError where what the noise of runs like `config` differs from ideal takes more than its share of
        delta. parameters: of its model. channels: of its input."""
        kind, release = kind_of(config), config.release(channels)
        sigma, score = self.noise[kind], config.score_noise_multiplier
        # Noise is at most 2.1e4 sqrt(parameters) steps of its grid wide, in units of sigma: see PrivateOptimizer.
        error = kind.steps * total_variation(parameters, noise_std=2.1e4 * math.sqrt(parameters) * sigma, grid=1.0)
        error += 0.0 if release is None else release.noise_error(channels)
        error += 0.0 if score is None else total_variation(1, noise_std=score, grid=1.0)
        share = (1 + math.exp(min(self.search.epsilon, 700.0))) * self.search.mean_runs * error
        if share > NOISE_SHARE * self.delta:
            raise ValueError(
                f"epsilon must be smaller for {config.model}, got {self.search.epsilon:g}: what the noise of all runs "
                f"differs from ideal would take {share:.2g} of delta={self.delta:g}, more than is kept for it"
            )

    def draw(self, dataset: ImageDataset) -> tuple[TrainConfig, TrainingRun]:
        """The configuration of one run, with its noise, and its kind. Raises ValueError for an impossible one."""
        drawn = {draw.field: draw.one() for draw in self.search.draws}
        config = resolve(dataset, {**self.search.fields, **drawn, "noise_multiplier": 1.0})
        kind = kind_of(config)
        return TrainConfig(**{**config.to_dict(), "noise_multiplier": self.noise[kind]}), kind


@dataclass(frozen=True)
class Outlook:
    """How much work searches like this one take, which their draws do not tell.

    epochs: of a run, on average. half, most: how many runs half of all searches make at most, and nine in ten.
    constant: whether all of them make as many.
    """

    epochs: float
    half: int
    most: int
    constant: bool

    @classmethod
    def of(cls, calibrated: Calibrated) -> Outlook:
        """That of a search."""
        search = calibrated.search
        epochs = [kind.sampling_rate * kind.steps for kind in calibrated.noise]
        half, most = (
            most_runs(mean_runs=search.mean_runs, shape=search.shape, tail=tail)
            if calibrated.slots is None
            else calibrated.slots
            for tail in (0.5, 0.1)
        )
        return cls(sum(epochs) / len(epochs), half, most, calibrated.slots is not None)


def calibrate(search: Search, dataset: ImageDataset) -> Calibrated:
    """The noise of every kind of run that may be drawn, so that the search costs its epsilon.

    Raises ValueError where no noise does, or a configuration that may be drawn is impossible.
    """
    configs = _representatives(search, dataset)
    kinds, delta = [kind_of(config) for config in configs], configs[0].delta
    slots, within = None, (1 - NOISE_SHARE) * delta
    if search.constant_time:
        cut = CUT_SHARE * delta / (1 + math.exp(search.epsilon))
        slots = most_runs(mean_runs=search.mean_runs, shape=search.shape, tail=cut)
        within -= CUT_SHARE * delta
    how: dict[str, Any] = {"mean_runs": search.mean_runs, "shape": search.shape}
    sigmas = noise_multipliers(kinds, target_epsilon=search.epsilon, delta=within, **how)
    noise = dict(zip(kinds, sigmas, strict=True))
    first, *rest = [kind.events(sigma) for kind, sigma in noise.items()]
    found = best_of_random_runs(first, within, alternatives=rest, **how)
    return Calibrated(search, delta, noise, replace(found, kept=NOISE_SHARE * delta), slots)


def kind_of(config: TrainConfig) -> TrainingRun:
    """What decides how much noise `config` needs."""
    steps = planned_steps(config.epochs, config.dataset_size, config.batch_size)
    return TrainingRun(config.batch_size / config.dataset_size, steps, config.compose_with)


def _representatives(search: Search, dataset: ImageDataset) -> list[TrainConfig]:
    """A configuration for every combination of values that may decide the noise."""
    axes = [draw.values if draw.kind == "choice" else (draw.low,) for draw in search.draws]
    axes = [axis[:1] if draw.field in FREE else axis for draw, axis in zip(search.draws, axes, strict=True)]
    names = [draw.field for draw in search.draws]
    return [
        resolve(dataset, {**search.fields, **dict(zip(names, chosen, strict=True)), "noise_multiplier": 1.0})
        for chosen in itertools.product(*axes)
    ]


def tuning_statement(search: Search, plan: Plan, bound: Bound, delta: float) -> str:
    """The privacy statement of a search that released a run with `plan`."""
    by = {
        "test": "by accuracy on the test set, which is treated as public; the accuracy reported for that set is the "
        "best of several, and optimistic",
        "train": "by a noisy count of right answers on the training data",
    }[search.score]
    more = [
        f"Hyper-parameters: this is the best of a random number of runs, {by}. Nothing else of them is released, the "
        f"number included.",
        f"Number of runs: {distribution(search)}.",
        f"Drawn for every run: {'; '.join(map(str, search.draws))}. Runs of other draws may have other noise: the "
        f"dearest counts.",
    ]
    return statement(bound, delta, [Entry("one run", event, False) for event in plan.events], more=more)


def distribution(search: Search) -> str:
    """That of the number of runs, in words."""
    if search.shape == math.inf:
        return f"Poisson with mean {search.mean_runs:g}"
    return f"truncated negative binomial with mean {search.mean_runs:g} and shape {search.shape:g}"
