"""The picture of docs/results/shamsabadi2023.md, from the runs that were made."""

from __future__ import annotations

from benchmarks.papers.pictures import EPSILON, new_figure, save, seeds
from benchmarks.papers.runner import Results, curve
from benchmarks.papers.shamsabadi2023.experiments import EXPERIMENTS, SETTINGS, SYMMETRIC

COLOURS = {"cross-entropy": "tab:blue", "losing-less": "tab:orange"}


def accuracy(results: Results) -> None:
    """Figures 3 and 4: test accuracy against epsilon, an epoch a point; a panel for each setting that was run."""
    rows = {row.name: row for experiment in ("accuracy", "symmetric") for row in EXPERIMENTS[experiment]()}
    found = {
        setting: {loss: runs for loss in COLOURS if (runs := results.of(rows[f"{setting}-{loss}"]))}
        for setting in (*SETTINGS, SYMMETRIC)
    }
    shown = {setting: runs for setting, runs in found.items() if runs}
    if not shown:
        return
    columns = min(3, len(shown))
    lines = -(-len(shown) // columns)
    figure = new_figure(4.2 * columns, 3.6 * lines)
    for number, (setting, by_loss) in enumerate(shown.items()):
        axes = figure.add_subplot(lines, columns, number + 1)
        for loss, runs in by_loss.items():
            epsilons, means, _ = curve(runs, 2)
            axes.plot(epsilons, means, color=COLOURS[loss], linewidth=1.5, label=f"{loss} ({seeds(runs)})")
        axes.set_title(setting, fontsize="medium")
        axes.set_xlabel(EPSILON)
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, fontsize="small", loc="lower right")
        if number % columns == 0:
            axes.set_ylabel("test accuracy, percent")
    save(figure, "shamsabadi2023_accuracy.png")
