"""Convolutions in 1, 2 and 3 dimensions, ordinary and transposed, on [batch, channels, *map].

Where an example has several maps (frames, windows), they are the planes of a map of one more dimension.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor

from dpkernels.layers.base import Record, Rule
from dpkernels.layers.ownership import Ownership
from dpkernels.ops.clip import weighted_row_sum
from dpkernels.ops.conv import ConvPlan, conv_clipped_sums, conv_plan, conv_squared_norms


class ConvRule(Rule):
    """Saves the input. Small weight gradients are stored with the norms, and from then on the record holds the
    gradients alone; else the clipped sum is computed from input and output gradients."""

    nodes: ClassVar[dict[str, dict[int, str]]] = {"Convolution": {1: "weight", 2: "bias"}}

    def serves(self, node: Any, shapes: dict[str, tuple[int, ...]], owner: Ownership) -> bool:
        return owner.dim == 0 and (owner.plain or len(node._saved_stride) < 3)

    def record(
        self, node: Any, grads: Sequence[Tensor | None], shapes: dict[str, tuple[int, ...]], owner: Ownership
    ) -> Record:
        (g,) = grads
        assert g is not None
        x = node._saved_input
        kernel_size = tuple(shapes["weight"][2:] if "weight" in shapes else node._saved_weight.shape[2:])
        settings: dict[str, Any] = {"kernel_size": kernel_size}
        for name in ("stride", "padding", "dilation"):
            values = tuple(getattr(node, f"_saved_{name}"))
            settings[name] = values if len(values) == len(kernel_size) else values * len(kernel_size)
        settings |= {"groups": node._saved_groups, "transposed": node._saved_transposed}
        if not owner.plain:
            one = {"kernel_size": 1, "stride": 1, "padding": 0, "dilation": 1}
            settings |= {name: (value, *settings[name]) for name, value in one.items()}
            x, g = (owner.rows(t).transpose(1, 2) for t in (x, g))
        return Record(self, (x,), g, frozenset(shapes), settings=settings | {"lifted": not owner.plain})

    def plan(self, record: Record) -> ConvPlan:
        """What the cost model chose for the convolution of a record."""
        (x,), g = record.saved, record.output_grad
        return conv_plan(tuple(x.shape[1:]), tuple(g.shape[1:]), tuple(_settings(record).values()))

    def squared_norms(
        self, record: Record, operands: frozenset[str], *, store: bool | None = None, strategy: str = "auto"
    ) -> Tensor:
        """As every rule's; ``store`` and ``strategy`` force what the cost model chooses otherwise."""
        (x,), g = record.saved, record.output_grad
        weight, bias = "weight" in operands, "bias" in operands
        norms, weight_grads, bias_grads = conv_squared_norms(
            x, g, weight=weight, bias=bias, store=store, strategy=strategy, **_settings(record)
        )
        if bias_grads is not None:
            record.per_example["bias"] = bias_grads
        if weight_grads is not None:
            record.per_example["weight"] = weight_grads
        if weight_grads is not None or not weight:
            record.saved, record.output_grad = (), g.new_empty(g.size(0), 0)
        return norms

    def clipped_sums(self, record: Record, weights: Tensor, operands: frozenset[str]) -> dict[str, Tensor]:
        sums: dict[str, Tensor] = {}
        stored = record.per_example
        if "bias" in stored:
            sums["bias"] = weighted_row_sum(stored["bias"], weights)
        if "weight" in stored:
            outputs_last = stored["weight"].movedim(1, -1)  # as in memory
            total = weighted_row_sum(outputs_last.flatten(1), weights).view(outputs_last.shape[1:])
            sums["weight"] = total.movedim(-1, 0).contiguous()
        left = operands - sums.keys()
        if left:
            weight, bias = conv_clipped_sums(
                *(*record.saved, record.output_grad, weights),
                weight="weight" in left,
                bias="bias" in left,
                **_settings(record),
            )
            sums |= {operand: value for operand, value in (("weight", weight), ("bias", bias)) if operand in left}
        if "weight" in sums and record.settings["lifted"]:
            sums["weight"] = sums["weight"].squeeze(2)
        return sums

    def gradients(self, record: Record, operand: str) -> Tensor:
        if operand not in record.per_example:
            self.squared_norms(record, frozenset({operand}), store=True)
        grads = record.per_example[operand]
        return grads.squeeze(3) if operand == "weight" and record.settings["lifted"] else grads


def _settings(record: Record) -> dict[str, Any]:
    return {name: value for name, value in record.settings.items() if name not in ("lifted", "what")}
