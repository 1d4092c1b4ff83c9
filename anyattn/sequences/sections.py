"""Sections of a sequence's keys with sums of their own, and the key tiles in them: those of every kernel for ``deterministic="batch"``."""

__all__ = ["KEYS_IN_ORDER", "LAG", "SECTION"]

SECTION = 1024  # keys: enough that merging takes no time, few enough that decoding has a program for each
KEYS_IN_ORDER = 64  # of a tile, in 16 bits, to head dimension 256
LAG = 8.0  # what is subtracted from a row's scores stays while no exponent is above it: weights are at most 2 ** LAG
