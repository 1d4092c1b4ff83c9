"""Validation of every entry point's arguments: raises the user errors and returns a validated ``Problem``."""
