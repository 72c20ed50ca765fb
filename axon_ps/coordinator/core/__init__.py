"""The coordinator's state machines: events in, actions out. No clock, threads or I/O.

state · actions                                      events in, actions out
roster · admission · members · handover              who is a member: ranks, joins and leaves
evictions · reachability · restart                   who is removed, and who comes back
assembly · steps                                     generations, and the decisions on steps
registrations · models                               the models; each with the three of the next line
registration · first_values · placement              layout and optimizer; first values; which servers hold slices
barriers · kv · checkpoints · access · waiting       the calls that members and operators make
records · history                                    the durable state; all that is shown of a job
"""
