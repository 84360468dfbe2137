"""The HTTP face on a live socket, in a thread of its own, for tests."""

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator

import httpx
from prometheus_client import CollectorRegistry

from MaxText.inference.openai.app import create_app
from MaxText.inference.openai.prompts import Face
from MaxText.inference.openai.server import Server


class Live:
  """A running face: `url`, and an httpx client on it."""

  def __init__(self, port: int):
    self.port = port
    self.url = f"http://127.0.0.1:{port}"
    self.client = httpx.Client(base_url=self.url, timeout=20)

  def post(self, path: str, body: object, **more) -> httpx.Response:
    return self.client.post(path, json=body, **more)

  def events(self, path: str, body: dict) -> list:
    """The data of a stream's events: parsed, but for [DONE]."""
    response = self.client.post(path, json={**body, "stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = response.text.split("\n\n")
    assert blocks.pop() == ""
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    data = [block.removeprefix("data: ") for block in blocks]
    return [d if d == "[DONE]" else json.loads(d) for d in data]


@contextlib.contextmanager
def serving(face: Face, key: str | None = None, registry: CollectorRegistry | None = None) -> Iterator[Live]:
  server = Server(create_app(face, registry or CollectorRegistry(), key), "127.0.0.1", 0)
  thread = threading.Thread(target=lambda: asyncio.run(server.run()))
  thread.start()
  live = Live(server.port)
  try:
    yield live
  finally:
    live.client.close()
    server.stop()
    thread.join(20)
    assert not thread.is_alive()
