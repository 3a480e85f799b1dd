"""Private training runs: configuration, loop, checkpoints and report. What the command line and the recipes share."""

from dpkernels.training.checkpoint import Checkpoint, load_checkpoint
from dpkernels.training.config import TrainConfig, default_delta, resolve
from dpkernels.training.evaluation import accuracy
from dpkernels.training.fewshot import learner
from dpkernels.training.loop import Execution, RunResult, train
from dpkernels.training.memory import keep_freed_memory
from dpkernels.training.progress import Progress, default_progress
from dpkernels.training.recipes import RECIPES, recipe
from dpkernels.training.run_folder import EpochResult, RunFolder
from dpkernels.training.trained import TrainedModel, load_trained

__all__ = [
    "RECIPES",
    "Checkpoint",
    "EpochResult",
    "Execution",
    "Progress",
    "RunFolder",
    "RunResult",
    "TrainConfig",
    "TrainedModel",
    "accuracy",
    "default_delta",
    "default_progress",
    "keep_freed_memory",
    "learner",
    "load_checkpoint",
    "load_trained",
    "recipe",
    "resolve",
    "train",
]
