"""Replicas follow the tokens that wait, and how busy they are: up at once, down slowly."""

from typing import Any

import pytest
from ray.serve.config import AutoscalingConfig, AutoscalingContext

from deploy.autoscaling import (
    TARGET_BUSY_SHARE,
    TARGET_TOKENS_PER_REPLICA,
    ScorersBusy,
    TokensWaiting,
    scorers_busy_policy,
    tokens_waiting_policy,
)
from deploy.encoder import Encoder
from deploy.settings import Settings
from deploy.wire import EncodeBatch, Priority
from tokenalign.errors import ConfigError

ONE = TARGET_TOKENS_PER_REPLICA
DELAY_S = 60.0


def context(
    *,
    in_hand: dict[str, float] | None = None,
    queued: dict[str, float] | None = None,
    busy: dict[str, float] | None = None,
    target: int = 1,
    state: dict[str, Any] | None = None,
    now: float = 1_000.0,
) -> AutoscalingContext:
    metrics: dict[str, Any] = {}
    if in_hand is not None:
        metrics["tokens_in_hand"] = in_hand
    if queued is not None:
        metrics["tokens_queued"] = queued
    if busy is not None:
        metrics["busy_share"] = busy
    return AutoscalingContext(
        deployment_id=None,  # type: ignore[arg-type]  # the policy doesn't look
        deployment_name="Encoder",
        app_name="tokenalign",
        current_num_replicas=target,
        target_num_replicas=target,
        running_replicas=[],
        total_num_requests=0.0,
        total_queued_requests=None,
        aggregated_metrics=metrics,
        raw_metrics=None,
        capacity_adjusted_min_replicas=1,
        capacity_adjusted_max_replicas=10,
        policy_state=state or {},
        last_scale_up_time=None,
        last_scale_down_time=None,
        current_time=now,
        config=AutoscalingConfig(downscale_delay_s=DELAY_S),
    )


@pytest.mark.parametrize(
    ("in_hand", "queued", "wanted"),
    [
        (None, None, 1),
        ({}, {}, 1),
        ({"a": 0.0}, {"a": 0.0}, 1),
        ({"a": ONE}, {"a": 0.0}, 1),
        ({"a": ONE}, {"a": 1.0}, 2),
        ({"a": ONE, "b": ONE, "c": 1.0}, None, 3),
        # both replicas report the same ingress's queue: it stands for all once
        ({"a": 0.0, "b": 0.0}, {"a": 2 * ONE, "b": 1.5 * ONE}, 2),
    ],
)
def test_one_replica_for_so_many_tokens(in_hand: Any, queued: Any, wanted: int) -> None:
    """Tokens in all hands and the longest queue reported, by the share of one replica, rounded up; at least one."""
    assert tokens_waiting_policy(context(in_hand=in_hand, queued=queued))[0] == wanted


def test_up_at_once() -> None:
    """More need than replicas is answered with as many as are needed, without a delay."""
    assert tokens_waiting_policy(context(in_hand={"a": 4.5 * ONE}, target=2))[0] == 5


def test_down_by_one_after_the_delay() -> None:
    """Less need takes one replica away after the delay, the next one after another delay."""
    state: dict[str, Any] = {}
    decisions = []
    target = 4
    for now in (0.0, 30.0, 59.0, 60.0, 90.0, 119.0, 150.0):
        target, state = tokens_waiting_policy(context(in_hand={"a": 0.0}, target=target, state=state, now=now))
        decisions.append(target)
    assert decisions == [4, 4, 4, 3, 3, 3, 2]


def test_need_that_returns_starts_the_delay_anew() -> None:
    """A moment of full need between two idle ones keeps the replicas."""
    _, state = tokens_waiting_policy(context(target=2, now=0.0))
    wanted, state = tokens_waiting_policy(context(in_hand={"a": 2 * ONE}, target=2, state=state, now=50.0))
    assert wanted == 2
    wanted, _ = tokens_waiting_policy(context(target=2, state=state, now=70.0))
    assert wanted == 2


def test_the_state_of_others_is_left_alone() -> None:
    """The state that Serve hands in is not changed in place, and keys that are not ours survive."""
    given = {"less_since": 0.0, "other": 1}
    _, state = tokens_waiting_policy(context(in_hand={"a": 3 * ONE}, target=1, state=given))
    assert given == {"less_since": 0.0, "other": 1}
    assert state == {"other": 1}


@pytest.mark.parametrize(
    ("busy", "wanted"),
    [
        (None, 1),
        ({"a": 0.0}, 1),
        ({"a": TARGET_BUSY_SHARE}, 1),
        ({"a": 0.75}, 2),
        ({"a": 1.0, "b": 1.0}, 3),
        ({"a": 0.3, "b": 0.2}, 1),
    ],
)
def test_scorers_for_the_time_that_they_compute(busy: dict[str, float] | None, wanted: int) -> None:
    """So many scorers that each is busy 70 % of the time; at least one."""
    assert scorers_busy_policy(context(busy=busy))[0] == wanted


def test_scorers_go_slowly_too() -> None:
    """Idle scorers stay for the delay, as encoders do."""
    target, state = scorers_busy_policy(context(busy={"a": 0.0, "b": 0.0}, target=2, now=0.0))
    assert target == 2
    assert scorers_busy_policy(context(busy={"a": 0.0}, target=2, state=state, now=DELAY_S))[0] == 1


async def test_a_queue_that_is_gone(bert: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An encoder tells what its last sender had waiting, but not for ever once it has nothing to do itself."""
    encoder = Encoder(Settings.parse({"model": {"device": "cpu"}}), bert.served)
    fingerprint = (await encoder.describe()).fingerprint
    tokens = bert.served.tokenizer.documents(["rain"]).tokens
    await encoder.encode(EncodeBatch.of(fingerprint, tokens, Priority.DOCUMENTS, 5_000))
    assert encoder.record_autoscaling_stats() == {"tokens_in_hand": 0.0, "tokens_queued": 5_000.0}
    monkeypatch.setattr("deploy.encoder.REPORT_AGE_S", 0.0)
    assert encoder.record_autoscaling_stats()["tokens_queued"] == 0.0
    await encoder.close()


def test_other_targets() -> None:
    """The targets are keywords of the policies, as `policy_kwargs` gives them; nonsense is refused by name."""
    assert TokensWaiting(tokens_per_replica=100)(context(in_hand={"a": 250.0}))[0] == 3
    assert ScorersBusy(busy_share=0.5)(context(busy={"a": 0.6}))[0] == 2
    with pytest.raises(ConfigError, match=r"policy_kwargs\.busy_share"):
        ScorersBusy(busy_share=0)
