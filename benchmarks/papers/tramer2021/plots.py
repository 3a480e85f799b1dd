"""The pictures of docs/results/tramer2021.md, from the runs that were made."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.papers.runner import Results, Row, curve
from benchmarks.papers.tramer2021.experiments import EXPERIMENTS
from dpkernels.accounting import noise_multiplier
from dpkernels.training.files import write_atomically

PICTURES = Path(__file__).parents[3] / "docs" / "results"
TITLES = {"mnist": "MNIST", "fashion-mnist": "Fashion-MNIST", "cifar10": "CIFAR-10"}
EPSILON = "\N{GREEK SMALL LETTER EPSILON}, at \N{GREEK SMALL LETTER DELTA} = 1e-5"

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
COLOURS = {"linear": "tab:blue", "cnn": "tab:orange", "end-to-end": "tab:green", "decorrelated": "tab:purple"}


def accuracy(results: Results) -> None:
    """Figures 1 and 2: test accuracy against epsilon, an epoch a point, beside what the paper reports."""
    for dataset, title in TITLES.items():
        figure, axes = _figure()
        shown = False
        for row, which, kind, label in _curves(dataset):
            if runs := [run for run in results.of(row) if run["curve"][0][which] is not None]:
                epsilons, means, deviations = curve(runs, which)
                seeds = f"{len(runs)} seeds" if len(runs) > 1 else "1 seed"
                axes.plot(epsilons, means, color=COLOURS[kind], linewidth=1.5, label=f"{label} ({seeds})")
                low = [mean - deviation for mean, deviation in zip(means, deviations, strict=True)]
                high = [mean + deviation for mean, deviation in zip(means, deviations, strict=True)]
                axes.fill_between(epsilons, low, high, color=COLOURS[kind], alpha=0.2, linewidth=0)
                shown = True
        if not shown:
            continue
        for kind, points in TABLE_1[dataset].items():
            axes.plot(*zip(*points, strict=True), "o", color=COLOURS[kind], markersize=5, markeredgecolor="black")
        axes.plot([], [], "o", color="white", markeredgecolor="black", label="the paper, same colours")
        least = min(value for points in TABLE_1[dataset].values() for _, value in points)
        axes.set_ylim(bottom=least - (4 if dataset == "mnist" else 12))
        axes.set_xlim(0, 3.1)
        axes.set_title(title, fontsize="medium")
        axes.set_xlabel(EPSILON)
        _save(figure, axes, f"tramer2021_{dataset}.png")


def _curves(dataset: str) -> list[tuple[Row, int, str, str]]:
    """Row, which weights (2 the last ones, 3 their average), kind and label of each line."""
    rows = {row.name: row for name in ("accuracy", "decorrelated") for row in EXPERIMENTS[name]() if name == "accuracy"}
    better = {row.name: row for row in EXPERIMENTS["decorrelated"]()}
    linear = f"{dataset}-scatternet-linear"
    return [
        (rows[linear], 2, "linear", "linear on features"),
        (better[linear], 3, "decorrelated", "linear, decorrelated, averaged"),
        (rows[f"{dataset}-scatternet-cnn"], 2, "cnn", "network on features"),
        (rows[f"{dataset}-cnn"], 2, "end-to-end", "network end to end"),
    ]


def convergence(results: Results) -> None:
    """Figures 3 and 11 (noise and learning rate) and figure 7 (batch size): accuracy against epochs."""
    for name, words in (("noise", ("low", "high")), ("batch-size", ("",))):
        for dataset, title in TITLES.items():
            rows = [row for row in EXPERIMENTS[name]() if row.name.startswith(dataset) and results.of(row)]
            if not rows:
                continue
            figure, axes = _figure(columns=len(words))
            for panel, word in zip(axes if len(words) > 1 else [axes], words, strict=True):
                for row in rows:
                    if word in row.name.split("-") or not word:
                        runs = results.of(row)
                        _, means, _ = curve(runs, 2)
                        epochs = [point[0] for point in runs[0]["curve"]]
                        kind = next((kind for kind in ("linear", "scatternet-cnn") if kind in row.name), "cnn")
                        colour = (
                            None
                            if not word
                            else COLOURS[{"linear": "linear", "scatternet-cnn": "cnn"}.get(kind, "end-to-end")]
                        )
                        style = "--" if row.name.endswith("quiet") else "-"
                        label = (
                            row.name.removeprefix(f"{dataset}-").replace(f"-{word}", "")
                            if word
                            else f"batches of {row.fields['batch_size']}"
                        )
                        panel.plot(
                            epochs,
                            means,
                            style,
                            color=colour,
                            linewidth=1.5,
                            label=label.replace("-quiet", ", without noise"),
                        )
                panel.set_title(f"{title}, {word} learning rate" if word else title, fontsize="medium")
                panel.set_xlabel("epoch")
                panel.legend(frameon=False, fontsize="small")
            _save(figure, axes, f"tramer2021_{name}_{dataset}.png")


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
    _save(figure, axes, "tramer2021_sampling_rate.png", percent=False)
    for rate, sigma in zip(rates, sigmas, strict=True):
        print(f"sampling rate 1/{1 / rate:g}: noise multiplier {sigma:.4f}, over sqrt(rate) {sigma / rate**0.5:.3f}")


def _figure(columns: int = 1) -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4 * columns, 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(1, columns, sharey=True)


def _save(figure: Any, axes: Any, name: str, percent: bool = True) -> None:
    from matplotlib.ticker import PercentFormatter

    for number, panel in enumerate(figure.axes):
        panel.grid(alpha=0.3)
        panel.legend(frameon=False, fontsize="small", loc="lower right")
        if percent:
            panel.yaxis.set_major_formatter(PercentFormatter(decimals=None))
            if number == 0:
                panel.set_ylabel("test accuracy")
    path = PICTURES / name
    write_atomically(path, lambda temporary: figure.savefig(temporary, format="png", dpi=100))
    print(path.name)


PLOTS: dict[str, Callable[[Results], object]] = {
    "plot-accuracy": accuracy,
    "plot-convergence": convergence,
    "plot-sampling-rate": sampling_rate,
}
