"""What a family contributes to the benchmark of operators: `benchmarks/operators/<family>.py` has `entries()`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Entry:
    """One call of an operator.

    Attributes:
        operator: its name in `dpkernels.ops.<family>`, and that of its reference in `dpkernels.reference.<family>`.
        case: which shape this is, in words.
        arguments: makes positional and keyword arguments; called once before the timing.
        flops: floating-point operations of the formula itself, a product and a sum counting two.
        bytes: what must at least be read and written once.
        reference: whether the reference is timed too; not where it would take minutes or the memory of the machine.
    """

    operator: str
    case: str
    arguments: Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]
    flops: float
    bytes: float
    reference: bool = True


def size(*tensors: Tensor) -> int:
    """Bytes of the tensors together."""
    return sum(t.numel() * t.element_size() for t in tensors)
