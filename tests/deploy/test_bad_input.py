"""Strange and wrong input over HTTP through the whole application: an answer, or an error that names the place."""

import json
import random
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest

from tokenalign.errors import InputError

Stack = Any
LABELS = ["card payment", "cash", "declined"]

ODD_TEXTS = {
    "only punctuation": "?!... --- !!!",
    "one mark": "?",
    "only emoji": "👍🏽🎉👨‍👩‍👧‍👦",
    "currency": "$ + €",
    "right to left": "שלום עולם، مرحبا بالعالم",
    "mixed directions": "pay \u202eשלום\u202c now",
    "combining": "e\u0301\u0327te\u0301 z" + "\u0300" * 300,
    "cjk": "日本語のカード支払い",
    "control tokens": "[SEP] [CLS] [PAD] [MASK] <|endoftext|> <|im_start|>user <think> </think> <tool_call>",
    "template": "{text} {label} %s {0} \\n",
    "invisible inside": "card\u200bpayment\u00adcash\ufeff",
    "control characters": "card\x01\x02\x1f\x7fcash\x85",
    "private use": "\ue000\uf8ff card",
    "non-characters": "\ufffe\uffff\U0010ffff card",
    "line ends": "card\r\npayment\u2028cash\u2029",
    "one long word": "x" * 5_000,
    "html": "<script>alert('x')</script> &amp;",
}


async def test_odd_texts_are_answered(any_stack: Stack, any_pair: Any) -> None:
    """Whatever can be read is answered as the library answers, and each match is a piece of the text as sent."""
    texts = list(ODD_TEXTS.values())
    answer = await any_stack.ask(texts=texts, labels=LABELS, explain="all")
    expected = any_pair.classifier(texts, LABELS, explain="all")
    for name, result, reference in zip(ODD_TEXTS, answer["results"], expected, strict=True):
        scores = {score["label"]: score["score"] for score in result["scores"]}
        assert scores == pytest.approx(reference["scores"], abs=1e-3), name
        assert result["label"] == reference["label"], name
        assert result["truncation"] == reference["truncation"], name
        assert len(result["matches"]) == len(reference["matches"]), name
        for match in result["matches"]:
            assert ODD_TEXTS[name][slice(*match["span"])] == match["text"] != "", name


async def test_odd_texts_are_labels_too(any_stack: Stack, any_pair: Any) -> None:
    """The same strings as candidates come back as sent, with the library's scores and warnings."""
    labels = list(ODD_TEXTS.values())
    answer = await any_stack.ask(text="card payment", labels=labels, explain="all")
    [result] = answer["results"]
    expected = any_pair.classifier("card payment", labels)
    assert {score["label"]: score["score"] for score in result["scores"]} == pytest.approx(expected["scores"], abs=1e-3)
    assert answer["warnings"] == expected["warnings"]
    assert {match["label"] for match in result["matches"]} == set(labels)
    for match in result["matches"]:
        assert match["label"][slice(*match["label_span"])] == match["token"] != ""


def library_error(classifier: Any, body: dict[str, Any]) -> InputError | None:
    """What the library raises for a request, or None."""
    try:
        classifier(body["text"], body["labels"])
    except InputError as error:
        return error
    return None


@pytest.mark.parametrize("text", ["\u200b", "\u0301\u0301", "\ufeff", "\u00ad", "\u2060", "\ue000", "\x01"])
async def test_what_the_library_can_not_read(any_stack: Stack, any_pair: Any, text: str) -> None:
    """A text of which the tokenizer leaves nothing is refused in the library's words; one that it reads is answered."""
    for body, where in (
        ({"text": text, "labels": LABELS}, "text"),
        ({"text": "card", "labels": ["a", text]}, "labels"),
    ):
        expected = library_error(any_pair.classifier, body)
        if expected is None:
            await any_stack.ask(**body)
            continue
        refusal = refused(await any_stack.post(**body))
        assert (refusal["error"], refusal["loc"]) == (str(expected), list(expected.loc))
        assert refusal["loc"][0] == where


@pytest.mark.parametrize("over", [-1, 0, 1])
async def test_at_the_token_limit(any_stack: Stack, any_pair: Any, over: int) -> None:
    """Texts of exactly 127 and 128 tokens are read whole; one of 129 is answered, and says where it was cut."""
    tokenizer, limit = any_pair.served.tokenizer, any_pair.served.config.max_length
    words = 0
    while len(tokenizer.documents(["a " * words + "a"]).tokens.values) < limit + min(over, 0):
        words += 1
    text = "a " * (words + max(over, 0)) + "a"
    answer = await any_stack.ask(text=text, labels=LABELS)
    [result] = answer["results"]
    assert result["truncation"] == any_pair.classifier(text, LABELS)["truncation"]
    if over == 1:
        assert result["truncation"]["tokens"] == limit + 1
        assert result["truncation"]["used"] == answer["usage"]["text_tokens"] == limit
        assert 0 < result["truncation"]["cut_at"] < len(text)
    else:
        assert result["truncation"] is None
        assert answer["usage"]["text_tokens"] == limit + over


async def test_a_thousand_labels(stack: Stack, bert: Any) -> None:
    """A list of 1,000 labels is scored whole, from the encoder at first and from the cache then."""
    rng = random.Random(0)
    words = ["card", "payment", "cash", "declined", "charged", "twice", "received", "not", "was", "top-up"]
    labels = [f"{' '.join(rng.sample(words, 3))} {i}" for i in range(1_000)]
    answer = await stack.ask(text="my card payment was declined", labels=labels)
    [result] = answer["results"]
    assert len(result["scores"]) == answer["usage"]["labels"] == 1_000
    assert sum(score["score"] for score in result["scores"]) == pytest.approx(1, abs=1e-4)
    again = await stack.ask(text="my card payment was declined", labels=labels)
    assert again["usage"]["labels_cached"] == 1_000
    assert again["results"] == answer["results"]
    expected = bert.classifier("my card payment was declined", labels)["scores"]
    assert {score["label"]: score["score"] for score in result["scores"]} == pytest.approx(expected, abs=1e-3)


def refused(response: httpx.Response, status: int = 422, error_type: str = "invalid_input") -> dict[str, Any]:
    """The error, of the one shape that errors have, with a remedy in it."""
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()
    assert error.keys() == {"error", "error_type", "loc", "request_id"}
    assert error["error_type"] == error_type
    assert ";" in error["error"] or "must be" in error["error"]
    assert len(error["error"]) < 500
    return error


BAD: dict[str, tuple[dict[str, Any], list[Any], str]] = {
    "one label": ({"text": "a", "labels": ["a"]}, ["labels"], "1 label given, at least 2 needed"),
    "no labels": ({"text": "a", "labels": []}, ["labels"], "0 labels given"),
    "the same label twice": ({"text": "a", "labels": ["a", "b", "a"]}, ["labels", 2], "same label as number 0"),
    "twins": ({"text": "a", "labels": ["caf\u00e9", "cafe\u0301"]}, ["labels", 1], "same label as number 0"),
    "trimmed twins": ({"text": "a", "labels": ["a", "a "]}, ["labels", 1], "same label as number 0"),
    "empty text": ({"text": "", "labels": LABELS}, ["text"], "empty"),
    "white space": ({"texts": ["a", " \t\u3000"], "labels": LABELS}, ["texts", 1], "empty"),
    "empty label": ({"text": "a", "labels": ["a", ""]}, ["labels", 1], "empty"),
    "no visible text": ({"text": "\u200b", "labels": LABELS}, ["text"], "no character that the tokenizer can read"),
    "no visible text among others": ({"texts": ["a", "b", "\u200b"], "labels": LABELS}, ["texts", 2], "no character"),
    "no visible label": ({"text": "a", "labels": ["a", "b", "\u200b"]}, ["labels", 2], "no character"),
    "surrogate": ({"text": "a\ud800", "labels": LABELS}, ["text"], "lone surrogate U+D800 at position 1"),
    "surrogate in a label": ({"text": "a", "labels": ["a", "\udfff"]}, ["labels", 1], "lone surrogate U+DFFF"),
    "NUL": ({"text": "a\x00", "labels": LABELS}, ["text"], "NUL character at position 1"),
    "NUL in a label": ({"text": "a", "labels": ["a", {"name": "b\x00"}]}, ["labels", 1, "name"], "NUL"),
    "long text": ({"text": "x" * 100_001, "labels": LABELS}, ["text"], "has 100,001 characters, at most 100,000"),
    "long label": ({"text": "a", "labels": ["a", "x" * 100_001]}, ["labels", 1], "100,001 characters"),
    "many texts": ({"texts": ["a"] * 1_025, "labels": LABELS}, ["texts"], "1,025 texts given, at most 1,024"),
    "many labels": (
        {"text": "a", "labels": [str(i) for i in range(2_049)]},
        ["labels"],
        "2,049 labels given, at most 2,048",
    ),
    "both": ({"text": "a", "texts": ["a"], "labels": LABELS}, ["text"], "both text and texts"),
    "neither": ({"labels": LABELS}, ["text"], "neither text nor texts"),
    "no texts": ({"texts": [], "labels": LABELS}, ["texts"], "empty list"),
    "labels missing": ({"text": "a"}, ["labels"], "is missing"),
    "unknown key": ({"text": "a", "labels": LABELS, "topk": 1}, ["topk"], "is not a key"),
    "explain": ({"text": "a", "labels": LABELS, "explain": "yes"}, ["explain"], "'yes'"),
    "top_k 0": ({"text": "a", "labels": LABELS, "top_k": 0}, ["top_k"], "it is 0"),
    "top_k true": ({"text": "a", "labels": LABELS, "top_k": True}, ["top_k"], "it is True"),
    "top_k 1.5": ({"text": "a", "labels": LABELS, "top_k": 1.5}, ["top_k"], "it is 1.5"),
    "a number": ({"text": 3, "labels": LABELS}, ["text"], "must be a string"),
    "a string of texts": ({"texts": "a", "labels": LABELS}, ["texts"], "must be a list"),
    "a string of labels": ({"text": "a", "labels": "a, b"}, ["labels"], "must be a list"),
    "a nested list": ({"texts": [["a"]], "labels": LABELS}, ["texts", 0], "must be a string"),
}


@pytest.mark.parametrize("name", BAD)
async def test_bad_values_are_refused(stack: Stack, name: str) -> None:
    """422 with the place of the value, the value or its size, the limit and what to do; nothing is encoded."""
    body, loc, words = BAD[name]
    error = refused(await stack.client.post("/v1/classify", content=json.dumps(body)))
    assert error["loc"] == loc
    assert words in error["error"]
    if error["error"].startswith("labels[2]: has no"):
        return  # that the tokenizer leaves nothing of a label shows behind the encoder
    assert stack.encoded == []


async def test_at_the_character_limit(stack: Stack) -> None:
    """A text of exactly the limit is answered, with its cut told."""
    text = "card " * 20_000
    assert len(text) == 100_000
    assert (await stack.ask(text=text, labels=LABELS))["results"][0]["truncation"]["used"] == 128


async def test_a_label_with_commas_is_one_label(stack: Stack) -> None:
    """Nothing splits a label."""
    answer = await stack.ask(text="card", labels=["a, b, c", "a", "b, c"])
    assert {score["label"] for score in answer["results"][0]["scores"]} == {"a, b, c", "a", "b, c"}
    assert answer["usage"]["labels"] == 3


BODIES: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "empty"),
    "cut off": (b'{"text": "a", "labels": ["a"', "no JSON"),
    "single quotes": (b"{'text': 'a'}", "no JSON"),
    "a list": (b'[{"text": "a"}]', "must be a JSON object, not an array"),
    "a form": (b"text=a&labels=b", "no JSON"),
    "NaN": (b'{"text": "a", "labels": ["a", "b"], "top_k": NaN}', "NaN"),
    "infinity": (b'{"text": "a", "labels": ["a", "b"], "top_k": Infinity}', "Infinity"),
    "a number too large for a float": (b'{"text": "a", "labels": ["a", "b"], "top_k": 1e999}', "top_k"),
    "a huge integer": (b'{"text": "a", "labels": ["a", "b"], "top_k": -' + b"9" * 4_000 + b"}", "top_k"),
    "a huger integer": (b'{"text": "a", "labels": ["a", "b"], "top_k": ' + b"9" * 9_000 + b"}", "9,000 digits"),
    "deep": (b'{"text": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "too deep"),
    "deep objects": (b'{"text": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}", "too deep"),
    "latin-1": ('{"text": "café", "labels": ["a", "b"]}'.encode("latin-1"), "no UTF-8"),
    "a key twice": (b'{"text": "a", "text": "b", "labels": ["a", "b"]}', "twice"),
    "a surrogate as bytes": (b'{"text": "\xed\xa0\x80", "labels": ["a", "b"]}', "lone surrogate"),
    "a surrogate as an escape": (b'{"text": "\\udc00", "labels": ["a", "b"]}', "lone surrogate"),
    "a surrogate in a key": (b'{"\\ud800": 1, "text": "a", "labels": ["a", "b"]}', "is not a key"),
    "a surrogate in a label's key": (b'{"text": "a", "labels": ["a", {"name": "b", "\\ud800": 1}]}', "unknown keys"),
}


@pytest.mark.parametrize("name", BODIES)
async def test_bad_bodies_are_refused(stack: Stack, name: str) -> None:
    """422 that says what is wrong with the body, whatever bytes were sent."""
    body, words = BODIES[name]
    assert words in refused(await stack.client.post("/v1/classify", content=body))["error"]


async def test_escapes_of_a_pair_are_one_character(stack: Stack) -> None:
    """An emoji that was sent as two escapes is text like any other."""
    body = rb'{"text": "card \ud83d\udc4d", "labels": ["card", "\ud83d\udc4d"]}'
    response = await stack.client.post("/v1/classify", content=body)
    assert {score["label"] for score in response.json()["results"][0]["scores"]} == {"card", "👍"}


@pytest.mark.parametrize("declared", [True, False])
async def test_a_body_over_the_limit(run_stack: Callable[..., Any], bert: Any, declared: bool) -> None:
    """413 with size, limit and remedy, with the length ahead or while the body streams; just below it, an answer."""
    async with run_stack(bert, limits={"max_body_bytes": 2_000}) as stack:
        good = json.dumps({"text": "card", "labels": LABELS}).encode()

        async def chunked(body: bytes) -> AsyncIterator[bytes]:
            for start in range(0, len(body), 100):
                yield body[start : start + 100]

        for size, status in ((2_000, 200), (2_001, 413)):
            body = good + b" " * (size - len(good))
            response = await stack.client.post("/v1/classify", content=body if declared else chunked(body))
            assert response.status_code == status
            assert ("content-length" in response.request.headers) == declared
        assert "at most 2,000 allowed (limits.max_body_bytes)" in refused(response, 413, "body_too_large")["error"]


async def test_random_bytes_and_bodies(stack: Stack) -> None:
    """No body that a generator of nonsense finds gets another answer than 200 or an error of the one shape."""
    rng = random.Random(7)
    options = {
        "min_score": 0.5,
        "label_template": "a {label}",
        "long_text": "window",
        "window_stride": 5,
        "model": None,
    }
    good = json.dumps({"text": "card", "labels": LABELS, "explain": "all", "top_k": 2, **options}).encode()
    for _ in range(300):
        body = bytearray(good)
        for _ in range(rng.randrange(1, 4)):
            place = rng.randrange(len(body))
            match rng.randrange(3):
                case 0:
                    body[place] = rng.randrange(256)
                case 1:
                    del body[place : place + rng.randrange(1, 20)]
                case _:
                    body[place:place] = rng.choice(
                        [b'"', b"{", b"[", b"null", b"1e9", b"\\u", b"\\ud800", b",", b"\x00"]
                    )
        response = await stack.client.post("/v1/classify", content=bytes(body))
        assert response.status_code in (200, 404, 422), body
        if response.status_code != 200:
            assert response.json().keys() == {"error", "error_type", "loc", "request_id"}
    assert (await stack.post(text="card", labels=LABELS)).status_code == 200
