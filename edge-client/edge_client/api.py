"""The gateway's HTTP side, as far as an edge needs it: model cards, the system's state, draining."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import msgspec
import orjson

from edge_client.faults import NoGateway, plain_cause
from paceline import wire
from paceline.errors import BadRequest, ModelError, NotFound, RequestError, request_error
from paceline.model_card import ModelCard

_TIMEOUT_S = 15.0
_DRAIN_TIMEOUT_S = 300.0
M = TypeVar("M", bound=wire.Message)


class GatewayApi:
    """Raises the RequestError that the gateway answered with, NoGateway when none answers."""

    def __init__(self, http: aiohttp.ClientSession, url: str, key: str) -> None:
        self.url = url.rstrip("/")
        self._http = http
        self._headers = {"Authorization": f"Bearer {key}"}

    async def card(self, model: str, cache: Path | None = None) -> ModelCard:
        """The target's card. With `cache`, a directory, a card that was fetched before is used again as long as it
        is this model's and the gateway names the same fingerprint, context, template and end ids."""
        described = _described(await self._entry(model), model)
        kept = None if cache is None else cache / f"{described['fingerprint']}.json"
        if kept is not None and (card := await asyncio.to_thread(_reusable, kept, model, described)) is not None:
            return card
        card = _card(await self._call("GET", f"/v1/models/{model}?card=1"))
        if kept is not None:
            await asyncio.to_thread(_keep, kept, card)
        return card

    async def _entry(self, model: str) -> Any:
        try:
            return await self._call("GET", f"/v1/models/{model}")
        except NotFound as error:
            served = await self._served()
            if error.code != "model_not_found" or not served:
                raise
            message = f"model `{model}` is not served at {self.url}; served there: {', '.join(served)} (choose with -m)"
            raise NotFound(message, code=error.code, param=error.param) from error

    async def _served(self) -> list[str]:
        """Names of the models that can be asked for; none where the gateway tells no list."""
        try:
            listed = await self._call("GET", "/v1/models")
            return [str(item["id"]) for item in listed["data"]]
        except (RequestError, KeyError, TypeError):
            return []

    async def system(self) -> wire.SystemReport:
        return _decoded(await self._call("GET", "/v1/system"), wire.SystemReport)

    async def drain(self, verifier: str, *, undo: bool, sleep: bool = False) -> wire.DrainReport:
        body = orjson.dumps({"verifier": verifier, "undo": undo, "sleep": sleep})
        data = await self._call("POST", "/v1/system/drain", body=body, timeout_s=_DRAIN_TIMEOUT_S)
        return _decoded(data, wire.DrainReport)

    async def _call(self, method: str, path: str, *, body: bytes | None = None, timeout_s: float = _TIMEOUT_S) -> Any:
        """The JSON that came back."""
        headers = self._headers | ({"Content-Type": "application/json"} if body else {})
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._http.request(
                method, self.url + path, data=body, headers=headers, timeout=timeout
            ) as answer:
                data = await answer.read()
        except aiohttp.InvalidURL as error:
            raise NotFound(f"`{self.url}` is no gateway URL (expected http://host:port)") from error
        except TimeoutError as error:
            raise NoGateway(f"the gateway at {self.url} did not answer within {timeout_s:.0f} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise NoGateway(f"no gateway answers at {self.url}: {plain_cause(error)}") from error
        value = _json(data)
        if answer.status >= 400 or value is None:
            raise _refusal(answer.status, value, answer.content_type, self.url)
        return value


def _json(data: bytes) -> Any:
    """None for anything else: a page of HTML comes from somebody else's server."""
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        return None


def _refusal(status: int, value: Any, kind: str, url: str) -> RequestError:
    try:
        fault = value["error"]
        return request_error(status, fault.get("code") or "error", fault["message"], fault.get("param"))
    except (KeyError, TypeError, AttributeError):
        return NoGateway(f"what answers at {url} is no Paceline gateway (HTTP {status}, {kind})")


def _decoded(value: Any, kind: type[M]) -> M:
    """A message in a JSON answer, with or without its type tag."""
    try:
        return msgspec.convert({"type": kind.__struct_config__.tag, **value}, kind, str_keys=True)
    except (msgspec.ValidationError, TypeError) as error:
        raise BadRequest(f"the gateway's answer is of another version: {error}", code="version_mismatch") from error


def _card(value: Any) -> ModelCard:
    try:
        return msgspec.convert(value.get("card", value), ModelCard)
    except (msgspec.ValidationError, AttributeError) as error:
        raise BadRequest(f"the gateway's model card is of another version: {error}", code="version_mismatch") from error


def _described(answer: Any, model: str) -> dict[str, Any]:
    described = answer.get("paceline") if isinstance(answer, dict) else None
    if not isinstance(described, dict) or "fingerprint" not in described:
        raise NotFound(f"model `{model}`: the server is no Paceline gateway (no `paceline` in its model description)")
    return described


def _reusable(path: Path, model: str, described: dict[str, Any]) -> ModelCard | None:
    """None where nothing fits. Models of one vocabulary, such as one target's two pairs, have one fingerprint."""
    if not path.exists():
        return None
    try:
        card = ModelCard.load(path)
    except ModelError:  # a damaged cache entry is fetched again
        return None
    known = orjson.loads(msgspec.json.encode(card))
    same = all(known[name] == value for name, value in described.items() if name in known)
    return card if same and card.model == model else None


def _keep(path: Path, card: ModelCard) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    card.save(path)
