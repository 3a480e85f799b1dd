"""Transfer from public to private data: a public model's weights, training what must be, few-shot trials."""

from dpkernels.transfer.fewshot import Episode, FewShot, episodes, few_shot
from dpkernels.transfer.masks import magnitude_masks, train_largest
from dpkernels.transfer.roles import classifier_of, freeze, parameter_groups, roles, trained
from dpkernels.transfer.sparse import SparseConv2d, SparseLinear, densify, sparsify
from dpkernels.transfer.weights import LoadReport, load_weights

__all__ = [
    "Episode",
    "FewShot",
    "LoadReport",
    "SparseConv2d",
    "SparseLinear",
    "classifier_of",
    "densify",
    "episodes",
    "few_shot",
    "freeze",
    "load_weights",
    "magnitude_masks",
    "parameter_groups",
    "roles",
    "sparsify",
    "train_largest",
    "trained",
]
