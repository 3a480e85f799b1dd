"""Active learning on public data for a model that was trained privately: which public examples to label, and what the
choice costs (Zhao, Papernot, Singh, Polyzotis & Odena 2019).

views(model, batches) -> Views                          embeddings and logits
uncertain(public, count), DiversePublic(...).select(public, count)                  free
NearPrivate(candidates, PCARelease(...), SupportRelease(...)).select(public, private, count, ledger=...)   events
ask(oracle, indices), fine_tune(model, examples, labels, FineTuning(...))
"""

from dpkernels.selection.labelling import FineTuning, ask, fine_tune
from dpkernels.selection.methods import DiversePublic, NearPrivate, Views, uncertain, views
from dpkernels.selection.pca import PCARelease, public_pca
from dpkernels.selection.support import SupportRelease
from dpkernels.selection.uncertainty import difference, entropy, most_uncertain

__all__ = [
    "DiversePublic",
    "FineTuning",
    "NearPrivate",
    "PCARelease",
    "SupportRelease",
    "Views",
    "ask",
    "difference",
    "entropy",
    "fine_tune",
    "most_uncertain",
    "public_pca",
    "uncertain",
    "views",
]
