"""The papers' runner makes each run once, keeps what came of it, and sums it up."""

from __future__ import annotations

import json
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks.papers.runner import Paper, Results, Row, curve, main

DIGITS = {"dataset": "digits", "batch_size": 479, "epochs": 2.0, "noise_multiplier": 2.0}


def test_runs_are_made_once_and_summed_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    within: list[str] = []

    @contextmanager
    def variant():
        within.append("entered")
        yield

    rows = [
        Row("linear", DIGITS | {"averaging": 0.5}, (90.0, 0.1)),
        Row("other", DIGITS | {"lr": 1.0}, (80.0, None), "odd"),
    ]
    pictures: list[Results] = []
    paper = Paper("paper", {"small": lambda: rows}, extras={"plot": pictures.append}, variants={"odd": variant})
    results = tmp_path / "results.jsonl"
    words = ["paper", "small", "plot", "--seeds", "2", "--out", str(tmp_path), "--results", str(results), "--quiet"]
    monkeypatch.setattr(sys, "argv", words)
    main(paper, None)
    written = results.read_bytes()
    records = [json.loads(line) for line in written.splitlines()]
    assert [(record["fields"], record["variant"], record["seed"]) for record in records] == [
        (row.fields, row.variant, seed) for seed in (1, 2) for row in rows
    ]
    assert within == ["entered", "entered"]
    assert records[0]["averaged"] is not None
    assert records[0]["curve"][-1][2:] == [records[0]["last"], records[0]["averaged"]]
    assert records[1]["averaged"] is None
    epsilons, means, deviations = curve(pictures[0].of(rows[1]), 2)
    assert epsilons == sorted(epsilons)
    assert means[-1] == pytest.approx((records[1]["last"] + records[3]["last"]) / 2)
    assert deviations[-1] == pytest.approx(abs(records[1]["last"] - records[3]["last"]) / 2**0.5)
    printed = capsys.readouterr().out
    assert "| small | linear | 90.00 ± 0.10 |" in printed
    assert "| small | other | 80.00 |" in printed

    main(paper, None)
    assert results.read_bytes() == written
    monkeypatch.setattr(sys, "argv", [*words[:1], "large", *words[2:]])
    with pytest.raises(SystemExit):
        main(paper, None)


def test_a_run_with_other_fields_is_another(tmp_path: Path) -> None:
    results = Results(tmp_path / "results.jsonl")
    results.add({"fields": DIGITS, "variant": "", "seed": 1, "last": 50.0})
    reread = Results(tmp_path / "results.jsonl")
    assert reread.get(Row("linear", DIGITS), 1) is not None
    assert reread.get(Row("linear", DIGITS), 2) is None
    assert reread.get(Row("linear", DIGITS | {"lr": 1.0}), 1) is None
    assert reread.get(Row("linear", DIGITS, variant="odd"), 1) is None


def test_a_curve_has_the_epochs_of_all_runs() -> None:
    runs = [
        {"curve": [[1.0, 0.4, 50.0, 51.0], [2.0, 0.6, 60.0, 61.0], [3.0, 0.7, 70.0, 71.0]]},
        {"curve": [[1.0, 0.4, 54.0, 55.0], [3.0, 0.7, 72.0, 73.0]]},
    ]
    epsilons, means, deviations = curve(runs, 3)
    assert (epsilons, means) == ([0.4, 0.7], [53.0, 72.0])
    assert deviations == pytest.approx([8**0.5, 2**0.5])
