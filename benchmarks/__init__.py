"""Every speed claim of anyattn comes from here: ``python -m benchmarks``.

Cases and peers are data (``cases.py``, ``peers.py``, ``variants.py``); one runner times a case's contenders in interleaved rounds, after it
has judged their results against float64. ``bars.py`` says what has to be reached.
"""
