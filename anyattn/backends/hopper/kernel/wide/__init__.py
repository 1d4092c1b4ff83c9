"""The forward kernel for heads of more than 256 dimensions."""
