"""anyattn: any attention that can be written as a few lines of Python, at the speed of a hand-written kernel."""

from anyattn.errors import BackendError, ModError

__version__ = "0.1.0"
__all__ = ["BackendError", "ModError", "__version__"]
