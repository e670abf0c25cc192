"""Rematerialisation: keep little between forward and backward, recompute the rest."""

from memjax.remat import linen as linen
from memjax.remat import policies as policies
from memjax.remat._chain import chain as chain
from memjax.remat._chain import chain_costs as chain_costs
from memjax.remat._chain_schedule import BlockCost as BlockCost
from memjax.remat._chain_schedule import ChainSchedule as ChainSchedule
from memjax.remat._chain_schedule import chain_schedule as chain_schedule
from memjax.remat._checkpoint import UnmatchedNameWarning as UnmatchedNameWarning
from memjax.remat._checkpoint import checkpoint as checkpoint
from memjax.remat._costs import Costs as Costs
from memjax.remat._dense_spec import DenseParams as DenseParams
from memjax.remat._dense_spec import DenseSpec as DenseSpec
from memjax.remat._dense_spec import DenseStatistics as DenseStatistics
from memjax.remat._nnx import RNN as RNN
from memjax.remat._nnx import Chain as Chain
from memjax.remat._profile import profile as profile
from memjax.remat._scan import scan as scan
from memjax.remat._schedule import Action as Action
from memjax.remat._schedule import Schedule as Schedule
from memjax.remat._schedule import schedule as schedule
from memjax.remat.dense_block import DenseBlock as DenseBlock
from memjax.remat.dense_block import dense_block as dense_block
