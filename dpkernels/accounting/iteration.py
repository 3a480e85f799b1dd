"""Privacy amplification by iteration (Feldman, Mironov, Talwar & Thakurta 2018; Tramer & Boneh 2021, appendix D.3).

For convex problems, hiding all iterates but the last one protects an example more the longer training goes on after it
was used. It needs no secret sampling, and it stands beside DP-SGD's accounting, not inside it: the result is no event,
cannot be composed with the ledger's steps, and holds only where all of the following does.

Checked: the step size is at most 2 / smoothness. Stated, and the caller's responsibility: every example's loss is
convex, ``smoothness``-smooth and Lipschitz with the constant that the noise is relative to (clip the data; clipping
gradients breaks convexity); projections are onto convex sets; batches are fixed and disjoint, visited in one fixed
order every epoch; every step adds Gaussian noise; only the last iterate is released, or computed on.

The guarantee differs from example to example: the last batch has none to speak of beyond its own noise. ``coverage`` is
the fraction of the examples, in the order of their batches, for which the figure holds; Tramer & Boneh draw their
figure 9 for 99%. For the other examples use ``coverage=1``. That figure also composes the epochs as if each
released its iterate, which ``every_epoch=True`` does; hiding all but the very last needs less noise.
"""

from __future__ import annotations

import math

from dpkernels.accounting.bounds import Bound
from dpkernels.accounting.mechanisms import Gaussian, check_count, check_delta, check_number
from dpkernels.accounting.rdp import rdp_bound


def iteration_bound(
    *,
    noise_multiplier: float,
    dataset_size: int,
    batch_size: int,
    epochs: int,
    delta: float,
    learning_rate: float,
    smoothness: float,
    coverage: float = 0.99,
    every_epoch: bool = False,
) -> Bound:
    """Epsilon at ``delta``, for all but a fraction 1 - ``coverage`` of the examples, of releasing the last iterate.

    Args:
        noise_multiplier: standard deviation of the noise that is added to a batch's sum of gradients, divided by the
            Lipschitz constant of one example's loss.
        dataset_size, batch_size, epochs: each epoch visits ceil(dataset_size / batch_size) fixed batches in one order.
        delta: in (0, 1).
        learning_rate: factor of the noisy gradient, in the scale in which ``smoothness`` is that of the minimised mean.
        smoothness: Lipschitz constant of the gradient of the minimised mean.
        coverage: fraction of the examples for which epsilon holds, in (0, 1].
        every_epoch: the iterate at the end of each epoch may be released too; the epochs are composed.

    An example in batch t of n has Rényi divergence alpha / (2 sigma^2) times (epochs - 1) / n + 1 / (n + 1 - t) for
    adding or removing it: the noise of n steps hides each use before the next one, and that of n + 1 - t steps the last
    (contractive noisy iterations, Feldman et al., with the shift of each use spread evenly over these steps). With
    ``every_epoch`` it is epochs / (n + 1 - t).
    """
    check_step(learning_rate, smoothness)
    sigma = check_number("noise_multiplier", noise_multiplier, 0.0, math.inf, "a finite number >= 0")
    delta = check_delta(delta)
    share, words = _unhidden_share(dataset_size, batch_size, epochs, coverage, every_epoch)
    if sigma == 0.0:
        return Bound(math.inf, math.inf, "iteration", "no noise")
    found = rdp_bound([Gaussian(sigma / math.sqrt(share))], delta)
    method = (
        f"privacy amplification by iteration for {words}: convex smooth Lipschitz losses, fixed batches, the last "
        f"iterate {'of every epoch' if every_epoch else 'alone'}, not composed with any other accounting of these steps"
    )
    return Bound(found.upper, 0.0, "iteration", method)


def iteration_noise_multiplier(
    *,
    target_epsilon: float,
    dataset_size: int,
    batch_size: int,
    epochs: int,
    delta: float,
    learning_rate: float,
    smoothness: float,
    coverage: float = 0.99,
    every_epoch: bool = False,
) -> float:
    """The noise multiplier, to 0.1%, at which ``iteration_bound`` meets ``target_epsilon`` and its 0.999-fold does
    not."""
    check_step(learning_rate, smoothness)
    share, _ = _unhidden_share(dataset_size, batch_size, epochs, coverage, every_epoch)
    from dpkernels.accounting.calibration import noise_multiplier

    # The divergence is that of one Gaussian release, which a single step on all data is too.
    single = noise_multiplier(target_epsilon=target_epsilon, delta=delta, sampling_rate=1.0, steps=1, accountant="rdp")
    return single * math.sqrt(share)


def check_step(learning_rate: float, smoothness: float) -> None:
    """Raise ValueError unless a gradient step contracts: 0 < learning_rate <= 2 / smoothness."""
    rate = check_number("learning_rate", learning_rate, 0.0, math.inf, "a finite number > 0")
    beta = check_number("smoothness", smoothness, 0.0, math.inf, "a finite number >= 0")
    if rate == 0.0 or rate * beta > 2:
        raise ValueError(
            f"learning_rate must be above 0 and at most 2 / smoothness = {2 / beta if beta else math.inf:g}, "
            f"got {rate:g}: a longer step does not contract, and iteration then amplifies nothing"
        )


def _unhidden_share(
    dataset_size: int, batch_size: int, epochs: int, coverage: float, every_epoch: bool
) -> tuple[float, str]:
    """What iteration leaves of one step's divergence for the worst covered example, and who is covered, in words."""
    size, batch, passes = (
        check_count("dataset_size", dataset_size),
        check_count("batch_size", batch_size),
        check_count("epochs", epochs),
    )
    if batch > size:
        raise ValueError(f"batch_size must be at most dataset_size={size}, got {batch}")
    what = "a fraction with 0 < coverage <= 1"
    fraction = check_number("coverage", coverage, 0.0, 1.0, what)
    if fraction == 0.0:
        raise ValueError(f"coverage must be {what}, got {coverage!r}")
    batches = -(-size // batch)
    last = max(1, math.ceil(math.ceil(fraction * size) / batch))
    share = passes / (batches + 1 - last) if every_epoch else (passes - 1) / batches + 1 / (batches + 1 - last)
    return share, f"the examples of the first {last} of {batches} batches (at least {fraction:.4g} of all)"
