"""Private optimizers: drop-in replacements of torch's that clip, add noise once per logical batch, and account."""

from dpkernels.optim.adam import DPAdam, DPAdamW
from dpkernels.optim.privacy import Privacy
from dpkernels.optim.private import PrivateOptimizer
from dpkernels.optim.sgd import DPSGD
from dpkernels.optim.wrapper import DPOptimizer

__all__ = ["DPSGD", "DPAdam", "DPAdamW", "DPOptimizer", "Privacy", "PrivateOptimizer"]
