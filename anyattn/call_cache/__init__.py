"""Call cache: a warm call is turned into its ``Problem`` and ``Plan`` without being validated again."""
