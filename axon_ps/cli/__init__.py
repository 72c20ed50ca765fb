"""The command line `axon-ps`: its commands, their options and settings, and their output."""
