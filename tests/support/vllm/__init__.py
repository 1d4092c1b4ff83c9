"""vLLM for tests: a small stand-in for its interface, the record of the release's signatures, and the package's own sources."""
