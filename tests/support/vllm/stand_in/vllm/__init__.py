"""Stand-in for the part of vLLM that an attention back end meets. ``tests/support/vllm/interface.json`` holds it to the release."""

__version__ = "0.33.0"
