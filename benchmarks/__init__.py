"""Every speed claim of anyattn comes from here: ``python -m benchmarks`` on a CPU, ``python -m benchmarks.gpu`` on a GPU.

One harness for both: cases (``cpu/cases.py``, ``gpu/cases.py``), variants and peers are data; the runner judges what the contestants
compute, then times them in interleaved rounds with the device's clock. Bars say what has to be reached.
"""
