"""An encoder that gives NaN: a typed error for who asked, nothing of it in a cache, and none of it in an answer."""

import asyncio
import json
import math
from typing import Any

import pytest

LABELS = ["weather", "sport", "cooking"]


def poisoned(batch: Any, states: Any) -> Any:
    """The states with one number of the last token gone."""
    states = states.clone()
    states[-1, 0] = math.nan
    return states


def strict(body: bytes) -> Any:
    """The JSON value; NaN and Infinity, which Python's parser would take, are refused."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} in JSON")

    return json.loads(body, parse_constant=refuse)


@pytest.mark.parametrize("known_labels", [False, True], ids=["labels and text", "text alone"])
async def test_nan_from_the_encoder(run_stack: Any, gated: Any, bert: Any, known_labels: bool) -> None:
    """The request fails as numerical, and the same one is right as soon as the encoder is: nothing bad was kept."""
    async with run_stack(gated.model) as stack:
        if known_labels:
            await stack.ask(text="snow", labels=LABELS)
        gated.backbone.change = poisoned
        response = await stack.post(text="rain", labels=LABELS, return_logits=True)
        assert response.status_code == 500
        assert strict(response.content)["error_type"] == "numerical"
        await stack.drain()  # labels may still be encoded, for whoever asks for the same ones next
        gated.backbone.change = lambda batch, states: states
        again = await stack.post(text="rain", labels=LABELS, return_logits=True)
        [result] = strict(again.content)["results"]
        expected = bert.classifier("rain", LABELS, return_logits=True)
        logits = {score["label"]: score["logit"] for score in result["scores"]}
        assert logits == pytest.approx(expected["logits"], abs=0.05)


async def test_one_bad_text_fails_alone(run_stack: Any, gated: Any, until: Any) -> None:
    """Others that shared its batch are answered: halves of the batch are tried, and halves of these."""
    texts = ["rain", "ice", "fog", "a text of many more words than any other text that was sent so far", "sun"]
    async with run_stack(gated.model) as stack:
        await stack.ask(text="snow", labels=LABELS)
        gated.backbone.change = lambda batch, states: poisoned(batch, states) if batch.lengths.max() > 12 else states
        stack.slots = 0
        asked = [asyncio.create_task(stack.post(text=text, labels=LABELS)) for text in texts]
        await until(lambda: stack.waiting_texts == len(texts))
        stack.slots = 2
        responses = await asyncio.gather(*asked)
        assert [response.status_code for response in responses] == [200, 200, 200, 500, 200]
        for response in responses:
            strict(response.content)
