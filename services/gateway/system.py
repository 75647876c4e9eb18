"""/v1/models and /v1/system."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
from aiohttp import web
from msgspec import Struct

from paceline import subjects
from paceline.bus import Bus
from paceline.errors import NoResponders, NotFound, RequestTimeout, Unavailable
from paceline.tokenizer import ModelCard
from paceline.wire import DrainRequest, Message, Name, SystemQuery
from services.gateway.http import body_of, identified, json_response
from services.gateway.json_body import converted, json_object
from services.gateway.tenants import Keyring

QUERY_S = 2.0
DRAIN_S = 120.0
CREATED = 1735689600
"""OpenAI's format wants a time for a model; the models here have none that means anything."""


@dataclass(frozen=True)
class Models:
    card: ModelCard
    keyring: Keyring

    async def listed(self, request: web.Request) -> web.Response:
        identified(request, self.keyring)
        return json_response({"object": "list", "data": [self._entry()]})

    async def one(self, request: web.Request) -> web.Response:
        """With ?card=1 the whole model card, from which an edge makes its tokenizer."""
        identified(request, self.keyring)
        name = request.match_info["model"]
        if name != self.card.model:
            raise NotFound(f"the model {name!r} is not served here", code="model_not_found", param="model")
        if request.query.get("card") not in ("1", "true"):
            return json_response(self._entry())
        response = json_response(msgspec.to_builtins(self.card))
        response.enable_compression()
        return response

    def _entry(self) -> dict[str, Any]:
        extension = msgspec.to_builtins(self.card)
        del extension["tokenizer"], extension["model"]
        head = {"id": self.card.model, "object": "model", "created": CREATED, "owned_by": "paceline"}
        return {**head, "paceline": extension}


class DrainBody(Struct, frozen=True, forbid_unknown_fields=True):
    verifier: Name
    undo: bool = False
    sleep: bool = False


@dataclass(frozen=True)
class System:
    bus: Bus
    keyring: Keyring

    async def report(self, request: web.Request) -> web.Response:
        """What the policy sees: processes, their load, its decisions with the reasons."""
        identified(request, self.keyring)
        return await self._ask(subjects.SYSTEM.at(), SystemQuery(), QUERY_S, "policy")

    async def drain(self, request: web.Request) -> web.Response:
        """Answers when the verifier's sessions are elsewhere. For admin keys."""
        identified(request, self.keyring).require_admin()
        body = converted(json_object(await body_of(request)), DrainBody)
        wish = DrainRequest(verifier=body.verifier, undo=body.undo, sleep=body.sleep)
        return await self._ask(subjects.DRAIN.at(), wish, DRAIN_S, "migrator")

    async def _ask(self, subject: str, message: Message, timeout_s: float, component: str) -> web.Response:
        try:
            answer = await self.bus.request(subject, message, timeout_s=timeout_s)
        except NoResponders as error:
            raise Unavailable(f"no {component} is running", code=f"{component}_unavailable") from error
        except RequestTimeout as error:
            detail = f"the {component} did not answer within {timeout_s:g} s"
            raise Unavailable(detail, code=f"{component}_unavailable") from error
        return json_response(msgspec.to_builtins(answer, str_keys=True))
