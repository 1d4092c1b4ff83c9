"""Where a row lives and how long a sequence is: one set of formulas for Python ints, torch tensors and CuTe DSL integers.

``SeqlenInfo``, ``SeqlenInfoQK`` and ``SeqlenInfoQKNewK`` place one batch entry, or a whole vector of them, in packed, padded and cached
tensors; ``BlockInfo`` says which tiles of keys a tile of queries needs and the other way round.
"""
