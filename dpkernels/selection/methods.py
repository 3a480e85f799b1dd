"""Which public examples to ask labels for: DiversePublic, free, and NearPrivate, which pays for a look at the private
data (Zhao, Papernot, Singh, Polyzotis & Odena 2019, Improving Differentially Private Models with Active Learning).

The model was trained privately, so that everything it says of public examples is post-processing and costs nothing.
What it says of private examples is not: embeddings and uncertainties of those are as private as the examples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dpkernels.accounting import Event, Ledger
from dpkernels.random import Key
from dpkernels.selection.pca import PCARelease, public_pca
from dpkernels.selection.support import SupportRelease
from dpkernels.selection.uncertainty import UNCERTAINTIES, most_uncertain


@dataclass(frozen=True, eq=False)
class Views:
    """What a model sees in examples, a row each.

    embeddings: the activations before the logits, [rows, features]. logits: [rows, classes]. Those of private examples
    are private.
    """

    embeddings: Tensor
    logits: Tensor

    def __post_init__(self) -> None:
        if self.embeddings.dim() != 2 or self.logits.dim() != 2 or len(self.embeddings) != len(self.logits):
            raise ValueError(
                "embeddings must be [rows, features] and logits [rows, classes] of as many rows, got "
                f"{tuple(self.embeddings.shape)} and {tuple(self.logits.shape)}"
            )

    def __len__(self) -> int:
        return len(self.logits)


@torch.no_grad()
def views(model: nn.Module, batches: Iterable[Tensor]) -> Views:
    """What ``model``, in eval mode, sees in all examples of ``batches``: the input and output of its last linear layer.

    The model must give logits [rows, classes] by that layer. Raises ValueError where it has none, or there is no batch.
    """
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    if not linear:
        raise ValueError("model must end in a linear layer, got one without any")
    embeddings, logits = [], []
    was_training = model.training
    model.eval()
    hook = linear[-1].register_forward_pre_hook(lambda _, inputs: embeddings.append(inputs[0].detach().flatten(1)))
    try:
        for examples in batches:
            logits.append(model(examples))
    finally:
        hook.remove()
        model.train(was_training)
    if not logits:
        raise ValueError("batches must give at least one batch, got none")
    return Views(torch.cat(embeddings), torch.cat(logits))


def uncertain(public: Views, count: int, uncertainty: str = "entropy") -> Tensor:
    """The baseline: the ``count`` examples that the model is most uncertain of, indices int64, the most uncertain
    first. uncertainty: "entropy" or "difference". Free."""
    return most_uncertain(_uncertainty(uncertainty)(public.logits), count)


@dataclass(frozen=True)
class DiversePublic:
    """Algorithm 1: uncertain public examples from many places. Free, for a model that was trained privately."""

    candidates: int
    """k: how many of the most uncertain examples to choose from."""
    clusters: int = 100
    """N_cluster. The paper finds little difference between 100 and 500."""
    components: int = 16
    """p: of the principal components of all public embeddings, among which clusters are formed."""
    uncertainty: str = "entropy"
    seed: int = 0
    """Where k-means begins."""

    def __post_init__(self) -> None:
        _check_counts(candidates=self.candidates, clusters=self.clusters, components=self.components)
        _uncertainty(self.uncertainty)

    def select(self, public: Views, count: int) -> Tensor:
        """Indices of ``count`` public examples, int64: the nearest to each cluster's centre first.

        Every cluster gives its N_each = count / clusters examples nearest to its centre; where one has fewer, others
        give more. Raises ValueError where count exceeds the candidates.
        """
        candidates = _candidates(public, self.candidates, self.uncertainty, count)
        places = public.embeddings[candidates].double() @ public_pca(public.embeddings, self.components).T
        cluster, distance = self._clustered(places)
        rank = torch.empty_like(cluster)
        for label in cluster.unique():
            members = (cluster == label).nonzero().squeeze(1)
            rank[members[distance[members].argsort(stable=True)]] = torch.arange(len(members))
        order = distance.argsort(stable=True)
        return candidates[order[rank[order].argsort(stable=True)]][:count]

    def _clustered(self, places: Tensor) -> tuple[Tensor, Tensor]:
        """Each candidate's cluster, and its distance to the centre."""
        from sklearn.cluster import KMeans

        clusters = min(self.clusters, len(places))
        means = KMeans(clusters, n_init=1, random_state=self.seed).fit(places.numpy())
        cluster = torch.from_numpy(means.labels_).long()
        return cluster, (places - torch.from_numpy(means.cluster_centers_)[cluster]).norm(dim=1)


@dataclass(frozen=True)
class NearPrivate:
    """Algorithm 2: uncertain public examples that have uncertain private examples near them.

    Private data is asked twice, for the principal components of its embeddings and for how many of its examples are
    nearest to each public candidate: both are events in the ledger. An example is uncertain where it is at least as
    uncertain as the least uncertain public candidate, a threshold that public data and the private model decide; see
    `SupportRelease` for why it is not the k most uncertain ones.
    """

    candidates: int
    """k: how many of the most uncertain public examples to choose from."""
    pca: PCARelease
    support: SupportRelease
    components: int = 16
    """p: of the noisy principal components of the private embeddings, in which neighbours are found."""
    smoothing: int = 1
    """Over how many candidates nearest to a candidate, itself among them, noisy counts are added up. 1 is the paper's.
    It is post-processing, and where counts are below the noise it tells more than a count alone."""
    least_support: float | None = None
    """None is the paper's: the highest support first. A number: candidates whose support, after smoothing, reaches it
    come first, the most uncertain of them ahead, and support only tells who is far from all private examples. A
    constant, or of public data."""
    uncertainty: str = "entropy"

    def __post_init__(self) -> None:
        _check_counts(candidates=self.candidates, components=self.components, smoothing=self.smoothing)
        if self.least_support is not None and not math.isfinite(self.least_support):
            raise ValueError(f"least_support must be a finite number or None, got {self.least_support!r}")
        _uncertainty(self.uncertainty)

    @property
    def events(self) -> tuple[Event, ...]:
        """What a selection costs, for a plan's ``compose_with``."""
        return self.pca.event, self.support.event

    def select(
        self, public: Views, private: Views, count: int, *, ledger: Ledger | None, key: Key | None = None
    ) -> Tensor:
        """Indices of ``count`` public examples, int64: the highest noisy support first, of equals the most uncertain;
        with ``least_support`` those who reach it before.

        Args:
            private: of the private examples, each row a function of its example. A row that is not finite has no part.
            ledger: each release is recorded before its noise is drawn; None only where both are accounted for
                elsewhere.
            key: of the noise, from streams that nothing else was drawn from; a fresh one where None.

        Raises:
            ValueError: the shapes differ, or count exceeds the candidates.
            BudgetExceededError: the ledger's plan does not allow a release.
        """
        if private.embeddings.size(1) != public.embeddings.size(1):
            sizes = private.embeddings.size(1), public.embeddings.size(1)
            raise ValueError(f"private and public embeddings must have as many features, got {sizes[0]} and {sizes[1]}")
        measure = _uncertainty(self.uncertainty)
        candidates = _candidates(public, self.candidates, self.uncertainty, count)
        threshold = float(measure(public.logits[candidates]).min()) if len(candidates) else math.inf
        key = Key.fresh() if key is None else key
        directions = self.pca.components(private.embeddings, self.components, ledger=ledger, key=key)
        support = self.support.counts(
            private.embeddings,
            measure(private.logits),
            public.embeddings[candidates],
            directions,
            threshold=threshold,
            bound=self.pca.bound,
            ledger=ledger,
            key=key,
        )
        if self.smoothing > 1:
            support = _smoothed(support, public.embeddings[candidates].double() @ directions.T, self.smoothing)
        if self.least_support is not None:
            support = support.clamp(max=math.ceil(self.least_support))
        return candidates[support.argsort(descending=True, stable=True)][:count]


def _smoothed(support: Tensor, places: Tensor, over: int) -> Tensor:
    """The sum of ``support`` [rows] over the ``over`` nearest of places [rows, components]."""
    parts = places.split(max(1, 2**22 // len(places))) if len(places) else ()
    over = min(over, len(places))
    sums = [support[torch.cdist(part, places).topk(over, dim=1, largest=False).indices].sum(1) for part in parts]
    return torch.cat([support[:0], *sums])


def _candidates(public: Views, candidates: int, uncertainty: str, count: int) -> Tensor:
    chosen = uncertain(public, candidates, uncertainty)
    if not 0 <= count <= len(chosen):
        raise ValueError(f"count must be between 0 and the {len(chosen)} candidates, got {count}")
    return chosen


def _check_counts(**counts: int) -> None:
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a positive integer, got {value!r}")


def _uncertainty(name: str) -> Callable[[Tensor], Tensor]:
    if name not in UNCERTAINTIES:
        raise ValueError(f"uncertainty must be one of {', '.join(UNCERTAINTIES)}, got {name!r}")
    return UNCERTAINTIES[name]
