"""Privacy audits: lower bounds on epsilon from attacks, through the real optimizers and the real loader.

:func:`one_run` trains once with planted canaries; :func:`two_worlds` repeats a mechanism with and without one example.
An audit can refute a claim, with a stated confidence; it cannot prove one.
"""

from dpkernels.audit.bounds import one_run_bound, one_run_p_value
from dpkernels.audit.report import LIMITS, OneRunReport, Report, TwoWorldsReport, plot
from dpkernels.audit.single_run import one_run
from dpkernels.audit.worlds import two_worlds, two_worlds_bound

__all__ = [
    "LIMITS",
    "OneRunReport",
    "Report",
    "TwoWorldsReport",
    "one_run",
    "one_run_bound",
    "one_run_p_value",
    "plot",
    "two_worlds",
    "two_worlds_bound",
]
