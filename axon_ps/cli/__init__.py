"""The command line `axon-ps`: the only reader of configuration, and the only place that prints or exits."""
