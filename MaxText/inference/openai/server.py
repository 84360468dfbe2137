"""uvicorn in an event loop that has other things to do as well."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from MaxText.errors import UserError
from MaxText.inference.openai.gate import Gate

MAX_CONNECTIONS = 4096  # open at once, idle ones included; further ones get 503
_HEADERS_SECONDS = 30  # that a new connection may stay without a request


class _Protocol(H11Protocol):
  def connection_made(self, transport: asyncio.Transport) -> None:
    """Gives nobody a connection that keeps silent; uvicorn's own patience with a first request has no end."""
    super().connection_made(transport)
    self.loop.call_later(_HEADERS_SECONDS, lambda: self.cycle is None and transport.close())


class _Server(uvicorn.Server):
  @contextlib.contextmanager
  def capture_signals(self) -> Iterator[None]:
    """Leaves signals to the program: it has another face to end, and streams to finish."""
    yield


class Server:
  """The face, listening. `port` is where."""

  def __init__(self, app: Gate, host: str, port: int, closing_seconds: int = 5):
    """Args:
    app: the face.
    host: the address to listen at.
    port: 0: any free one.
    closing_seconds: that answers may take to be sent to their end at shutdown.

    Raises:
      UserError: the address can't be listened at.
    """
    try:
      family = socket.AF_INET6 if ":" in host else socket.AF_INET
      self._socket = socket.create_server((host, port), family=family, backlog=1024)
    except (OSError, OverflowError) as error:
      raise UserError(f"HTTP can't listen at {host}:{port}: {error}") from error
    self.port = self._socket.getsockname()[1]
    self._server = _Server(
      uvicorn.Config(
        app,
        http=_Protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=MAX_CONNECTIONS,
        timeout_graceful_shutdown=closing_seconds,
      )
    )

  async def run(self) -> None:
    """Serves until `stop`."""
    await self._server.serve(sockets=[self._socket])

  def stop(self) -> None:
    """Takes no further connections, and ends those that are open as soon as they have their answer."""
    self._server.should_exit = True
