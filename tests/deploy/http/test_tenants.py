"""Callers with different keys, where the settings tell them apart."""

import asyncio
from typing import Any

import pytest

LABELS = ["first label", "second label", "third label"]
ANNA, BERT = {"authorization": "Bearer anna"}, {"authorization": "Bearer bert"}
APART = {"label_cache": {"tenant_per_key": True}}


async def ask(stack: Any, headers: dict[str, str], **body: Any) -> Any:
    return await stack.client.post("/v1/classify", json={"text": "a second text", **body}, headers=headers)


async def test_ones_labels_do_not_show_in_anothers_answer(run_stack: Any, bert: Any) -> None:
    """A list is encoded for each key by itself, and once; the scores are the same."""
    async with run_stack(bert, **APART) as stack:
        answers = [(await ask(stack, headers, labels=LABELS)).json() for headers in (ANNA, BERT, {}, ANNA, BERT, {})]
        assert [answer["usage"]["labels_cached"] for answer in answers] == [0, 0, 0, 3, 3, 3]
        assert all(answer["results"] == answers[0]["results"] for answer in answers)


async def test_by_default_all_share(run_stack: Any, bert: Any) -> None:
    """Without the setting a key makes no difference."""
    async with run_stack(bert) as stack:
        cached = [
            (await ask(stack, headers, labels=LABELS)).json()["usage"]["labels_cached"] for headers in (ANNA, BERT, {})
        ]
        assert cached == [0, 3, 3]


async def test_label_sets_are_ones_own(run_stack: Any, bert: Any) -> None:
    """Nobody reads, uses or deletes another's label set, though equal labels have equal ids."""
    async with run_stack(bert, **APART) as stack:
        posted = await stack.client.post("/v1/label-sets", json={"labels": LABELS}, headers=ANNA)
        assert posted.status_code == 201
        path = f"/v1/label-sets/{posted.json()['id']}"
        assert (await stack.client.get(path, headers=BERT)).status_code == 404
        assert (await ask(stack, BERT, label_set=posted.json()["id"])).status_code == 404
        assert (await stack.client.delete(path, headers=BERT)).status_code == 204
        assert (await stack.client.get(path, headers=ANNA)).status_code == 200
        assert (await ask(stack, ANNA, label_set=posted.json()["id"])).json()["usage"]["labels_cached"] == 3
        assert (await stack.client.delete(path, headers=ANNA)).status_code == 204
        assert (await stack.client.get(path, headers=ANNA)).status_code == 404


@pytest.mark.parametrize("headers", [ANNA, {"authorization": "Bearer \xe9\xff"}])
async def test_no_key_is_kept(run_stack: Any, bert: Any, headers: dict[str, str]) -> None:
    """What crosses to the scorer is a hash, whatever bytes the header has."""
    async with run_stack(bert, **APART) as stack:
        raw = {name: value.encode("latin-1") for name, value in headers.items()}
        answer = await stack.client.post("/v1/classify", json={"text": "a", "labels": LABELS}, headers=raw)
        assert answer.status_code == 200
        tenants = [asked.tenant for asked in stack.sent[-1].label_sets]
        assert all(len(tenant) == 64 and "anna" not in tenant for tenant in tenants)


async def test_tenants_in_one_batch(run_stack: Any, bert: Any, until: Any) -> None:
    """Equal texts and labels of two keys travel together and use each their own entries."""
    async with run_stack(bert, **APART) as stack:
        slots, stack.slots = stack.slots, 0
        asked = [asyncio.create_task(ask(stack, headers, labels=LABELS)) for headers in (ANNA, BERT)]
        await until(lambda: stack.waiting_texts == 2)
        stack.slots = slots
        answers = [answer.json() for answer in await asyncio.gather(*asked)]
        assert len(stack.sent[-1].label_sets) == 2
        assert answers[0]["results"] == answers[1]["results"]
