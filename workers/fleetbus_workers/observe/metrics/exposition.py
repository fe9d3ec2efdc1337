"""Samples over HTTP for Prometheus, by its own client library; the newest snapshot is served, whenever it is asked for."""

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from fleetbus.errors import UserError
from fleetbus_workers.observe.metrics.metric import Sample
from fleetbus_workers.observe.metrics.scrapes import open_server
from fleetbus_workers.observe.metrics.table import METRICS_BY_NAME


class Exposition:
    """A collector of the newest samples of one run; set from one thread, read from those of the server."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._samples: Sequence[Sample] = ()
        self._lock = threading.Lock()

    def update(self, samples: Sequence[Sample]) -> None:
        with self._lock:
            self._samples = samples

    def collect(self) -> Iterable[Metric]:
        """Collect the metrics that the client library asks for at every scrape."""
        with self._lock:
            samples = self._samples
        families: dict[str, Any] = {}
        for sample in samples:
            family = families.get(sample.name)
            if family is None:
                metric = METRICS_BY_NAME[sample.name]
                kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
                family = families[sample.name] = kind(sample.name, metric.help, labels=("run", *metric.labels))
            family.add_metric((self._run, *sample.labels), sample.value)
        return families.values()


@contextmanager
def serve_metrics(exposition: Exposition, host: str, port: int, allowed_hosts: Sequence[str] = ()) -> Iterator[int]:
    """Serve ``/metrics`` for the length of the block, also under these host names, and yield the port; raises `UserError` if it
    is taken."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(exposition)
    try:
        server = open_server(registry, host, port, allowed_hosts)
    except OSError as error:
        raise UserError(f"port {port} on {host} cannot be served: {error.strerror}: choose another --port") from error
    except UnicodeError as error:
        raise UserError(f"--host {host} is not a valid host: give an address of this machine") from error
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield int(server.server_address[1])
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=5)
