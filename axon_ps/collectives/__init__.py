"""Collectives among workers, without PyTorch.

process_group     the methods of a group of workers, on arrays of any kind
group_members · group_calls · group_backends   a group's members; its calls, in their order; its backends
functional    the same as functions
backends      move the bytes; selection chooses one for a group
arrays · arguments · encoding · staging · cuda   users' arrays and values, in the form that backends take
work          handles on operations in the background                       store        values by which ranks meet
objects · p2p   values of Python; exchanges that cannot deadlock
flight_recorder   the last calls                          current_world   the default world
"""
