"""The real services and the step client of workers under random faults, in virtual time: a seed is an interleaving.

It finds bugs of axon_ps. `axon_ps_lab.simulate` is something else: forecasts of time and cost for users of axon_ps.
"""
