"""How numbers are made smaller for the wire. Import the module you need: `axon_ps.compress.cast`, and so on.

This package stays light on purpose: the modules that need numba import it, this one does not.
"""
