"""Collectives among workers, without PyTorch.

process_group · group_base   a group of workers, on arrays of any kind     functional   the same as functions
backends      what moves the bytes; selection says which one a group gets
arrays · shapes · encoding · staging · cuda   what users have, as what backends take
work          handles on what goes on in the background                     store        where groups meet
objects · p2p   values of Python; exchanges that cannot deadlock
flight_recorder · reason   what happened, and why a group ended             current_world   which world is meant
"""
