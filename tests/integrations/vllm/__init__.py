"""Tests of the attention back end for vLLM."""
