"""The forward kernel whose rows have the same bits in every batch: those of Triton's kernel for ``deterministic="batch"``."""
