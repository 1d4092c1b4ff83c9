"""User errors of every entry point: arguments in, a validated ``Problem`` out."""
