"""Many runs: grids of them side by side, and hyper-parameters that are chosen on the private data at a known price."""

from dpkernels.search.sweep import Point, SweepResult, grid, run_sweep
from dpkernels.search.tune import Tuned, TuneFolder, go_on, start

__all__ = ["Point", "SweepResult", "TuneFolder", "Tuned", "go_on", "grid", "run_sweep", "start"]
