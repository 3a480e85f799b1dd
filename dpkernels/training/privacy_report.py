"""`report.md`: what somebody who answers for the data wants to know of a run, from the files that the run left."""

from __future__ import annotations

import math
from typing import Any

from dpkernels._files import read_json
from dpkernels.accounting.statement import rounded_up
from dpkernels.training.files import write_text
from dpkernels.training.run_folder import RunFolder

_LIMITS = (
    "**Several examples of one person.** The unit is one example. Who has k of them in the data is protected "
    "with k times the epsilon, and a delta that grows by more than k.",
    "**Other runs on the same data.** Each run, model and statistic that was released costs an epsilon of its "
    "own, and they add up. That holds for runs that were only looked at, to choose hyper-parameters; `dpkernels "
    "tune` accounts for the choice.",
    "**The test set.** Accuracy on it is computed without noise. It is treated as public.",
    "**What was fixed before.** The nominal size, the names of the classes, weights that training started from "
    "and preprocessing outside of dpkernels are taken for public. What they were computed from is not covered.",
    "**Who watches the computer.** Memory, the time of a step, dates of files and log lines, and the files "
    "marked PRIVATE may tell of single examples. The guarantee is for who sees the released files alone.",
    "**Another copy of the run.** Where training went on in a copy of this folder as well, the same steps were "
    "spent a second time. No ledger can tell.",
    "**Rounding of gradients.** An example's gradient is the one that torch computes, and torch may round it "
    "differently in a batch of another size. What dpkernels adds up itself is covered to the last bit.",
    "**The random generator.** Noise and samples come from ChaCha20 with a key of the operating system, which "
    "is assumed to be unpredictable.",
    "**What is true of many.** The guarantee limits what the model tells of any single example. It does not "
    "hide what examples have in common.",
)

_FILES = (
    ("report.md, metrics.json, privacy.png, history.jsonl, config.json, ledger.json", "may be released"),
    ("model.safetensors", "the model: may be released"),
    ("checkpoint.pt", "may be released; what a resume goes on from, keep it while the run is unfinished"),
    ("timing-PRIVATE.json, diagnostics-PRIVATE.*", "private: they depend on single examples without noise"),
    ("dates of all files", "private, in the same way as times: copy files without them to release them"),
)

_CONFIG = (
    ("optimizer", "optimizer"),
    ("lr", "learning rate"),
    ("lr_body", "learning rate of everything but the classifier"),
    ("momentum", "momentum"),
    ("nesterov", "Nesterov's momentum"),
    ("weight_decay", "weight decay"),
    ("schedule", "schedule of the learning rate"),
    ("warmup", "warm-up, fraction of the steps"),
    ("averaging", "decay of the moving average"),
    ("batch_size", "expected batch size, examples"),
    ("epochs", "epochs"),
    ("max_grad_norm", "bound on the norm of an example's gradient"),
    ("loss_threshold_epoch", "epoch at which the loss's parts weigh the same"),
    ("loss_beta", "beta of the loss"),
    ("loss_gamma", "gamma of the loss"),
    ("freeze", "frozen"),
    ("sparse", "fraction of convolution weights that is trained"),
    ("groups", "groups of the normalization"),
    ("norm_noise_multiplier", "noise multiplier of the normalization statistics"),
    ("score_noise_multiplier", "noise multiplier of the count of right answers on the training split"),
    ("seed", "seed"),
)


def write_report(folder: RunFolder) -> None:
    """Write `report.md` from configuration, metrics, and the audit where one lies in the folder.

    Raises FileNotFoundError where the run left no metrics yet, ValueError where a file of it is damaged.
    """
    metrics = folder.read_metrics()
    if metrics is None:
        raise FileNotFoundError(f"{folder.metrics} is missing: the run left none yet")
    config = read_json(folder.config)
    try:
        text = _written(folder, metrics, config["config"])
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        why = f"{folder.metrics} or {folder.config.name} is damaged: {error!r}"
        raise ValueError(f"the privacy report cannot be written, since {why}") from error
    write_text(folder.report, text)


def _written(folder: RunFolder, metrics: dict[str, Any], config: dict[str, Any]) -> str:
    parts = [
        f"# Privacy report: {metrics['model']} on {metrics['data']['name']}",
        _summary(metrics),
        "## Privacy statement",
        f"```text\n{metrics['statement']}\n```",
        "## Data",
        _data(metrics),
        "## Model and training",
        _training(metrics, config),
        "## What is not covered",
        "\n".join(f"- {limit}" for limit in _LIMITS),
        "## Audit",
        _audit(folder),
        "## Files in this folder",
        _table(("file", ""), _FILES),
        "## Versions",
        _table(("", "version"), list(metrics["versions"].items())),
    ]
    return "\n\n".join(parts) + "\n"


def _summary(metrics: dict[str, Any]) -> str:
    epsilon, delta = metrics["epsilon"], metrics["delta"]
    if metrics["private"]:
        claim = (
            f"**({rounded_up(epsilon)}, {delta:g})-differentially private**, for adding or removing one example: what "
            f"is seen in the released files is at most e^epsilon = {rounded_up(math.exp(epsilon))} times as likely "
            f"with an example in the data as without it, and the reverse, but for a probability of {delta:g}."
        )
    elif epsilon is None:
        claim = f"**No epsilon can be stated at delta {delta:g}**: the statement below says why."
    else:
        claim = "**NOT PRIVATE**: the noise came from a seed and can be computed again. Such runs are for tests."
    lines = [claim, f"Accuracy on the public test split: {metrics['test_accuracy']:.2%}."]
    if "train_accuracy" in metrics:
        lines.append(f"Right answers on the training split, with noise: {metrics['train_accuracy']:.2%}.")
    made = f"{metrics['steps']} of {metrics['planned_steps']} planned steps were made"
    if not metrics["complete"]:
        lines.append(f"The run stopped early: {made}. It costs what was planned.")
    if metrics["lost_steps"]:
        lines.append(f"{metrics['lost_steps']} steps were lost to a kill: they are paid for, and not in the model.")
    return "  \n".join(lines)


def _data(metrics: dict[str, Any]) -> str:
    data = metrics["data"]
    names, count = data["classes"], len(data["classes"])
    shown = ", ".join(map(str, names[:20])) + (", ..." if count > 20 else "")
    rows = [
        ("name", data["name"]),
        ("size", f"{data['nominal_size']} training examples, a public nominal number; the true one is not stated"),
        ("classes", f"{count}: {shown}"),
        ("one example", " x ".join(map(str, data["example_shape"])) + " numbers, and a label"),
        ("private", data["private"]),
        ("public", data["public"]),
        *(("preprocessing", step) for step in data["preprocessing"]),
    ]
    return _table(("", ""), rows)


def _training(metrics: dict[str, Any], config: dict[str, Any]) -> str:
    rows: list[tuple[str, Any]] = [
        ("model", f"{metrics['model']}, {metrics['trained_parameters']:,} trained parameters"),
        ("started from", metrics["init"] or "random weights"),
        ("loss", metrics["loss"]),
        *((words, config[name]) for name, words in _CONFIG if config.get(name) not in (None, False, 0, 0.0)),
        ("noise multiplier", f"{metrics['noise_multiplier']:.6g}"),
        ("sampling rate", f"{metrics['sampling_rate']:.6g}"),
        ("steps", f"{metrics['steps']} of {metrics['planned_steps']}"),
    ]
    return _table(("", ""), rows)


def _audit(folder: RunFolder) -> str:
    if not folder.audit.exists():
        return f"None was run in this folder (`dpkernels audit --out {folder.path}`)."
    try:
        rows = [
            (
                f"{entry['claim']:.4g}",
                f"{entry['lower_bound']:.4g}",
                f"{entry['delta']:g}",
                f"{entry['confidence']:.4g}",
                "REFUTED" if entry["lower_bound"] > entry["claim"] else "not contradicted",
            )
            for entry in read_json(folder.audit)
        ]
    except (OSError, ValueError, KeyError, TypeError):
        return f"{folder.audit.name} lies in this folder, but it cannot be read."
    table = _table(("claimed epsilon", "lower bound found", "delta", "confidence", "claim"), rows)
    return (
        "Attacks on runs of their own, with the settings that `dpkernels audit` was given. A lower bound below the "
        "claim does not prove the claim. These runs trained on the same data: what is published of them costs the "
        f"claimed epsilon of each as well.\n\n{table}"
    )


def _table(head: tuple[str, ...], rows: Any) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join(f"| {' | '.join(_cell(value) for value in line)} |" for line in lines)


def _cell(value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else "yes" if value is True else str(value)
    return " ".join(text.split()).replace("|", "\\|")
