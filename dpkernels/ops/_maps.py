"""What operators over the maps of a convolution share: settings checked against the tensors, and how maps lie."""

from collections.abc import Sequence
from functools import lru_cache

from torch import Tensor

from dpkernels.ops._checks import as_they_lie, require_size, require_tensor

Ints = tuple[int, ...]
Settings = tuple[Ints, Ints, Ints, Ints, int, bool]
_NAMES = ("kernel_size", "stride", "padding", "dilation")
_MAPS = ("width", "height, width", "depth, height, width")


def dense(*maps: Tensor) -> tuple[Tensor, ...]:
    """The maps in one dtype that the kernels take, each as it lies if that is dense, channels last or not."""
    return tuple(_as_it_lies(t) for t in as_they_lie(*maps))


def _as_it_lies(t: Tensor) -> Tensor:
    return t if t.is_contiguous() or t.movedim(1, -1).is_contiguous() else t.contiguous()


def settings_of(
    input: Tensor,
    output_grads: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    transposed: bool,
) -> Settings:
    """The settings as the operators take them, checked against the tensors."""
    if not 1 <= len(kernel_size) <= 3:
        raise ValueError(f"kernel_size must hold 1, 2 or 3 numbers, got {tuple(kernel_size)}")
    maps = _MAPS[len(kernel_size) - 1]
    require_tensor(input, "input", f"[batch, in_channels, {maps}]")
    require_tensor(output_grads, "output_grads", f"[batch, out_channels, {maps}]")
    require_size(output_grads, "output_grads", 0, input.size(0), "the batch of input")
    settings = (tuple(kernel_size), tuple(stride), tuple(padding), tuple(dilation), groups, transposed)
    _check_shapes(input.shape[1:], output_grads.shape[1:], *settings)
    return settings


@lru_cache(maxsize=1024)
def _check_shapes(
    input_shape: Ints,
    output_shape: Ints,
    kernel_size: Ints,
    stride: Ints,
    padding: Ints,
    dilation: Ints,
    groups: int,
    transposed: bool,
) -> None:
    """Raise unless these settings make ``output_shape`` of ``input_shape``, both [channels, *map]."""
    settings = (kernel_size, stride, padding, dilation)
    for setting, values, least in zip(_NAMES, settings, (1, 1, 0, 1), strict=True):
        if len(values) != len(kernel_size):
            raise ValueError(f"{setting} must hold {len(kernel_size)} numbers like kernel_size, got {values}")
        if min(values) < least:
            raise ValueError(f"{setting} must hold numbers of at least {least}, got {values}")
    shapes = {"input": input_shape, "output_grads": output_shape}
    for name, (channels, *_) in shapes.items():
        if groups < 1 or channels < 1 or channels % groups:
            raise ValueError(f"groups must divide the {channels} channels of {name}, got {groups}")
    source, result = reversed(shapes) if transposed else shapes
    for i, (size, seen, k, s, p, d) in enumerate(
        zip(shapes[source][1:], shapes[result][1:], *settings, strict=True), start=2
    ):
        made = (size + 2 * p - d * (k - 1) - 1) // s + 1
        if transposed and 0 < made - seen <= (d - 1) // s:
            continue  # output padding within the dilation: lines that no input reaches
        if made < 1:
            raise ValueError(
                f"kernel_size must fit into {source}: dimension {i} of size {size} with padding {p} is shorter than "
                f"{k} taps with dilation {d}"
            )
        if seen != made:
            raise ValueError(
                f"{result} must have size {made} in dimension {i} (what these settings make of {size} in {source}), "
                f"got {seen}"
            )
