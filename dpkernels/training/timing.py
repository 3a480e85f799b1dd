"""How long a run takes. It depends on which examples were drawn: a large image, or one on a slow disk, shows in the
epoch that drew it. So no released file holds a time, and this one is readable by its owner alone."""

from __future__ import annotations

import json
import time
from pathlib import Path

from dpkernels._files import read_json
from dpkernels.training.files import write_text

WARNING = "PRIVATE: how long an epoch takes can tell which examples were drawn in it. Keep these times as the data."


class Timing:
    """Seconds from the start of a run, without the time between a stop and a resume, kept in `path`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._epochs: list[tuple[int, float]] = []
        self._begun = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._begun

    def restore(self, last_step: int) -> None:
        """Go on from what `path` says. A file that is missing or damaged is begun anew: nothing rests on it."""
        try:
            document = read_json(self._path)
            before = float(document["seconds"])
            epochs = [(int(entry["step"]), float(entry["seconds"])) for entry in document["epochs"]]
        except (OSError, ValueError, KeyError, TypeError, OverflowError):
            return
        self._begun -= before
        self._epochs = [(step, seconds) for step, seconds in epochs if step <= last_step]

    def mark(self, step: int) -> None:
        """An epoch ended at `step`."""
        self._epochs.append((step, self.seconds))
        self.save()

    def save(self) -> None:
        epochs = [{"step": step, "seconds": round(seconds, 3)} for step, seconds in self._epochs]
        document = {"warning": WARNING, "seconds": round(self.seconds, 3), "epochs": epochs}
        write_text(self._path, json.dumps(document, indent=1) + "\n", private=True)
