"""What stands before the routes: request ids, the key, limits of a body and of time, clients that go away, the log."""

import asyncio
import contextlib
import hmac
import traceback
from collections.abc import Awaitable, Callable
from typing import Any

from MaxText.inference.openai.errors import ApiError
from MaxText.inference.serving.log import RequestLog
from MaxText.progress import say

MAX_OPEN = 1024  # requests of /v1 at once, waiting for a slot or not; further ones get 429
_BODY_SECONDS = 30  # that a client may take to send a body
_DROPPED_BODIES = 8  # largest bodies that are taken in to be refused, in units of the limit
_SEND_SECONDS = 60  # that it may leave an answer unread when its connection can hold no more

_Message = dict[str, Any]
_Receive = Callable[[], Awaitable[_Message]]
_Send = Callable[[_Message], Awaitable[None]]
_App = Callable[[dict[str, Any], _Receive, _Send], Awaitable[None]]


class _Gone(Exception):
  """The client has closed the connection, or doesn't read from it."""


class Gate:
  """An ASGI app around another one.

  The key guards /v1. Probes and /metrics, which say nothing of anybody's requests, are open, and aren't logged.
  """

  def __init__(self, app: _App, key: str | None, max_body: int):
    """Args:
    app: the routes.
    key: what clients have to send as `Authorization: Bearer KEY`; None: nothing.
    max_body: bytes.
    """
    self._app, self._max_body = app, max_body
    self._key = None if key is None else f"Bearer {key}".encode()
    self._open = 0

  async def __call__(self, scope: dict[str, Any], receive: _Receive, send: _Send) -> None:
    if not scope["path"].startswith("/v1/"):
      await self._app(scope, receive, send)
      return
    log = RequestLog("http", f"{scope['method']} {scope['path']}"[:100])
    state = scope.setdefault("state", {})
    state["log"] = log
    status = 499  # as long as nothing is sent

    async def answer(message: _Message) -> None:
      nonlocal status
      if message["type"] == "http.response.start":
        status = message["status"]
        message = {**message, "headers": [*message["headers"], (b"x-request-id", log.name.encode())]}
      try:
        async with asyncio.timeout(_SEND_SECONDS):
          await send(message)
      except (TimeoutError, OSError):
        raise _Gone from None

    self._open += 1
    try:
      await self._pass(scope, receive, answer)
    except _Gone:
      state["reason"] = "client gone"
    except ApiError as error:
      state["reason"] = error.message
      with contextlib.suppress(_Gone):
        await error.response()(scope, receive, answer)
    except Exception as error:  # answered already, see errors.install
      state["reason"] = repr(error)
      say("".join(traceback.format_exception(error)).rstrip())
    finally:
      self._open -= 1
      if "generation" in state:
        state["generation"].cancel()  # an answer that broke off may have left it running
      log.end(status, state.get("reason", ""))

  async def _pass(self, scope: dict[str, Any], receive: _Receive, answer: _Send) -> None:
    headers = dict(scope["headers"])
    if self._key is not None and not hmac.compare_digest(headers.get(b"authorization", b""), self._key):
      message = "the API key is missing or wrong: send it as the header `Authorization: Bearer KEY`"
      raise ApiError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
    if self._open > MAX_OPEN:
      message = f"{MAX_OPEN} requests are open, as many as this server takes; try again later"
      raise ApiError(429, message, code="queue_full", headers={"retry-after": "1"})
    body = await self._read(headers, receive)

    waits = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> _Message:
      if waits:
        return waits.pop()
      return await asyncio.Event().wait()  # forever: that the client goes away is noticed here

    # Whoever goes away has the routes cancelled, wherever they are, and they give their slots back.
    app = asyncio.create_task(self._app(scope, replay, answer))
    gone = asyncio.create_task(_until_gone(receive))
    try:
      await asyncio.wait((app, gone), return_when=asyncio.FIRST_COMPLETED)
      if not app.done():
        raise _Gone
      app.result()
    finally:
      for task in (app, gone):
        task.cancel()
      await asyncio.gather(app, gone, return_exceptions=True)

  async def _read(self, headers: dict[bytes, bytes], receive: _Receive) -> bytes:
    """The body, counted as it comes: a client needn't say how long it is, nor say the truth."""
    too_large = ApiError(
      413, f"the body is over {self._max_body} bytes", code="body_too_large", headers={"connection": "close"}
    )
    # Somewhat too large a body is read to its end and dropped: most clients look for an answer only then.
    dropped_at = _DROPPED_BODIES * self._max_body
    length = headers.get(b"content-length", b"0")
    if length.isdigit() and int(length) > dropped_at:
      raise too_large
    parts, size = [], 0
    try:
      async with asyncio.timeout(_BODY_SECONDS):
        while True:
          message = await receive()
          if message["type"] == "http.disconnect":
            raise _Gone
          part = message.get("body", b"")
          size += len(part)
          if size <= self._max_body:
            parts.append(part)
          more = message.get("more_body", False)
          if size > (self._max_body if not more else dropped_at):
            raise too_large
          if not more:
            return b"".join(parts)
    except TimeoutError:
      message = f"the body took longer than {_BODY_SECONDS} s"
      raise ApiError(408, message, code="body_timeout", headers={"connection": "close"}) from None


async def _until_gone(receive: _Receive) -> None:
  while (await receive())["type"] != "http.disconnect":
    pass
