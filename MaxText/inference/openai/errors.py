"""What a refused or failed request is told, in OpenAI's form."""

import json
import reprlib
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from MaxText.inference.serving.requests import InvalidRequest, Overloaded, Rejected

_LONGEST_NAME = 80
_repr = reprlib.Repr(maxstring=_LONGEST_NAME, maxother=_LONGEST_NAME, maxlist=4, maxdict=4, maxlevel=2)

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ErrorDetail(BaseModel):
  message: str
  type: str
  param: str | None
  code: str | None


class ErrorAnswer(BaseModel):
  error: ErrorDetail


class ApiError(Exception):
  """Ends a request with an HTTP status.

  Args:
    status: 4xx, or 5xx where it isn't the client's fault.
    message: one line: what is wrong, what is possible.
    param: the field that is to blame; a client's own name is cut to a bearable length.
    code: a word for programs.
    headers: more headers of the answer.
  """

  def __init__(
    self,
    status: int,
    message: str,
    param: str | None = None,
    code: str | None = None,
    headers: Mapping[str, str] | None = None,
  ):
    super().__init__(message)
    self.status, self.message, self.code, self.headers = status, message, code, headers
    self.param = param[:_LONGEST_NAME] if param else param

  def body(self) -> str:
    """JSON in ASCII: a client's words may hold half a surrogate pair, which UTF-8 can't carry."""
    kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
    return json.dumps({"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}})

  def response(self) -> Response:
    return Response(self.body(), self.status, self.headers, "application/json")


def shown(value: Any) -> str:
  """A client's value as it may appear in an error: quoted, in ASCII, and short."""
  return _repr.repr(value)


def rejected(error: Rejected) -> ApiError:
  """The core's refusal as an HTTP error."""
  if isinstance(error, InvalidRequest):
    return ApiError(400, str(error))
  if isinstance(error, Overloaded):
    return ApiError(429, str(error), code="queue_full", headers={"retry-after": "1"})
  return ApiError(503, str(error), code="unavailable", headers={"retry-after": "5"})


def failed(reason: str, message: str, serving: bool) -> ApiError:
  """A generation that ended without an answer as an HTTP error.

  Args:
    reason, message: the core's: "error", "timeout" or "cancelled".
    serving: the server goes on; else it is shutting down or has failed.
  """
  if reason == "timeout":
    return ApiError(504, message or "the request took longer than the server allows", code="timeout")
  return ApiError(
    500 if serving else 503, message or f"the generation ended early ({reason})", code=f"generation_{reason}"
  )


def _invalid(error: RequestValidationError) -> ApiError:
  """The first complaint about a body, as one line."""
  first = error.errors()[0]
  if first["type"] == "json_invalid":
    return ApiError(400, f"the body isn't JSON: {first['ctx']['error']}", code="invalid_json")
  param = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"][1:]).lstrip(".")
  if not param:
    return ApiError(400, "the body must be a JSON object, sent with content-type: application/json")
  if first["type"] == "missing":
    return ApiError(400, f"{param} is missing", param, "missing_parameter")
  param = param[:_LONGEST_NAME]
  return ApiError(400, f"{param}: {first['msg']}, got {shown(first['input'])}", param, "invalid_value")


def install(app: FastAPI) -> None:
  """Has every error of an app answered in OpenAI's form, and noted in `request.state.reason` for the log."""

  def answer(request: Request, error: ApiError) -> Response:
    request.state.reason = error.message
    return error.response()

  @app.exception_handler(ApiError)
  async def _(request: Request, error: ApiError) -> Response:
    return answer(request, error)

  @app.exception_handler(Rejected)
  async def _(request: Request, error: Rejected) -> Response:
    return answer(request, rejected(error))

  @app.exception_handler(RequestValidationError)
  async def _(request: Request, error: RequestValidationError) -> Response:
    return answer(request, _invalid(error))

  @app.exception_handler(HTTPException)
  async def _(request: Request, error: HTTPException) -> Response:
    message = str(error.detail)
    if error.status_code == 404:
      message = f"there is no {shown(request.url.path)} here; /docs shows what there is"
    return answer(request, ApiError(error.status_code, message, headers=error.headers))

  @app.exception_handler(Exception)
  async def _(request: Request, error: Exception) -> Response:
    return answer(request, ApiError(500, "an error inside the server; its log says more", code="internal_error"))
