"""CuTe code generation: mods as CuTe operations on a fragment of scores."""
