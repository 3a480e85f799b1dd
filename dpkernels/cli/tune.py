"""`dpkernels tune`: hyper-parameters chosen on the private data, at a known price."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from dpkernels.cli import run_options
from dpkernels.cli.sweep import add_processes
from dpkernels.data import load_dataset
from dpkernels.search.draws import Draw, parse_draw
from dpkernels.search.mechanism import SCORE_NOISE, SCORES, Calibrated, Outlook, Search, calibrate, distribution
from dpkernels.search.tune import Tuned, TuneFolder, go_on, start
from dpkernels.search.workers import Job, Watcher
from dpkernels.training.progress import terminal_size

PACE_SECONDS = 3.0


def add_to(commands: Any) -> None:
    """Add the command to the parser's."""
    parser = commands.add_parser(
        "tune",
        help="choose hyper-parameters on the private data, within one epsilon",
        description="Make a random number of training runs with random hyper-parameters and release the best one. "
        "--epsilon covers the choice. Nothing of the other runs is shown or kept, nor how many there were.",
    )
    parser.add_argument(
        "--draw",
        action="append",
        default=[],
        type=_draw,
        metavar="FIELD=HOW",
        help="how an argument below is drawn, with _ for -: log:LOW:HIGH, uniform:LOW:HIGH or A,B,...; several times",
    )
    parser.add_argument("--epsilon", type=float, metavar="E", help="of everything together (default 3)")
    parser.add_argument("--delta", type=float, metavar="D", help="default: 1e-5, or below 1/N for large data sets")
    parser.add_argument(
        "--score",
        choices=SCORES,
        default="test",
        help="what the best run is best at: the test set, treated as public (default), or a noisy count on the "
        f"training data (--score-noise-multiplier, default {SCORE_NOISE:g})",
    )
    parser.add_argument("--mean-runs", type=float, default=10.0, metavar="M", help="expected number (default 10)")
    parser.add_argument(
        "--shape",
        type=float,
        default=1.0,
        metavar="S",
        help="of the number's distribution: 1 geometric (default), 0 logarithmic, inf Poisson, others truncated "
        "negative binomial; smaller ones vary more and cost less noise",
    )
    parser.add_argument(
        "--constant-time",
        action="store_true",
        help="make as many runs as the number can be, so that time does not tell it (shape inf needs the fewest)",
    )
    run_options.add_fields(parser)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="for what is released")
    parser.add_argument("--resume", action="store_true", help="go on in --out with what was drawn")
    add_processes(parser)
    run_options.add_execution(parser)
    parser.set_defaults(run=run)


def _draw(text: str) -> Draw:
    try:
        return parse_draw(text)
    except (ValueError, TypeError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def run(args: argparse.Namespace) -> int:
    """Search, print what is released, and return the exit code."""
    folder = TuneFolder(args.out)
    execution = run_options.execution(args)
    given = run_options.given_fields(args, elsewhere=[draw.field for draw in args.draw])
    if args.resume:
        if given or args.draw:
            names = [*given, *(draw.field for draw in args.draw)]
            raise ValueError(f"a resumed tuning keeps what it began with, got {', '.join(names)}")
    else:
        _begin(args, folder, given)
    shown: list[TimeProgress] = []

    def watcher(jobs: Sequence[Job], outlook: Outlook) -> Watcher:
        if args.quiet:
            return Watcher()
        shown.append(TimeProgress(jobs, outlook, args.processes))
        return shown[0]

    try:
        result = go_on(folder, processes=args.processes, threads=args.threads, execution=execution, watcher=watcher)
    finally:
        for progress in shown:
            progress.end()
    _print_result(folder, result)
    return 0 if result.stopped_by is None else 128 + result.stopped_by


def _begin(args: argparse.Namespace, folder: TuneFolder, given: dict[str, Any]) -> None:
    fields = {"dataset": "digits", **given}
    fields.pop("noise_multiplier", None)  # of a recipe
    epsilon = fields.pop("epsilon", 3.0)
    if args.score == "train":
        fields.setdefault("score_noise_multiplier", SCORE_NOISE)
    search = Search(fields, tuple(args.draw), epsilon, args.score, args.mean_runs, args.shape, args.constant_time)
    dataset = load_dataset(fields["dataset"], args.data_root, image_size=fields.get("image_size"))
    calibrated = calibrate(search, dataset)
    start(calibrated, dataset, folder, data_root=args.data_root)
    if not args.quiet:
        _announce(calibrated)


def _announce(calibrated: Calibrated) -> None:
    search, sigmas = calibrated.search, calibrated.noise.values()
    print(f"drawn for every run: {'; '.join(map(str, search.draws))}")
    print(f"number of runs: {distribution(search)}; which one it is stays secret")
    if calibrated.slots is not None:
        print(f"constant time: {calibrated.slots} runs are made whatever the number is")
    few = f"{min(sigmas):.4g}" if len(sigmas) == 1 else f"{min(sigmas):.4g} to {max(sigmas):.4g}"
    print(
        f"noise multiplier {few}: the choice and all runs together cost epsilon {calibrated.bound.upper:.4g} at delta "
        f"{calibrated.delta:g}",
        flush=True,
    )


class TimeProgress(Watcher):
    """Time alone: whatever counts runs tells how many there are.

    The pace of the first run says how long searches like this one take. In constant time the share of all work is shown
    instead, which is the same whatever the number of runs.
    """

    def __init__(self, jobs: Sequence[Job], outlook: Outlook, processes: int) -> None:
        self._jobs, self._outlook, self._processes = jobs, outlook, processes
        self._terminal = sys.stderr.isatty()
        self._at: dict[int, int] = {}
        self._begun = self._shown = time.monotonic()
        self._first: tuple[float, int] | None = None
        self._told = False
        self._bar: tqdm | None = None
        if outlook.constant:
            total = sum(job.plan.steps * job.plan.batch_size for job in jobs)
            columns, lines = terminal_size()
            shape = "tuning {percentage:3.0f}%|{bar}| {elapsed}, {remaining} left"
            self._bar = tqdm(
                total=total, ncols=columns, nrows=lines, bar_format=shape, smoothing=0, disable=not self._terminal
            )

    def step(self, index: int, step: int) -> None:
        before, self._at[index] = self._at.get(index), step
        if self._bar is not None:
            if len(self._at) == 1 and before is None:  # processes take seconds to begin
                self._bar.reset()
            self._bar.update((step - (before or 0)) * self._jobs[index].plan.batch_size)
        elif index == 0 and not self._told:
            self._measure(step)

    def _measure(self, step: int) -> None:
        """Tell how long it may take, once the first run has gone on for a few seconds."""
        now = time.monotonic()
        if self._first is None:
            self._first = (now, step)
        elif step > self._first[1] and (now - self._first[0] > PACE_SECONDS or step == self._jobs[0].plan.steps):
            epochs = (step - self._first[1]) * self._jobs[0].plan.sampling_rate
            pace = (now - self._first[0]) / epochs
            half, most = (
                tqdm.format_interval(pace * self._outlook.epochs * -(-runs // self._processes))
                for runs in (self._outlook.half, self._outlook.most)
            )
            self._told = True
            self._clear()
            print(f"half of all tunings like this one take up to {half}, nine in ten up to {most}", flush=True)

    def tick(self) -> None:
        now = time.monotonic()
        if self._terminal and self._bar is None and now - self._shown >= 1:
            self._shown = now
            print(f"\rtuning, {tqdm.format_interval(now - self._begun)}", end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        """Leave the line."""
        if self._bar is not None:
            self._bar.close()
        else:
            self._clear()

    def _clear(self) -> None:
        if self._terminal and self._bar is None:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def _print_result(folder: TuneFolder, result: Tuned) -> None:
    if result.stopped_by is not None:
        print(
            f"Stopped, and nothing is released. Go on with: dpkernels tune --resume --out {folder.path}\n"
            "Starting over instead would choose among numbers of runs, which the epsilon does not cover."
        )
        return
    metrics = result.metrics
    if metrics is None:
        print("No run was drawn, so that nothing is released.")
        return
    chosen = ", ".join(f"{name} {_word(value)}" for name, value in metrics["chosen"].items())
    print(f"chosen         {chosen}")
    print(f"test accuracy  {metrics['test_accuracy']:.2%}")
    if "train_accuracy" in metrics:
        print(f"training set   {metrics['train_accuracy']:.2%} right, by a noisy count")
    print(f"privacy        epsilon {metrics['epsilon']:.4g} at delta {metrics['delta']:g}, the choice included")
    print(f"model          {folder.released.model}")
    print(f"\n{metrics['statement']}")


def _word(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
