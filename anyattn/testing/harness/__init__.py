"""Harness of every speed claim: contestants, judging before timing, interleaved rounds; shared by ``anyattn bench`` and ``benchmarks``."""
