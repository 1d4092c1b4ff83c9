"""The backward kernels for heads of more than 256 dimensions: one for each gradient."""
