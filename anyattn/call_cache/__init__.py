"""The call cache: a warm call becomes its ``Problem`` and ``Plan`` without being validated again."""
