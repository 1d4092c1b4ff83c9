"""Sequence geometry: where a row is stored and how long a sequence is, for Python ints, torch tensors and CuTe DSL integers alike.

``SeqlenInfo``, ``SeqlenInfoQK`` and ``SeqlenInfoQKNewK`` place one batch entry, or a whole vector of them, in packed, padded and cached
tensors; ``BlockInfo`` says which tiles of keys a tile of queries needs and the other way round.
"""
