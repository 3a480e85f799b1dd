"""Operations that parameters enter: their per-example norms and clipped sums.

:data:`RULES` lists them all; :func:`register` adds one of a user's own (docs/rules.md).
"""

from dpkernels.layers.base import STORED, Record, Rule, StoredRule, stored
from dpkernels.layers.broadcast import BroadcastRule
from dpkernels.layers.conv import ConvRule
from dpkernels.layers.embedding import EmbeddingBagRule, EmbeddingRule
from dpkernels.layers.linear import LeftLinearRule, LinearRule, VectorRule
from dpkernels.layers.norm import ChannelNormRule, FixedNormRule, PositionNormRule
from dpkernels.layers.ownership import Ownership
from dpkernels.layers.recurrent import LSTMRule
from dpkernels.layers.skinny import SkinnyLinearRule
from dpkernels.layers.sparse import SelectedRule

#: Every rule. The first that has all of a node's trainable operands and serves the node is taken.
RULES: list[Rule] = [
    LinearRule(),
    LeftLinearRule(),
    VectorRule(),
    SkinnyLinearRule(),
    ConvRule(),
    ChannelNormRule(),
    PositionNormRule(),
    FixedNormRule(),
    EmbeddingRule(),
    EmbeddingBagRule(),
    LSTMRule(),
    BroadcastRule(),
]


def register(rule: Rule) -> None:
    """Take ``rule`` before all others, for graphs that are seen from now on.

    Raises:
        TypeError: it is no instance of a :class:`Rule`.
        ValueError: its ``nodes`` are empty, so that it would serve nothing.
    """
    if not isinstance(rule, Rule):
        raise TypeError(f"rule must be an instance of a dpkernels.layers.Rule, got {rule!r}")
    if not any(rule.nodes.values()):
        raise ValueError(
            f"{type(rule).__name__}.nodes is empty: name the autograd nodes that it serves and their operands, such as "
            '{"Mm": {1: "weight"}}'
        )
    RULES.insert(0, rule)


__all__ = ["RULES", "STORED", "Ownership", "Record", "Rule", "SelectedRule", "StoredRule", "register", "stored"]
