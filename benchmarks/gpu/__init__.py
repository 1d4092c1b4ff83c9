"""GPU benchmark: anyattn on a Hopper GPU beside its peers, in one interleaved run. ``python -m benchmarks.gpu --list`` needs no GPU."""
