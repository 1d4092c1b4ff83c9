"""The forward kernel that leaves tiles out at run time: its roles differ from those of ``kernel.forward`` where a tile may be skipped."""
