"""Sequence geometry: the storage and the length of sequences, for Python ints, torch tensors and CuTe DSL integers.

``SeqlenInfo``, ``SeqlenInfoQK`` and ``SeqlenInfoQKNewK`` locate one batch entry, or a vector of them, in packed, padded and cached tensors;
``BlockInfo`` gives the key tiles that a tile of queries needs, and the query tiles that need a tile of keys.
"""
