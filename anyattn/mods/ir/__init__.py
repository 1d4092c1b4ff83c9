"""Expression IR of mods: typed operations, serialisation, content keys, dependence analysis and derivatives."""
