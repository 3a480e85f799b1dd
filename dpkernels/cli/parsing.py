"""What the commands share in reading their arguments."""

from __future__ import annotations

import argparse
from typing import NoReturn

import torch

from dpkernels import _native
from dpkernels.accounting.accountants import ACCOUNTANTS


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def add_privacy_target(parser: argparse.ArgumentParser) -> None:
    """--epsilon or --noise-multiplier."""
    target = parser.add_mutually_exclusive_group()
    target.add_argument("--epsilon", type=float, metavar="E", help="target epsilon (default 3)")
    target.add_argument(
        "--noise-multiplier",
        type=float,
        metavar="S",
        help="noise standard deviation divided by the clipping bound, instead of --epsilon",
    )
    parser.add_argument("--delta", type=float, metavar="D", help="default: 1e-5, or below 1/N for large data sets")


def add_accountant(parser: argparse.ArgumentParser) -> None:
    """--accountant and --json."""
    parser.add_argument(
        "--accountant",
        choices=ACCOUNTANTS,
        default="auto",
        help="auto takes the smallest bound of pld, prv and rdp, checked against each other (default)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def require_device(name: str) -> str:
    """``name``, if it is a device that is present and that this build has kernels for; ValueError otherwise."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"device must be a device of torch, got {name!r}") from None
    if device.type != "cpu" and not (device.type == "cuda" and _native.has_cuda):
        raise ValueError(f"device must be cpu, since this build has no kernels for other devices, got {name!r}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device must be cpu, since no CUDA device is present, got {name!r}")
    return name
