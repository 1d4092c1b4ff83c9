"""Tensor utilities: kinds of tensors, autocast, strides of results, and memoisation by contents."""
