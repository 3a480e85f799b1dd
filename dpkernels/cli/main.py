"""The command `dpkernels`: finds the command, and turns errors into one line and an exit code.

Exit codes: 0 done, 1 a check of `doctor`, an engine of `bench` or a run of `sweep` failed or `audit` refuted a claim,
2 bad input or a run that could not go on, 128 + n stopped by signal n (130 for Ctrl-C). With DPKERNELS_DEBUG=1 errors
keep their traceback.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Sequence
from typing import TextIO

from dpkernels.cli import audit, bench, doctor, fewshot, planning, sweep, train, tune
from dpkernels.cli.parsing import Parser

BAD_INPUT = 2
INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line `arguments` (default: those of the process) and return the exit code."""
    try:
        args = _parser().parse_args(arguments)
    except SystemExit as end:  # argparse: --help, or arguments that it refused with a line of its own
        return end.code if isinstance(end.code, int) else BAD_INPUT
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning
        try:
            return int(args.run(args))
        except KeyboardInterrupt:
            print("dpkernels: interrupted", file=sys.stderr)
            return INTERRUPTED
        except BrokenPipeError:  # `| head` has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        except (ValueError, TypeError, RuntimeError, OSError, ImportError) as error:
            if os.environ.get("DPKERNELS_DEBUG") == "1":
                raise
            print(f"dpkernels {args.command}: error: {_reason(error, args)}", file=sys.stderr)
            return BAD_INPUT


# Arguments of the library that the command line calls otherwise.
_FLAGS = {"target_epsilon": "epsilon", "name_or_folder": "dataset", "root": "data_root", "name": "model"}


def _reason(error: Exception, args: argparse.Namespace) -> str:
    """The error in one line; where it begins with the name of an argument, with that of the command line."""
    reason = " ".join(str(error).split()) or type(error).__name__
    name, _, rest = reason.partition(" ")
    flag = _FLAGS.get(name, name)
    return f"--{flag.replace('_', '-')} {rest}" if hasattr(args, flag) else reason


def _parser() -> Parser:
    parser = Parser(
        prog="dpkernels",
        description="Differentially private training at nearly the price of ordinary training.",
        epilog="Exit codes: 0 done, 1 a failed check, 2 bad input, 130 Ctrl-C. DPKERNELS_DEBUG=1 shows tracebacks.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)
    for module in (train, fewshot, sweep, tune, planning, audit, bench, doctor):
        module.add_to(commands)
    return parser


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    print(f"dpkernels: warning: {' '.join(str(message).split())}", file=sys.stderr)
