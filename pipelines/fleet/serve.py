"""The metrics of the latest run over HTTP."""

from __future__ import annotations

from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from pipelines.fleet.config import Config, ConfigError

__all__ = ["serve", "server"]


def server(config: Config, listen: str) -> ThreadingHTTPServer:
    """A server of ``GET /metrics``, bound to ``listen`` ("address:port").

    Raises:
        ConfigError: ``output.metrics`` is not set, or the address cannot be bound.
    """
    if not config.output.metrics:
        raise ConfigError("output.metrics: expected the file of the metrics to serve, found none")
    source = Path(config.output.metrics)
    host, _, port = listen.rpartition(":")
    if not port.isdecimal():
        raise ConfigError(f"--listen: expected address:port, found {listen!r}")

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path.partition("?")[0] != "/metrics":
                self.send_error(404)
                return
            try:
                body = source.read_bytes()
            except OSError:
                self.send_error(503, "no run has been finished")
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its name
            """Nothing: Prometheus asks every few seconds."""

    try:
        return ThreadingHTTPServer((host.strip("[]"), int(port)), Handler)
    except (OSError, OverflowError) as e:
        raise ConfigError(f"--listen {listen}: cannot be bound: {e}") from e


def serve(config: Config, listen: str) -> None:
    """Serves until interrupted."""
    with server(config, listen) as made:
        made.serve_forever()
