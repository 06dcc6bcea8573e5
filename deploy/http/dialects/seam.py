"""Where dialects meet the native API: a native request goes in, its answer comes out, errors are told in their terms.

Each dialect asks what `POST /v1/classify` would be asked, through the same checks and the same service, so its scores
are the native ones.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from pydantic import BaseModel
from starlette.requests import Request

from deploy.http.limits import SLOW, parse_json_object, read_body
from deploy.http.schemas import ClassifyQuery, label_set_id, parse_classify
from deploy.http.tenants import Tenants
from deploy.label_sets import Definition, UnknownLabelSetError
from deploy.request_context import lap
from deploy.settings import LimitSettings
from tokenalign.errors import InputError, Loc
from tokenalign.labels import LabelSet

Place = Callable[[Loc], Loc]
"""Where in a dialect's request that stands what has the given place in the native one."""


class Service(Protocol):
    """What dialects need of the ingress."""

    def check_room(self) -> None:
        """Raises `QueueFull` where a request of one text would be refused."""

    async def classify(self, query: ClassifyQuery) -> dict[str, Any]:
        """The native answer to a good request."""

    async def label_set(self, set_id: str, *, tenant: str | None) -> Definition:
        """The label set with that id; else `UnknownLabelSetError` or `LabelSetsUnavailableError`."""

    def predict_label_set(self) -> str | None:
        """The id of the label set that the settings name for `/predict`, None where they name none."""

    async def ready(self) -> None:
        """Returns when requests can be answered; else raises `NotReadyError`."""

    def models_info(self) -> dict[str, Any]:
        """The heads that are served, for `GET /v1/models`; `NotReadyError` before they are known."""

    def logit_scale(self, model: str) -> float:
        """What a mean of cosines is multiplied with to be a logit of the head with that name."""


@dataclass(frozen=True, slots=True)
class Call:
    """A dialect's request in native terms.

    body: of `POST /v1/classify`; place: leads errors back; keep_labels: whether label rows may stay in the store
    """

    body: dict[str, Any]
    place: Place
    keep_labels: bool = True


@dataclass(frozen=True, slots=True)
class Native:
    """The native API, as dialects ask it for a request of theirs."""

    service: Service
    limits: LimitSettings
    tenants: Tenants

    async def read(self, request: Request) -> bytes:
        """The request's body, of the size that is allowed; `QueueFull` before it is read where it would be refused."""
        self.service.check_room()
        sent = await read_body(request, self.limits)
        lap("read")
        return sent

    async def read_json(self, request: Request) -> dict[str, Any]:
        """The request's JSON object."""
        return parse_json_object(await self.read(request))

    def models(self) -> list[str]:
        """The names of the heads that are served, the default one first; `NotReadyError` before they are known."""
        return [model["name"] for model in self.service.models_info()["models"]]

    async def ask(self, request: Request, call: Call) -> dict[str, Any]:
        """The native answer; errors are those of the native route, their places in the dialect's terms."""
        tenant = self.tenants.of(request)
        try:
            set_id = label_set_id(call.body)
            known = None if set_id is None else await self._labels(set_id, tenant, call.place)
            query = parse_classify(call.body, self.limits, known)
            lap("validate")  # parsing too: what a dialect reads it checks as it goes
            return await self.service.classify(replace(query, tenant=tenant, keep_labels=call.keep_labels))
        except InputError as error:
            raise InputError(error.message, call.place(error.loc)) from error

    async def _labels(self, set_id: str, tenant: str | None, place: Place) -> LabelSet:
        try:
            return (await self.service.label_set(set_id, tenant=tenant)).labels
        except UnknownLabelSetError as error:
            raise UnknownLabelSetError(set_id, place(("label_set",))) from error


def moved(places: Mapping[Loc, Loc]) -> Place:
    """The place that follows a table of first parts, the longest one that fits; what fits none belongs to the whole."""
    table = sorted(places.items(), key=lambda row: -len(row[0]))

    def place(loc: Loc) -> Loc:
        for start, there in table:
            if loc[: len(start)] == start:
                return (*there, *loc[len(start) :])
        return ()

    return place


def json_body(schema: dict[str, Any], example: dict[str, Any]) -> dict[str, Any]:
    """The documentation of a JSON body that is read by us, not by FastAPI."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema, "example": example}}}}


def error_answers(model: type[BaseModel], *statuses: int) -> dict[int | str, dict[str, Any]]:
    """The documentation of a dialect's errors."""
    meaning = {
        404: "What the request names is not served here.",
        408: SLOW,
        413: "The body is over the limit.",
        422: "A value of the request is not acceptable; the message names it.",
        429: "Overloaded; see Retry-After.",
        500: "The service failed; it was logged.",
        503: "Not ready, or changing to another model; see Retry-After.",
        504: "No answer within the time limit.",
    }
    read = (408,) if 413 in statuses else ()
    return {status: {"model": model, "description": meaning[status]} for status in sorted((*read, *statuses))}
