"""How the pictures of docs/results are made and kept."""

from __future__ import annotations

import io
from collections.abc import Sized
from pathlib import Path
from typing import Any

from dpkernels.training.files import write_atomically

PICTURES = Path(__file__).parents[2] / "docs" / "results"
EPSILON = "\N{GREEK SMALL LETTER EPSILON}, at \N{GREEK SMALL LETTER DELTA} = 1e-5"  # label of an axis


def new_figure(width: float, height: float) -> Any:
    """An empty figure of these inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def seeds(runs: Sized) -> str:
    """How many runs stand behind a line, in words."""
    return f"{len(runs)} seeds" if len(runs) > 1 else "1 seed"


def save(figure: Any, name: str) -> None:
    """With 64 colours, which takes a third of the bytes."""
    from PIL import Image

    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=100)
    picture = Image.open(drawn).convert("RGB").quantize(64)
    write_atomically(PICTURES / name, lambda temporary: picture.save(temporary, format="png", optimize=True))
    print(name)
