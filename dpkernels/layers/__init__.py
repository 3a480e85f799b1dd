"""Operations that parameters enter: their per-example norms and clipped sums. :data:`RULES` lists them all."""

from dpkernels.layers.base import STORED, Record, Rule, stored
from dpkernels.layers.broadcast import BroadcastRule
from dpkernels.layers.conv import ConvRule
from dpkernels.layers.embedding import EmbeddingBagRule, EmbeddingRule
from dpkernels.layers.linear import LeftLinearRule, LinearRule
from dpkernels.layers.norm import ChannelNormRule, FixedNormRule, PositionNormRule
from dpkernels.layers.ownership import Ownership
from dpkernels.layers.recurrent import LSTMRule
from dpkernels.layers.skinny import SkinnyLinearRule
from dpkernels.layers.sparse import SelectedRule

#: Every rule. The first that has all of a node's trainable operands and serves the node is taken.
RULES: list[Rule] = [
    LinearRule(),
    LeftLinearRule(),
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

__all__ = ["RULES", "STORED", "Ownership", "Record", "Rule", "SelectedRule", "stored"]
