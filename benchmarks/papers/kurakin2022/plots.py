"""The picture of docs/results/kurakin2022.md: accuracy against the size of the network, as in Figure 6."""

from __future__ import annotations

from benchmarks.papers.kurakin2022.experiments import BEST, QUIET, STUDY, fields
from benchmarks.papers.pictures import new_figure, save
from benchmarks.papers.runner import Results, Row, Summary


def sizes(results: Results) -> None:
    """A panel for each way of growing, a line for each noise multiplier, whose learning rate all networks share."""
    figure = new_figure(11.5, 4.0)
    print(f"| varied | network | {' | '.join(map(_label, BEST))} |\n| --- | --- |{' ---: |' * len(BEST)}")
    for panel, (varied, networks) in zip(figure.subplots(1, len(STUDY), sharey=True), STUDY.items(), strict=True):
        found = {sigma: [_accuracy(results, network, sigma) for network in networks] for sigma in BEST}
        for sigma, values in found.items():
            means = [float("nan") if value is None else value.mean for value in values]
            panel.plot(range(len(networks)), means, "o-", markersize=4, label=_label(sigma))
        for place, network in enumerate(networks):
            cells = [str(values[place] or "-") for values in found.values()]
            print(f"| {varied} | {_written(network)} | {' | '.join(cells)} |")
        panel.set_xticks(range(len(networks)), [_written(network).replace("-", "-\n") for network in networks])
        panel.tick_params(axis="x", labelsize="small")
        panel.set_title(f"{varied} varied", fontsize="medium")
        panel.grid(alpha=0.3)
    figure.axes[0].set_ylabel("test accuracy, percent")
    figure.axes[0].legend(frameon=False, fontsize="small")
    save(figure, "kurakin2022_sizes.png")


def _accuracy(results: Results, network: str, sigma: float) -> Summary | None:
    return Summary.of(run["last"] for run in results.of(Row("", fields(network, sigma, BEST[sigma]))))


def _label(sigma: float) -> str:
    return "without noise" if sigma == QUIET else f"sigma {sigma:g}"


def _written(network: str) -> str:
    """As the paper writes it."""
    return network.replace("x", "(").replace("-", ")-") + ")"
