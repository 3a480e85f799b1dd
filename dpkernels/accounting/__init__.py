"""Privacy accounting: events, epsilon, calibration, plans and the ledger. Never imports torch.

epsilon(*, noise_multiplier, sampling_rate, steps, delta, accountant="auto", compose_with=()) -> float
noise_multiplier(*, target_epsilon, delta, sampling_rate, steps, compose_with=(), accountant="auto") -> float
plan(*, dataset_size, batch_size, delta, epochs | steps, target_epsilon | noise_multiplier, compose_with=(),
     accountant="auto") -> Plan
    Plan: dataset_size, batch_size, epochs, steps, sampling_rate, noise_multiplier, delta, epsilon, target_epsilon,
    compose_with, accountant, bound (lower and upper), step_event (one step), events (all that is allowed);
    str(plan) is the privacy statement; plan.claim(noise_error) with noise that is so far from ideal
claim(events, delta, accountant="auto", noise_error=0.0) -> Bound    # what may be stated, real noise included
bound(events, delta, accountant="auto") -> Bound    # lower, upper, accountant, method, notes

Gaussian(noise_multiplier, count=1), SampledGaussian(noise_multiplier, sampling_rate, count=1),
Laplace(noise_multiplier, count=1), PureEpsilon(epsilon, count=1)    # frozen; event.times(n) is n runs in all

Ledger(path=None, budget=None, *, seeded=False)     # a context manager; path None keeps it in memory
    reserve_step(event) -> int    before each step's noise; the step's index from 0, never repeated after a kill
    record(event, what)           any other release, before it is made
    events(), entries(), epsilon(delta), bound(delta), statement(delta), steps, reserved, seeded, path
    commit(), close()             release what was reserved ahead; rewind(steps) for seeded runs only
tuning       all_runs, best_of_random_runs, random_stopping: what choosing hyper-parameters costs; noise_multipliers
iteration    iteration_bound, iteration_noise_multiplier: amplification by iteration, beside DP-SGD's accounting
BudgetExceededError, LedgerLockedError, AccountantUnavailableError, AccountantContradictionError
"""

from dpkernels.accounting import iteration, tuning
from dpkernels.accounting.accountants import bound, claim, epsilon
from dpkernels.accounting.bounds import AccountantContradictionError, AccountantUnavailableError, Bound
from dpkernels.accounting.calibration import noise_multiplier
from dpkernels.accounting.ledger import BudgetExceededError, Entry, Ledger
from dpkernels.accounting.locked_file import LedgerLockedError
from dpkernels.accounting.mechanisms import Event, Gaussian, Laplace, PureEpsilon, SampledGaussian
from dpkernels.accounting.planning import Plan, plan

__all__ = [
    "AccountantContradictionError",
    "AccountantUnavailableError",
    "Bound",
    "BudgetExceededError",
    "Entry",
    "Event",
    "Gaussian",
    "Laplace",
    "Ledger",
    "LedgerLockedError",
    "Plan",
    "PureEpsilon",
    "SampledGaussian",
    "bound",
    "claim",
    "epsilon",
    "iteration",
    "noise_multiplier",
    "plan",
    "tuning",
]
