"""Gradients of captured tensors in the backward kernel."""
