"""What a private step costs on models that other people wrote, and whether its gradients are right.

    python -m benchmarks.zoo [NAMES...] [--json FILE] [--repeats N] [--threads N] [--peers]

Without names, all models; docs/zoo.md says what is measured. FILE is written after each model, a table and a picture
beside it (.md, .png) too. Another run with the same FILE, on the same machine and with the same versions, measures what
is not there yet, or failed.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.zoo import report
from benchmarks.zoo.measure import Row, measure, row_of
from benchmarks.zoo.models import MODELS, library_versions, missing
from dpkernels.bench.engines import installed
from dpkernels.bench.report import conditions
from dpkernels.training.files import write_json, write_text


def known_rows(path: Path, document: dict[str, Any]) -> dict[str, Row]:
    """The rows of an earlier run.

    Raises:
        SystemExit: it was made under other conditions than `document` tells.
    """
    if not path.exists():
        return {}
    earlier = json.loads(path.read_text())
    unlike = [
        f"{key}: {earlier.get(key)}, now {value}"
        for key, value in document.items()
        if key not in ("date", "rows") and earlier.get(key) != value
    ]
    if unlike:
        raise SystemExit(f"{path} was measured under other conditions; name another file. {'; '.join(unlike)}")
    return {row["model"]: row_of(row) for row in earlier["rows"]}


def write(path: Path, rows: dict[str, Row], document: dict[str, Any]) -> None:
    """The JSON document, and the table and the picture that are made of it."""
    ordered = [rows[name] for name in MODELS if name in rows]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {**document, "rows": [row.as_json() for row in ordered]})
    write_text(path.with_suffix(".md"), report.table(ordered, document))
    machine = document["machine"]
    try:
        report.plot(ordered, path.with_suffix(".png"), f"{machine['processor']}, {machine['threads']} threads")
    except ValueError:  # nothing to draw yet
        path.with_suffix(".png").unlink(missing_ok=True)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the results go, and are taken up again")
    parser.add_argument("--repeats", type=int, default=20, help="rounds of steps (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="of torch and the kernels (default: %(default)s)")
    parser.add_argument("--peers", action="store_true", help="Opacus, where it is installed, and torch.func too")
    options = parser.parse_args(arguments)
    for name in options.names:
        if name not in MODELS:
            parser.error(f"{name} must be of {', '.join(MODELS)}")
    for argument, number, least in (("--repeats", options.repeats, 2), ("--threads", options.threads, 1)):
        if number < least:
            parser.error(f"{argument} must be at least {least}, got {number}")
    peers = [name for name in installed() if name in report.PEERS] if options.peers else []
    if options.peers and len(peers) < len(report.PEERS):
        print("Opacus is not installed: its columns are left out.")
    document = conditions(options.threads)
    document |= {"versions": {**document["versions"], **library_versions()}, "repeats": options.repeats}
    rows = {} if options.json is None else known_rows(options.json, document)
    print(report.HEADER)
    for name in options.names or MODELS:
        if reason := missing(MODELS[name].library):
            print(f"{name:<20}  left out: {reason}")
            continue
        row = rows.get(name, Row(name, MODELS[name].examples.rows))
        rows[name] = measure(row, peers, repeats=options.repeats, threads=options.threads)
        print(report.line(rows[name]), flush=True)
        if options.json is not None:
            write(options.json, rows, document)


if __name__ == "__main__":
    main()
