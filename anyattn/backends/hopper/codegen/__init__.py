"""Mods as CuTe operations on a fragment of scores."""
