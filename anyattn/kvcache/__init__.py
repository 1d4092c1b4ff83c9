"""KV caches: rotary embedding, appending rows in place, and a pool of pages.

``rotary`` rotates queries and new keys by their position, ``append`` finds, checks and writes the slots of new rows, ``pages`` owns a page
pool (``anyattn.PagedKVCache``). Lengths and left padding are in ``anyattn.sequences``.
"""
