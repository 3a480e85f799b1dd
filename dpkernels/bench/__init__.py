"""Measurements: whole training steps beside an ordinary one and peers, and the cost model's choices beside their
alternatives. `dpkernels bench` prints both."""

from dpkernels.bench.choices import LayerChoice, explain
from dpkernels.bench.machine import machine, versions
from dpkernels.bench.models import BASELINES, MODELS, Workload
from dpkernels.bench.step import StepResult, measure

__all__ = ["BASELINES", "MODELS", "LayerChoice", "StepResult", "Workload", "explain", "machine", "measure", "versions"]
