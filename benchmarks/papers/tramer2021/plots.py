"""The pictures of docs/results/tramer2021.md, from the runs that were made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.papers.pictures import EPSILON, new_figure, save, seeds
from benchmarks.papers.runner import Results, Row, curve
from benchmarks.papers.tramer2021.experiments import EXPERIMENTS
from dpkernels.accounting import noise_multiplier

TITLES = {"mnist": "MNIST", "fashion-mnist": "Fashion-MNIST", "cifar10": "CIFAR-10"}

# Table 1 of the paper, (epsilon, accuracy in percent): linear models and networks on features, and the best end-to-end
# network of the works that it compares with; at 3 its own (figure 2).
TABLE_1 = {
    "mnist": {
        "linear": [(1.2, 98.1), (2.0, 98.5), (2.32, 98.6), (2.5, 98.7), (2.93, 98.7)],
        "cnn": [(1.2, 97.8), (2.0, 98.4), (2.32, 98.5), (2.5, 98.6), (2.93, 98.7)],
        "end-to-end": [(1.2, 96.6), (2.93, 98.1)],
    },
    "fashion-mnist": {
        "linear": [(2.7, 89.5), (3.0, 89.7)],
        "cnn": [(2.7, 88.7), (3.0, 89.0)],
        "end-to-end": [(2.7, 86.1), (3.0, 86.0)],
    },
    "cifar10": {
        "linear": [(3.0, 67.0)],
        "cnn": [(3.0, 69.3)],
        "end-to-end": [(3.0, 59.2)],
    },
}
COLOURS = {
    "linear": "tab:blue",
    "cnn": "tab:orange",
    "end-to-end": "tab:green",
    "decorrelated": "tab:purple",
    "mirrored": "tab:red",
}


AT = (1.0, 1.2, 1.5, 2.0, 2.5, 3.0)


def accuracy(results: Results) -> None:
    """Figures 1 and 2: test accuracy against epsilon, an epoch a point, beside what the paper reports.

    And as numbers, at the last epoch within an epsilon.
    """
    print(f"| | {' | '.join(f'{epsilon:g}' for epsilon in AT)} |\n| --- |{' --- |' * len(AT)}")
    for dataset, title in TITLES.items():
        figure, axes = _figure()
        for row, which, kind, label in _curves(dataset):
            if runs := [run for run in results.of(row) if run["curve"][0][which] is not None]:
                epsilons, means, deviations = curve(runs, which)
                last = [max(i for i, spent in enumerate(epsilons) if spent <= epsilon) for epsilon in AT]
                print(f"| {title}, {label} | {' | '.join(f'{means[i]:.1f}' for i in last)} |")
                axes.plot(epsilons, means, color=COLOURS[kind], linewidth=1.5, label=f"{label} ({seeds(runs)})")
                low = [mean - deviation for mean, deviation in zip(means, deviations, strict=True)]
                high = [mean + deviation for mean, deviation in zip(means, deviations, strict=True)]
                axes.fill_between(epsilons, low, high, color=COLOURS[kind], alpha=0.2, linewidth=0)
        if not axes.lines:
            continue
        for kind, points in TABLE_1[dataset].items():
            axes.plot(*zip(*points, strict=True), "o", color=COLOURS[kind], markersize=5, markeredgecolor="black")
        axes.plot([], [], "o", color="white", markeredgecolor="black", label="the paper, same colours")
        least = min(value for points in TABLE_1[dataset].values() for _, value in points)
        axes.set_ylim(bottom=least - (4 if dataset == "mnist" else 16))
        axes.set_xlim(0, 3.1)
        axes.set_title(title, fontsize="medium")
        axes.set_xlabel(EPSILON)
        _save(figure, f"tramer2021_{dataset}.png")


def _curves(dataset: str) -> list[tuple[Row, int, str, str]]:
    """Row, which weights (2 the last ones, 3 their average), kind and label of each line."""
    rows = {row.name: row for row in EXPERIMENTS["accuracy"]()}
    decorrelated, mirrored = ({row.name: row for row in EXPERIMENTS[name]()} for name in ("decorrelated", "mirrored"))
    linear = f"{dataset}-scatternet-linear"
    return [
        (rows[linear], 2, "linear", "linear on features"),
        (decorrelated[linear], 3, "decorrelated", "linear, decorrelated, averaged"),
        (mirrored[f"{linear}-mirrored-decorrelated"], 3, "mirrored", "linear, mirrored, decorrelated, averaged"),
        (rows[f"{dataset}-scatternet-cnn"], 2, "cnn", "network on features"),
        (rows[f"{dataset}-cnn"], 2, "end-to-end", "network end to end"),
    ]


def noise(results: Results) -> None:
    """Figures 3 and 11: convergence with noise and without, at a low and at a high learning rate."""
    kinds = {"scatternet-linear": "linear", "scatternet-cnn": "cnn", "cnn": "end-to-end"}
    rows = {row.name: row for row in EXPERIMENTS["noise"]()}
    for dataset, title in TITLES.items():
        figure, panels = _figure(columns=2)
        for panel, rate in zip(panels, ("low", "high"), strict=True):
            for kind, colour in kinds.items():
                for ending, style in (("", "-"), ("-quiet", "--")):
                    label = f"{kind}{', without noise' if ending else ''}"
                    runs = results.of(rows[f"{dataset}-{kind}-{rate}{ending}"])
                    _against_epochs(panel, runs, style, color=COLOURS[colour], label=label)
            panel.set_title(f"{title}, {rate} learning rate", fontsize="medium")
        _save(figure, f"tramer2021_noise_{dataset}.png")


def batch_size(results: Results) -> None:
    """Figure 7: convergence with batches of any size, where the learning rate grows with it."""
    for dataset, title in TITLES.items():
        figure, axes = _figure()
        for row in EXPERIMENTS["batch-size"]():
            if row.fields["dataset"] == dataset:
                _against_epochs(axes, results.of(row), "-", label=f"batches of {row.fields['batch_size']}")
        axes.set_title(title, fontsize="medium")
        _save(figure, f"tramer2021_batch_size_{dataset}.png")


def _against_epochs(axes: Any, runs: list[dict[str, Any]], style: str, **how: Any) -> None:
    if runs:
        epochs = [point[0] for point in runs[0]["curve"]]
        axes.plot(epochs, curve(runs, 2)[1], style, linewidth=1.5, **how)
        axes.set_xlabel("epoch")


def sampling_rate(results: Results) -> None:
    """Figure 6: the noise multiplier for (3, 1e-5) over 60 epochs grows with the square root of the sampling rate."""
    rates = [2.0**-power for power in range(9, 1, -1)]
    sigmas = [
        noise_multiplier(target_epsilon=3.0, delta=1e-5, sampling_rate=rate, steps=round(60 / rate)) for rate in rates
    ]
    figure, axes = _figure()
    axes.loglog(rates, sigmas, "o-", markersize=4, label="for \N{GREEK SMALL LETTER EPSILON} = 3, tight")
    scale = sigmas[-1] / rates[-1] ** 0.5
    axes.loglog(rates, [scale * rate**0.5 for rate in rates], "--", color="gray", label="square root of the rate")
    axes.set_xlabel("sampling rate")
    axes.set_ylabel("noise multiplier")
    _save(figure, "tramer2021_sampling_rate.png", percent=False)
    for rate, sigma in zip(rates, sigmas, strict=True):
        print(f"sampling rate 1/{1 / rate:g}: noise multiplier {sigma:.4f}, over sqrt(rate) {sigma / rate**0.5:.3f}")


def _figure(columns: int = 1) -> tuple[Any, Any]:
    figure = new_figure(6.4 * columns, 5.0)
    return figure, figure.subplots(1, columns, sharey=True)


def _save(figure: Any, name: str, percent: bool = True) -> None:
    """Nothing where no run was there to draw."""
    from matplotlib.ticker import PercentFormatter

    if not any(panel.lines for panel in figure.axes):
        return
    lines: dict[str, Any] = {}  # by label, which panels have in common
    for panel in figure.axes:
        panel.grid(alpha=0.3)
        lines |= {label: line for line, label in zip(*panel.get_legend_handles_labels(), strict=True)}
        if percent:
            panel.yaxis.set_major_formatter(PercentFormatter(decimals=None))
    if percent:
        figure.axes[0].set_ylabel("test accuracy")
    figure.legend(lines.values(), lines.keys(), frameon=False, fontsize="small", loc="outside lower center", ncols=2)
    save(figure, name)


PLOTS: dict[str, Callable[[Results], object]] = {
    "plot-accuracy": accuracy,
    "plot-noise": noise,
    "plot-batch-size": batch_size,
    "plot-sampling-rate": sampling_rate,
}
