"""The open inference protocol, version 2, that KServe and Triton speak: `/v2` and what is below it."""

import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Literal

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from deploy.http.answers import answer, json_response
from deploy.http.dialects.fields import Fields, array, string
from deploy.http.dialects.seam import Call, Native, error_answers, json_body
from deploy.http.dialects.tensors import HEADER_LENGTH, OutputTensor, TextTensor, read_text_tensor, split_body
from deploy.http.errors import HttpError, NotServedError
from deploy.http.limits import parse_json_object
from tokenalign.errors import InputError, Loc
from tokenalign.labels import check_text

MAX_ID_CHARS = 1_000
OPTIONS = ("multi_label", "min_score", "min_margin", "label_template", "long_text", "window_stride")
"""Parameters of a request that are keys of the native one, with the same meaning."""

_INPUTS = ("text", "labels")
_OUTPUTS = ("label", "scores", "labels")
_BINARY_OUTPUT = "binary_data_output"
_STRINGS = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
_SCHEMA = {
    "type": "object",
    "additionalProperties": False,
    "required": ["inputs"],
    "properties": {
        "id": {"type": ["string", "null"], "description": "Comes back in the answer."},
        "parameters": {
            "type": ["object", "null"],
            "additionalProperties": False,
            "properties": {
                **{name: {"description": "As in POST /v1/classify."} for name in OPTIONS},
                _BINARY_OUTPUT: {"type": ["boolean", "null"], "description": "Outputs as bytes behind the JSON."},
            },
        },
        "inputs": {
            "type": "array",
            "description": "text, of shape [n] or [n, 1], and labels, of shape [k] or, for each text, [n, k].",
            "items": {
                "type": "object",
                "additionalProperties": False,
                "required": ["name", "shape", "datatype"],
                "properties": {
                    "name": {"enum": list(_INPUTS)},
                    "shape": {
                        "type": "array",
                        "items": {"type": "integer", "minimum": 1},
                        "minItems": 1,
                        "maxItems": 2,
                    },
                    "datatype": {"const": "BYTES"},
                    "parameters": {
                        "type": ["object", "null"],
                        "additionalProperties": False,
                        "properties": {"binary_data_size": {"type": ["integer", "null"], "minimum": 0}},
                    },
                    "data": {"type": ["array", "null"], "items": _STRINGS, "minItems": 1},
                },
            },
        },
        "outputs": {
            "type": ["array", "null"],
            "minItems": 1,
            "description": "Which outputs to give; all of them where it is left out.",
            "items": {
                "type": "object",
                "additionalProperties": False,
                "required": ["name"],
                "properties": {
                    "name": {"enum": list(_OUTPUTS)},
                    "parameters": {
                        "type": ["object", "null"],
                        "additionalProperties": False,
                        "properties": {"binary_data": {"type": ["boolean", "null"]}},
                    },
                },
            },
        },
    },
}
_EXAMPLE = {
    "id": "42",
    "inputs": [
        {
            "name": "text",
            "shape": [1],
            "datatype": "BYTES",
            "data": ["I was charged twice for the same card purchase."],
        },
        {
            "name": "labels",
            "shape": [2],
            "datatype": "BYTES",
            "data": ["duplicate card payment", "card not received"],
        },
    ],
}


class OpenInferenceError(BaseModel):
    error: str


class ServerLive(BaseModel):
    live: bool


class ServerReady(BaseModel):
    ready: bool


class ModelReady(BaseModel):
    name: str
    ready: bool


class ServerMetadata(BaseModel):
    name: str
    version: str
    extensions: list[str]


class TensorMetadata(BaseModel):
    name: str
    datatype: Literal["BYTES", "FP32"]
    shape: list[int] = Field(description="-1 where the size depends on the request.")


class ModelMetadata(BaseModel):
    name: str
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]


class OutputSchema(BaseModel):
    name: Literal["label", "scores", "labels"]
    datatype: Literal["BYTES", "FP32"]
    shape: list[int]
    data: list[str] | list[float] | None = Field(default=None, description="Absent where it follows in binary.")
    parameters: dict[str, int] | None = Field(default=None, description="binary_data_size, where it does.")


class InferenceAnswer(BaseModel):
    model_config = ConfigDict(protected_namespaces=())

    model_name: str = Field(description="The model that answered.")
    id: str | None = Field(default=None, description="Of the request, if it had one.")
    outputs: list[OutputSchema]


def add_routes(app: FastAPI, native: Native) -> None:
    """Adds the protocol's routes to the application."""
    not_ready = error_answers(OpenInferenceError, 503)
    of_a_model = error_answers(OpenInferenceError, 404, 503)
    named = {"parameters": [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]}

    @app.get("/v2", summary="Server metadata of the open inference protocol", response_model=ServerMetadata)
    async def server_metadata() -> Response:
        return await answer(_server_metadata(), error_body)

    @app.get("/v2/health/live", summary="Whether this process runs", response_model=ServerLive)
    async def server_live() -> dict[str, bool]:
        return {"live": True}

    @app.get(
        "/v2/health/ready", summary="Whether requests can be answered", response_model=ServerReady, responses=not_ready
    )
    async def server_ready() -> Response:
        return await answer(_server_ready(native), error_body)

    @app.get(
        "/v2/models/{name:path}/ready",
        summary="Whether a model answers requests",
        response_model=ModelReady,
        responses=of_a_model,
        openapi_extra=named,
    )
    async def model_ready(request: Request) -> Response:
        return await answer(_model_ready(native, request.path_params["name"]), error_body)

    @app.post(
        "/v2/models/{name:path}/infer",
        summary="Score texts against labels by the open inference protocol",
        description="Outputs: label, the best one of each text; scores of shape [n, k], in the order of the labels as "
        "sent; and the labels themselves.",
        response_model=InferenceAnswer,
        responses=error_answers(OpenInferenceError, 404, 413, 422, 429, 500, 503, 504),
        openapi_extra={**named, **json_body(_SCHEMA, _EXAMPLE)},
    )
    async def infer(request: Request) -> Response:
        return await answer(_infer(native, request, request.path_params["name"]), error_body)

    @app.get(
        "/v2/models/{name:path}",
        summary="A model's inputs and outputs",
        response_model=ModelMetadata,
        responses=of_a_model,
        openapi_extra=named,
    )
    async def model_metadata(request: Request) -> Response:
        return await answer(_model_metadata(native, request.path_params["name"]), error_body)


@dataclass(frozen=True, slots=True)
class InferenceRequest:
    """A checked request: its inputs, and which outputs it wants, each in binary or not."""

    id: str | None
    options: dict[str, Any]
    text: TextTensor
    labels: TextTensor
    outputs: dict[str, bool]

    @classmethod
    def of(cls, body: bytes, header_length: str | None) -> "InferenceRequest":
        """The request in a body; header_length: the value of `HEADER_LENGTH`, if it was sent."""
        content, tail = split_body(body, header_length)
        fields = Fields(parse_json_object(content), ("id", "parameters", "inputs", "outputs"))
        parameters = fields.nested("parameters", (*OPTIONS, _BINARY_OUTPUT))
        inputs: dict[str, TextTensor] = {}
        given = array(fields.required("inputs", "text and labels"), fields.at("inputs"), "inputs text and labels")
        for i, item in enumerate(given):
            tensor = read_text_tensor(item, tail, (*fields.at("inputs"), i))
            _check_name(tensor.name, _INPUTS, inputs, (*tensor.loc, "name"))
            inputs[tensor.name] = tensor
        tail.close()
        for name in _INPUTS:
            if name not in inputs:
                raise InputError(f"has no input {name}; the inputs are {' and '.join(_INPUTS)}", fields.at("inputs"))
        _check_shapes(inputs["text"], inputs["labels"])
        return cls(
            id=_id(fields),
            options={name: parameters.get(name) for name in OPTIONS if name in parameters},
            text=inputs["text"],
            labels=inputs["labels"],
            outputs=_outputs(fields, parameters.flag(_BINARY_OUTPUT)),
        )

    def call(self, model: str) -> Call:
        """The request in native terms, to the head with that name."""
        labels = list(self.labels.values) if len(self.labels.shape) == 1 else self.labels.rows()
        return Call({"texts": list(self.text.values), "labels": labels, "model": model, **self.options}, self.place)

    def place(self, native: Loc) -> Loc:
        """Where in this request stands what has a place in the native one."""
        match native:
            case ("texts", int(i), *_):
                return self.text.at(i)
            case ("texts",):
                return self.text.loc
            case ("labels", int(i), int(j), *_) if len(self.labels.shape) > 1:
                return self.labels.at(i * self.labels.shape[1] + j)
            case ("labels", int(i), *_) if len(self.labels.shape) == 1:
                return self.labels.at(i)
            case ("labels", *_):
                return self.labels.loc
            case (str(name), *_) if name in OPTIONS:
                return ("parameters", *native)
        return ()

    def tensors(self, results: Sequence[dict[str, Any]]) -> list[OutputTensor]:
        """The outputs that are wanted; results: of the native answer."""
        n, k = len(results), self.labels.shape[-1]
        names = [self.labels.values] * n if len(self.labels.shape) == 1 else self.labels.rows()
        by_name = [{score["label"]: score["score"] for score in result["scores"]} for result in results]
        scores = [row[name] for row, order in zip(by_name, names, strict=True) for name in order]
        tensors = {
            # An empty string, which is no label, stands for none.
            "label": OutputTensor("label", "BYTES", (n,), [result["label"] or "" for result in results]),
            "scores": OutputTensor("scores", "FP32", (n, k), scores),
            "labels": OutputTensor("labels", "BYTES", self.labels.shape, self.labels.values),
        }
        return [tensors[name] for name in self.outputs]


async def _server_metadata() -> dict[str, Any]:
    return {"name": "tokenalign", "version": version("tokenalign"), "extensions": ["binary_tensor_data"]}


async def _server_ready(native: Native) -> dict[str, bool]:
    await native.service.ready()
    return {"ready": True}


async def _model_ready(native: Native, name: str) -> dict[str, Any]:
    _served(native, name)
    await native.service.ready()
    return {"name": name, "ready": True}


async def _model_metadata(native: Native, name: str) -> dict[str, Any]:
    _served(native, name)
    return {
        "name": name,
        "platform": "tokenalign",
        "inputs": [
            {"name": "text", "datatype": "BYTES", "shape": [-1]},
            {"name": "labels", "datatype": "BYTES", "shape": [-1]},
        ],
        "outputs": [
            {"name": "label", "datatype": "BYTES", "shape": [-1]},
            {"name": "scores", "datatype": "FP32", "shape": [-1, -1]},
            {"name": "labels", "datatype": "BYTES", "shape": [-1]},
        ],
    }


async def _infer(native: Native, request: Request, name: str) -> Response:
    _served(native, name)
    asked = InferenceRequest.of(await native.read(request), request.headers.get(HEADER_LENGTH))
    answered = await native.ask(request, asked.call(name))
    outputs, tail = [], b""
    for tensor in asked.tensors(answered["results"]):
        if asked.outputs[tensor.name]:
            without_data, data = tensor.binary()
            outputs.append(without_data)
            tail += data
        else:
            outputs.append(tensor.json())
    value: dict[str, Any] = {"model_name": name, **({} if asked.id is None else {"id": asked.id}), "outputs": outputs}
    head = json_response(value)
    if not any(asked.outputs.values()):
        return head
    content = bytes(head.body)
    return Response(content + tail, headers={HEADER_LENGTH: str(len(content))}, media_type="application/octet-stream")


def _served(native: Native, name: str) -> None:
    served = native.models()
    if name not in served:
        raise NotServedError(f"no model {reprlib.repr(name)} is served here; there is {', '.join(served)}")


def _id(fields: Fields) -> str | None:
    """The request's id; an empty one, as some clients send, is none."""
    given = fields.text("id")
    return check_text(given, fields.at("id"), MAX_ID_CHARS, "id") if given else None


def _outputs(fields: Fields, binary: bool) -> dict[str, bool]:
    """The outputs that are wanted, in their order, and whether each is in binary."""
    if "outputs" not in fields:
        return dict.fromkeys(_OUTPUTS, binary)
    wanted: dict[str, bool] = {}
    for i, item in enumerate(array(fields.get("outputs"), fields.at("outputs"), "outputs")):
        output = Fields(item, ("name", "parameters"), (*fields.at("outputs"), i))
        name = string(output.required("name", "the output's name"), output.at("name"))
        _check_name(name, _OUTPUTS, wanted, output.at("name"))
        wanted[name] = output.nested("parameters", ("binary_data",)).flag("binary_data", binary)
    return wanted


def _check_name(name: str, known: Sequence[str], taken: dict[str, Any], loc: Loc) -> None:
    if name not in known:
        raise InputError(f"is none of {', '.join(known)}", loc)
    if name in taken:
        raise InputError(f"{name} is given twice; send it once", loc)


def _check_shapes(text: TextTensor, labels: TextTensor) -> None:
    if len(text.shape) > 1 and text.shape[1] != 1:
        raise InputError(f"must be [n] or [n, 1]; it is {list(text.shape)}", (*text.loc, "shape"))
    if len(labels.shape) > 1 and labels.shape[0] != text.shape[0]:
        raise InputError(
            f"has labels for {labels.shape[0]:,} texts, but there are {text.shape[0]:,}; "
            "send labels of shape [k] for all texts, or [n, k] with a row for each",
            (*labels.loc, "shape"),
        )


def error_body(found: HttpError) -> dict[str, Any]:
    """An error as this dialect's clients read it."""
    return {"error": found.message}
