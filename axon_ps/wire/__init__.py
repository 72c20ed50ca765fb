"""Messages and records: the schema (`v1`, generated), its conversion to our values (`codec`), bulk `frames`.

Nothing here imports gRPC. All data from the wire is checked here, before it becomes one of our values.
"""
