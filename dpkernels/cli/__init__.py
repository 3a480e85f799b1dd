"""The command line, `dpkernels train | plan | epsilon | audit | bench | doctor`; a module for each."""

from dpkernels.cli.main import main

__all__ = ["main"]
