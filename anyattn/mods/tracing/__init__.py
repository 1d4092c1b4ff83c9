"""Tracing: a Python function becomes an expression of the IR."""
