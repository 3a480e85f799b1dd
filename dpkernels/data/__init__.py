"""Real data sets in memory, and Poisson sampling of logical batches."""

from dpkernels.data.images import ImageDataset, ImageSplit
from dpkernels.data.load import dataset_names, load_dataset
from dpkernels.data.loader import PoissonLoader
from dpkernels.data.sampling import poisson_sample

__all__ = ["ImageDataset", "ImageSplit", "PoissonLoader", "dataset_names", "load_dataset", "poisson_sample"]
