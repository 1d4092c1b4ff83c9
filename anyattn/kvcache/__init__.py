"""KV caches: rotary embedding, appending rows in place, and a pool of pages.

``rotary`` turns queries and new keys by their position, ``append`` finds and checks the slots of new rows and writes them, ``pages``
owns a page pool (``anyattn.PagedKVCache``). Lengths and left padding are ``anyattn.sequences``'s.
"""
