"""Tracing: turns a Python function into an expression of the IR."""
