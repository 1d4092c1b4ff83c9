"""Block sparsity: lists of the partial and full tiles of (query rows x keys) that an attention visits, and block masks."""

from anyattn.sparsity.block_mask import BlockMask
from anyattn.sparsity.block_sparse import BlockSparseTensors
from anyattn.sparsity.compute import compute_block_sparsity
from anyattn.sparsity.varlen_block_sparse import VarlenBlockSparseTensors, compute_varlen_block_sparsity

__all__ = [
    "BlockMask",
    "BlockSparseTensors",
    "VarlenBlockSparseTensors",
    "compute_block_sparsity",
    "compute_varlen_block_sparsity",
]
