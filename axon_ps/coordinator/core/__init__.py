"""The coordinator's state machines: events in, actions out. No clock, threads or I/O.

state · actions                                      events in, actions out
roster · admission · members · handover              the members: ranks, joins and leaves
evictions · reachability · restart                   members that are removed or come back
assembly · steps                                     generations, and the decisions on steps
registrations · models                               the models; each with the three of the next line
registration · first_values · placement              layout and optimizer; first values; the holders of slices
barriers · kv · checkpoints · access · waiting       the calls that members and operators make
records · history                                    the durable state; the history for users
"""
