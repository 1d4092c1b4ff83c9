"""Triton tools: source text from expressions, compilation of generated source, and fast kernel launches."""
