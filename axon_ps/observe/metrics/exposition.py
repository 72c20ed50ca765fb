"""Metrics as text, in the formats of Prometheus and OpenMetrics, by prometheus-client. They are read at each scrape."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from axon_ps.observe.metrics.sources import Source
from axon_ps.observe.metrics.table import HISTOGRAMS, REPEATED, described

_UNDESCRIBED = "axon_ps_undescribed"


class _Statistics(Collector):
    """Reads all sources at every scrape."""

    def __init__(self, sources: Callable[[], Iterable[Source]], labels: Mapping[str, str]) -> None:
        self._sources = sources
        self._labels = labels

    def collect(self) -> Iterator[Metric]:
        """Yield the families, each with the samples of all its sources; samples with the same labels are added up."""
        families: dict[str, Metric] = {}
        samples: dict[tuple[str, tuple[tuple[str, str], ...]], float] = defaultdict(float)
        for source in self._sources():
            for statistic, value in source.read().items():
                if statistic.startswith(REPEATED):
                    continue
                found = described(source.kind, statistic)
                labels = {**self._labels, **source.labels}
                if found is None:
                    labels |= {"source": source.kind, "statistic": statistic}
                    name, text, is_counter = _UNDESCRIBED, "A statistic that has no description yet.", False
                else:
                    metric, own = found
                    labels |= own
                    name, text, is_counter = metric.name, metric.help, metric.is_counter
                if name not in families:
                    made = CounterMetricFamily if is_counter else GaugeMetricFamily
                    families[name] = made(name, text)
                samples[name, tuple(labels.items())] += float(value)
        for (name, pairs), value in samples.items():
            is_counter = families[name].type == "counter"
            families[name].add_sample(f"{name}_total" if is_counter else name, dict(pairs), value)
        yield from families.values()
        yield from self._histograms()

    def _histograms(self) -> Iterator[Metric]:
        for source in self._sources():
            for name, histogram in source.histograms().items():
                row, labels = HISTOGRAMS[source.kind][name], {**self._labels, **source.labels}
                family = HistogramMetricFamily(row.name, row.help, labels=list(labels))
                buckets = [(_bound(bound), float(count)) for bound, count in histogram.buckets()]
                family.add_metric(list(labels.values()), buckets, histogram.sum_s)
                yield family

    def describe(self) -> list[Metric]:
        """Return nothing: the metrics depend on the work of the process."""
        return []


def _bound(seconds: float) -> str:
    return "+Inf" if math.isinf(seconds) else str(seconds)


class Exposition:
    """The answer to `/metrics`.

    Args:
        sources: the sources, which are read at every scrape.
        labels: the labels of every metric of this process: job, role, rank, node.
    """

    def __init__(self, sources: Callable[[], Iterable[Source]], labels: Mapping[str, str]) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_Statistics(sources, labels))
        ProcessCollector(registry=self._registry)  # CPU seconds, memory, open files, of this process
        PlatformCollector(registry=self._registry)

    def encode(self, accept: str) -> tuple[bytes, str]:
        """Return the text and its content type, by the content types that the caller accepts."""
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type
