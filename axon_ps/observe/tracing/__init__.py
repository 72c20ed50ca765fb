"""Traces: what took how long in a training step, over all processes, recorded for a few steps.

span     `Span`, and how it is named across processes · tracer  `Tracer`: a member's spans, and who gets them
chrome   spans as a file for Perfetto · otlp   spans for an OpenTelemetry collector, by its SDK
"""
