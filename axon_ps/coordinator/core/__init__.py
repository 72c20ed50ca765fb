"""The coordinator's state machines: events in, actions out. No clock, threads or I/O.

state       composed of the parts below              events · actions   inputs and outputs
roster · members · admission · assembly              who is a member, with which rank, in which generation
models · registration · steps                        what a model is made of, and how its steps are decided
barriers · kv · checkpoints · waiting                what members wait for
records     the durable state                        config             the configuration
"""
