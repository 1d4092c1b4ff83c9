"""Shared code of the tests: inputs, references, judges, simulated machines, child processes."""
