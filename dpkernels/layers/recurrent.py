"""LSTM layers that torch computes in one node: a layer of ``nn.LSTM`` in float32 on the CPU.

What such a node keeps for its own backward is known to it alone, but all hidden states are in its output. So the gates
of all time steps come from one product, and a scan from the last step to the first gives the gradients of their inputs.
With these the layer is two linear layers on positions: of its inputs, and of its hidden states a step before.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from dpkernels.layers.base import Record, Rule
from dpkernels.layers.ownership import Ownership
from dpkernels.ops.linear import linear_clipped_sums, linear_squared_norms

_LSTM = 2  # among torch's modes
_FROM_INPUT, _FROM_STATE = ("input weight", "input bias"), ("state weight", "state bias")


class LSTMRule(Rule):
    """``i, f, g, o = W x_t + b + V h_{t-1} + c`` for every time t. Saves inputs and states a step before, [batch, time,
    features] each; the output gradient is that of the gates' sums, [batch, time, 4 * hidden]."""

    nodes: ClassVar[dict[str, dict[int, str]]] = {
        "MkldnnRnnLayer": {1: "input weight", 2: "state weight", 3: "input bias", 4: "state bias"}
    }

    def owner(self, owners: Sequence[Ownership | None], grads: Sequence[Tensor | None]) -> Ownership | None:
        """Outputs are [time, batch, hidden], and states behind the last step [batch, hidden]."""
        outputs, *states = (o if g is not None else None for o, g in zip(owners, grads, strict=True))
        if outputs is not None or grads[0] is not None:
            return outputs
        return next((Ownership(o.batch, 1) for o in states if o is not None and o.plain), None)

    def serves(self, node: Any, shapes: dict[str, tuple[int, ...]], owner: Ownership) -> bool:
        apart = owner.dim == 1 and owner.outer == owner.inner == 1
        return apart and node._saved_mode == _LSTM and not node._saved_batch_sizes

    def record(
        self, node: Any, grads: Sequence[Tensor | None], shapes: dict[str, tuple[int, ...]], owner: Ownership
    ) -> Record:
        inputs, states, g = _scan(node, grads)
        return Record(self, (inputs.transpose(0, 1), states.transpose(0, 1)), g.transpose(0, 1), frozenset(shapes))

    def squared_norms(self, record: Record, operands: frozenset[str]) -> Tensor:
        parts = [
            linear_squared_norms(x, record.output_grad, weight=weight in operands, bias=bias in operands)
            for x, (weight, bias) in zip(record.saved, (_FROM_INPUT, _FROM_STATE), strict=True)
            if {weight, bias} & operands
        ]
        return torch.stack(parts).sum(0)

    def clipped_sums(self, record: Record, weights: Tensor, operands: frozenset[str]) -> dict[str, Tensor]:
        sums: dict[str, Tensor] = {}
        for x, names in zip(record.saved, (_FROM_INPUT, _FROM_STATE), strict=True):
            wanted = [name in operands for name in names]
            if any(wanted):
                both = linear_clipped_sums(x, record.output_grad, weights, weight=wanted[0], bias=wanted[1])
                sums |= {name: value for name, value, w in zip(names, both, wanted, strict=True) if w}
        return sums

    def gradients(self, record: Record, operand: str) -> Tensor:
        g = record.output_grad.double()
        if operand.endswith("bias"):
            return g.sum(1)
        return g.mT @ record.saved[operand == "state weight"].double()


def _scan(node: Any, grads: Sequence[Tensor | None]) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, states a step before and gradients of the gates' sums, [time, batch, features], in the scan's order."""
    kind = torch.float64 if node._saved_input.dtype == torch.float64 else torch.float32
    x, output, w, v = (
        t.to(kind) for t in (node._saved_input, node._saved_result0, node._saved_weight0, node._saved_weight1)
    )
    h0, c0 = node._saved_hx_.to(kind), node._saved_cx_.to(kind)
    dh_all, dh, dc = (None if g is None else g.to(kind) for g in grads)
    if node._saved_reverse:
        x, output, dh_all = (None if t is None else t.flip(0) for t in (x, output, dh_all))
    time, batch, hidden = output.shape
    before = torch.cat([h0.reshape(1, batch, hidden), output[:-1]])
    sums = x.flatten(0, 1) @ w.mT + before.flatten(0, 1) @ v.mT
    if node._saved_has_biases:
        sums += node._saved_weight2.to(kind) + node._saved_weight3.to(kind)
    i, f, g, o = sums.view(time, batch, 4, hidden).unbind(2)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    cells = torch.empty(time + 1, batch, hidden, dtype=kind, device=x.device)
    cells[0] = c0.reshape(batch, hidden)
    new = i * g
    for t in range(time):
        torch.addcmul(new[t], f[t], cells[t], out=cells[t + 1])
    squashed = cells[1:].tanh()
    to_cell = o * (1 - squashed * squashed)
    of_cell = torch.stack([g * i * (1 - i), cells[:-1] * f * (1 - f), i * (1 - g * g)], 2)
    of_output = squashed * o * (1 - o)
    result = torch.empty(time, batch, 4, hidden, dtype=kind, device=x.device)
    dh = torch.zeros_like(cells[0]) if dh is None else dh.reshape(batch, hidden)
    dc = torch.zeros_like(cells[0]) if dc is None else dc.reshape(batch, hidden)
    for t in range(time - 1, -1, -1):
        if dh_all is not None:
            dh = dh + dh_all[t]
        dc = torch.addcmul(dc, dh, to_cell[t])
        torch.mul(of_cell[t], dc.unsqueeze(1), out=result[t, :, :3])
        torch.mul(of_output[t], dh, out=result[t, :, 3])
        dh, dc = result[t].flatten(1) @ v, dc * f[t]
    return x, before, result.flatten(2)
