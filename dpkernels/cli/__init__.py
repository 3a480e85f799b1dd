"""The command line, `dpkernels train | plan | epsilon | audit | doctor`; each command is a module of this room."""

from dpkernels.cli.main import main

__all__ = ["main"]
