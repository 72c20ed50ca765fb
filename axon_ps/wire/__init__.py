"""What travels: the published schema (`v1`, generated), its conversion to our values (`codec`), and bulk `frames`.

Nothing here knows gRPC. Everything that comes from the wire is checked here, before it becomes one of our values.
"""
