"""The version of this package. Builds read it here. `axon_ps.__version__` is the same."""

__version__ = "0.2.0.dev0"
