"""Compiled loops: the torch backend's forward pass as one C++ function per mod, where there is a C++ compiler."""
