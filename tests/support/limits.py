"""The only time limit of the tests, which tells a hang from work on a busy machine. Nothing else depends on a clock."""

__all__ = ["HANG"]

# Seconds of a child process, fifty times what the longest takes alone. Less than pytest's own limit (pyproject.toml), so that a test ends
# its child and shows what it said.
HANG = 3000
