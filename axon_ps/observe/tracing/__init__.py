"""Traces: the durations of the parts of a training step, over all processes, recorded for a few steps.

span     `Span`, and its name across processes · tracer  `Tracer`: a member's spans, and their receivers
chrome   spans as a file for Perfetto · otlp   spans for an OpenTelemetry collector, by its SDK
"""
