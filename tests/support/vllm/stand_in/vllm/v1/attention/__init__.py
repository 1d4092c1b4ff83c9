"""Stand-in for vLLM's package of this name."""
