"""The version, said once: packaging reads it here, and so does everybody who prints it."""

__version__ = "0.1.0"
