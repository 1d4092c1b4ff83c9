"""The CPU benchmark's cases and bars: ``python -m benchmarks`` runs them."""
