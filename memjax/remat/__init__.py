"""Rematerialisation: keep little between forward and backward, recompute the rest.

tiled                 a function of sequences that runs tile by tile in both passes
attention_in_groups   attention of a layer, one group of heads at a time in both passes
AttentionInGroups     the same as an NNX module
checkpoint            a function or Flax module that keeps its inputs and named values, and recomputes the rest
policies              which named values a checkpoint saves on the device or offloads to the host
UnmatchedNameWarning  a policy names values that the function does not have
scan                  `jax.lax.scan` within a memory budget
schedule              the optimal schedule for a number of equal steps, as data
Schedule              what `schedule` returns: steps, slots and actions, printable
Action                one action of a schedule
profile               measures a step, so that `scan` predicts with real costs
Costs                 the seconds that `profile` measured
chain                 unequal blocks one after the other within a memory budget
chain_plan            what `chain` does within a budget, ahead and as data
chain_costs           the time and memory of each block of a chain
chain_schedule        the optimal schedule for unequal blocks, as data
BlockCost             the costs of one block
ChainSchedule         what `chain_schedule` returns, printable
stack_layers          equal layers as one pytree with a layer axis, for `scan`
unstack_layers        the layers of such a pytree
RNN                   `nnx.RNN` within a memory budget
Chain                 `nnx.Sequential` within a memory budget
linen                 `RNN` and `Chain` for Linen
dense_block           a block of a DenseNet in memory that is linear in its depth
DenseBlock            the same as an NNX module
DenseSpec             the sizes of a dense block
DenseParams           the parameters of a dense block
DenseStatistics       the running statistics of a dense block

On a CPU compile with `memjax.remat_compiler_options()`, or the compiler may undo the recomputation.
"""

from memjax._plan.schedule.schedule import Action, Schedule, schedule
from memjax.remat import linen, policies
from memjax.remat._chain.chain import chain, chain_costs, chain_plan
from memjax.remat._chain.schedule import ChainSchedule, chain_schedule
from memjax.remat._chain.solvers import BlockCost
from memjax.remat._checkpoint import UnmatchedNameWarning, checkpoint
from memjax.remat._dense.spec import DenseParams, DenseSpec, DenseStatistics
from memjax.remat._layers import stack_layers, unstack_layers
from memjax.remat._nnx import RNN, AttentionInGroups, Chain
from memjax.remat._scan.costs import Costs, profile
from memjax.remat._scan.scan import scan
from memjax.remat._tiled.heads import attention_in_groups
from memjax.remat._tiled.tiled import tiled
from memjax.remat.dense_block import DenseBlock, dense_block

__all__ = [
    "RNN",
    "Action",
    "AttentionInGroups",
    "BlockCost",
    "Chain",
    "ChainSchedule",
    "Costs",
    "DenseBlock",
    "DenseParams",
    "DenseSpec",
    "DenseStatistics",
    "Schedule",
    "UnmatchedNameWarning",
    "attention_in_groups",
    "chain",
    "chain_costs",
    "chain_plan",
    "chain_schedule",
    "checkpoint",
    "dense_block",
    "linen",
    "policies",
    "profile",
    "scan",
    "schedule",
    "stack_layers",
    "tiled",
    "unstack_layers",
]
