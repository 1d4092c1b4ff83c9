"""Benchmark harness: contestants, judging before timing, interleaved rounds; shared by ``anyattn bench`` and ``benchmarks``."""
