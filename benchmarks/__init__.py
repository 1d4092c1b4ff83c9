"""Benchmarks behind every speed claim of anyattn: ``python -m benchmarks`` on a CPU, ``python -m benchmarks.gpu`` on a GPU.

Both use one harness: cases (``cpu/cases.py``, ``gpu/cases.py``), variants and peers are data; the runner judges the contestants' results,
then times them in interleaved rounds with the device's clock. Bars define the figures to reach.
"""
