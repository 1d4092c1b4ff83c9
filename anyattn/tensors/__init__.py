"""Facts about tensors: their kinds, the strides of results, and results that depend on what a tensor holds."""
