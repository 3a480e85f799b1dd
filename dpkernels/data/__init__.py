"""Real data sets in memory or in image files, and Poisson sampling of logical batches."""

from dpkernels.data.arrays import ArraySplit, with_features
from dpkernels.data.files import FileSplit
from dpkernels.data.images import ImageDataset, ImageSplit, Split
from dpkernels.data.load import dataset_names, load_dataset
from dpkernels.data.loader import PoissonLoader
from dpkernels.data.sampling import poisson_sample

__all__ = [
    "ArraySplit",
    "FileSplit",
    "ImageDataset",
    "ImageSplit",
    "PoissonLoader",
    "Split",
    "dataset_names",
    "load_dataset",
    "poisson_sample",
    "with_features",
]
