"""KV caches: rotary embedding, appending rows in place, quantisation to 8 bits, and a pool of pages.

``rotary`` rotates queries and new keys by their position, ``append`` finds, checks and writes the slots of new rows, ``quantise`` converts
them for 8-bit caches, whose ``scales`` attention reads, ``pages`` owns a page pool (``anyattn.PagedKVCache``). Lengths and left padding are
in ``anyattn.sequences``.
"""
