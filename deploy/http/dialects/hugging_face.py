"""Hugging Face's zero-shot classification task: `POST /hf/zero-shot-classification`."""

import re
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from deploy.http.answers import answer
from deploy.http.dialects.fields import Fields, one_or_many
from deploy.http.dialects.seam import Call, Native, error_answers, json_body, moved
from deploy.http.errors import HttpError
from tokenalign.errors import InputError, Loc

PATH = "/hf/zero-shot-classification"
PLACEHOLDER = "{}"
FIRST_WITH_LISTS = (1, 1, 5)
"""The first version of huggingface_hub that reads a list of label and score; those before read labels and scores."""

_HUB_VERSION = re.compile(r"\bhf_hub/(\d{1,6})\.(\d{1,6})(?:\.(\d{1,6}))?", re.ASCII)
_PLACE = moved(
    {
        ("text",): ("inputs",),
        ("texts",): ("inputs",),
        ("labels",): ("parameters", "candidate_labels"),
        ("label_template",): ("parameters", "hypothesis_template"),
        ("multi_label",): ("parameters", "multi_label"),
    }
)
_TEXTS = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": 1}]}
_SCHEMA = {
    "type": "object",
    "additionalProperties": False,
    "required": ["inputs", "parameters"],
    "properties": {
        "inputs": {**_TEXTS, "description": "The text, or several: then there is an answer for each, in order."},
        "parameters": {
            "type": "object",
            "additionalProperties": False,
            "required": ["candidate_labels"],
            "properties": {
                "candidate_labels": {
                    **_TEXTS,
                    "description": "A list of labels, commas and all, or one string with a comma between labels.",
                },
                "multi_label": {
                    "type": ["boolean", "null"],
                    "default": False,
                    "description": "Independent scores, where the model has a calibration for them.",
                },
                "hypothesis_template": {
                    "type": ["string", "null"],
                    "description": "Words around each label, with {} where it stands; they are context and not scored. "
                    "The default is the model's own.",
                },
            },
        },
        "options": {
            "type": ["object", "null"],
            "description": "Older clients send it; nothing in it has a meaning here.",
        },
    },
}
_EXAMPLE = {
    "inputs": "I was charged twice for the same card purchase.",
    "parameters": {"candidate_labels": ["duplicate card payment", "card not received"]},
}


class LabelScore(BaseModel):
    label: str
    score: float


class LabelsAndScores(BaseModel):
    sequence: str
    labels: list[str]
    scores: list[float]


class HuggingFaceError(BaseModel):
    error: str


def add_routes(app: FastAPI, native: Native) -> None:
    """Adds the task's route to the application."""

    @app.post(
        PATH,
        summary="Zero-shot classification as Hugging Face clients ask for it",
        description="For `InferenceClient(model=url)` of huggingface_hub and @huggingface/inference. Best label first. "
        "huggingface_hub before 1.1.5 gets the form with labels and scores, everybody else the list.",
        response_model=list[LabelScore] | list[list[LabelScore]] | LabelsAndScores | list[LabelsAndScores],
        responses=error_answers(HuggingFaceError, 413, 422, 429, 500, 503, 504),
        openapi_extra=json_body(_SCHEMA, _EXAMPLE),
    )
    async def zero_shot_classification(request: Request) -> Response:
        return await answer(_answer(native, request), error_body)


def translate(body: dict[str, Any]) -> Call:
    """The task's request in native terms; `InputError` in its own."""
    fields = Fields(body, ("inputs", "parameters", "options"))
    if not isinstance(fields.get("options"), dict | None):
        raise InputError("must be an object; leave it out, nothing in it has a meaning here", fields.at("options"))
    inputs = fields.required("inputs", "the text, or a list of texts")
    fields.required("parameters", "an object with candidate_labels")
    parameters = fields.nested("parameters", ("candidate_labels", "multi_label", "hypothesis_template"))
    texts = one_or_many(inputs, fields.at("inputs"))
    native: dict[str, Any] = {"text" if isinstance(texts, str) else "texts": texts, "labels": _labels(parameters)}
    if parameters.flag("multi_label"):
        native["multi_label"] = True
    template = parameters.text("hypothesis_template")
    if template is not None:
        native["label_template"] = _label_template(template, parameters.at("hypothesis_template"))
    return Call(native, _PLACE)


def with_labels_and_scores(user_agent: str) -> bool:
    """Whether the client reads `{"sequence", "labels", "scores"}` instead of a list of label and score."""
    found = _HUB_VERSION.search(user_agent)
    return found is not None and tuple(int(part or 0) for part in found.groups()) < FIRST_WITH_LISTS


async def _answer(native: Native, request: Request) -> Any:
    body = await native.read_json(request)
    call = translate(body)
    results = (await native.ask(request, call))["results"]
    if with_labels_and_scores(request.headers.get("user-agent", "")):
        texts = call.body["texts"] if "texts" in call.body else [call.body["text"]]
        answers: list[Any] = [_labels_and_scores(text, r["scores"]) for text, r in zip(texts, results, strict=True)]
    else:
        answers = [result["scores"] for result in results]
    return answers if "texts" in call.body else answers[0]


def _labels_and_scores(text: str, scores: list[dict[str, Any]]) -> dict[str, Any]:
    return {"sequence": text, "labels": [s["label"] for s in scores], "scores": [s["score"] for s in scores]}


def _labels(parameters: Fields) -> list[str]:
    given = parameters.required("candidate_labels", "the labels as a list")
    labels = one_or_many(given, parameters.at("candidate_labels"))
    if isinstance(labels, str):
        return [label.strip() for label in labels.split(",") if label.strip()]
    return labels


def _label_template(template: str, loc: Loc) -> str:
    """`hypothesis_template` as a label template, which has a name in its braces."""
    if template.count(PLACEHOLDER) != 1:
        raise InputError(f"must hold {PLACEHOLDER} exactly once, where the label stands; leave it out otherwise", loc)
    return template.replace(PLACEHOLDER, "{label}")


def error_body(found: HttpError) -> dict[str, Any]:
    """An error as this dialect's clients read it."""
    return {"error": found.message}
