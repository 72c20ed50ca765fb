"""The coordinator's state machines: events in, actions out. No clock, threads or I/O.

state       is composed of the parts below           events · actions   inputs and outputs
roster · members · admission · assembly · evictions  the members, their ranks and generations
models · registration · first_values · steps         the models, and the decisions on their steps
placement                                            the servers that hold their slices
barriers · kv · checkpoints · waiting                the calls that members wait for
records     the durable state                        config             the configuration
"""
