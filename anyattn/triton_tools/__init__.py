"""Writing and launching Triton kernels: source text from expressions, compilation, fast launches."""
