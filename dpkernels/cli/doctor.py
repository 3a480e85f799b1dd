"""`dpkernels doctor`: what is installed, what the build can do, and whether it computes rightly on this machine."""

from __future__ import annotations

import argparse
import os
import platform
import time
from typing import Any

import torch

from dpkernels import _native
from dpkernels.cli.selfcheck import self_checks
from dpkernels.training.report import versions


def add_to(commands: Any) -> None:
    """Add the command to the parser's."""
    parser = commands.add_parser(
        "doctor",
        help="versions, build, CPU paths, and a self-check of ten seconds",
        description="Print versions and what the build can do, and check what it computes; exit code 1 on a failure.",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the report; 1 where a check failed."""
    for name, value in _facts().items():
        print(f"{name:<16}{value}")
    print()
    start, failed, total = time.monotonic(), 0, 0
    for check in self_checks():
        total += 1
        failed += not check.ok
        print(f"{'ok' if check.ok else 'FAILED':<8}{check.name}: {check.detail}", flush=True)
    verdict = f"{failed} of {total} checks FAILED" if failed else f"all {total} checks passed"
    print(f"\n{verdict} in {time.monotonic() - start:.1f} s")
    return 1 if failed else 0


def _facts() -> dict[str, str]:
    build = _native.host.build_info()
    return {
        **versions(),
        "platform": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs",
        "built by": build["compiler"],
        "built for": f"torch {build['torch']} (loads on {build['stable_abi_target']} and later)",
        "CPU paths": f"{', '.join(_native.isas())}; active: {_native.active_isa()}",
        "threads": f"{torch.get_num_threads()}",
        "CUDA": _cuda(build["cuda"]),
    }


def _cuda(built: str) -> str:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no device is present"
    if _native.has_cuda:
        return f"kernels built with CUDA {built}; {device}"
    return f"{'kernels not loaded: this torch has no CUDA' if built != 'none' else 'no kernels were built'}; {device}"
