"""The harness of every speed claim: cases, contestants, judging before timing, interleaved rounds. ``anyattn bench`` and ``benchmarks`` share it."""
