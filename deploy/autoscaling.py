"""How many replicas are wanted: encoders for the tokens that wait, scorers for the time that they compute.

Serve counts the requests that a handle has sent. Ours wait in the ingresses' batchers, out of its sight, so each batch
carries the tokens left behind it and the encoder reports them. A scorer has few batches at a time, as many as encoders
have room for, however late it is with them; so it reports how busy it is. Ingresses hold the requests themselves, and
Serve's own count is right for them.
"""

import math
from typing import Any

from ray.serve.config import AutoscalingContext

from tokenalign.errors import ConfigError

TARGET_TOKENS_PER_REPLICA = 16_384.0
TARGET_BUSY_SHARE = 0.7


class TokensWaiting:
    """An encoder for each so many tokens that are in work or wait.

    Ray Serve calls it; name it as `autoscaling_config.policy.policy_function`, and the target in `policy_kwargs` where
    it is to be another. Serve applies the bounds; the policy scales up at once, and down by one replica at a time after
    `downscale_delay_s` of less need.
    """

    def __init__(self, tokens_per_replica: float = TARGET_TOKENS_PER_REPLICA) -> None:
        self._tokens_per_replica = _positive("tokens_per_replica", tokens_per_replica)

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """(replicas wanted, policy state)."""
        metrics = context.aggregated_metrics or {}
        in_hand = sum(metrics.get("tokens_in_hand", {}).values())
        # Every ingress tells every replica about its own queue: the largest report stands for all, not their sum.
        queued = max(metrics.get("tokens_queued", {}).values(), default=0.0)
        return _slowly_down(context, math.ceil((in_hand + queued) / self._tokens_per_replica))


class ScorersBusy:
    """So many scorers that each computes this share of the time. Otherwise as `TokensWaiting`."""

    def __init__(self, busy_share: float = TARGET_BUSY_SHARE) -> None:
        self._busy_share = _positive("busy_share", busy_share)

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """(replicas wanted, policy state)."""
        busy = (context.aggregated_metrics or {}).get("busy_share", {})
        return _slowly_down(context, math.ceil(sum(busy.values()) / self._busy_share))


def tokens_waiting_policy(context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """`TokensWaiting` with 16,384 tokens for each encoder."""
    return TokensWaiting()(context)


def scorers_busy_policy(context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """`ScorersBusy` with 70 % of the time."""
    return ScorersBusy()(context)


def _positive(name: str, value: float) -> float:
    if not value > 0:
        raise ConfigError(f"policy_kwargs.{name}: must be more than 0; it is {value}")
    return value


def _slowly_down(context: AutoscalingContext, wanted: int) -> tuple[int, dict[str, Any]]:
    wanted = max(1, wanted)
    state = dict(context.policy_state or {})
    target = context.target_num_replicas
    if wanted >= target:
        state.pop("less_since", None)
        return wanted, state
    now = context.current_time or 0.0
    since = state.setdefault("less_since", now)
    delay_s = context.config.downscale_delay_s if context.config is not None else 0.0
    if now - since < delay_s:
        return target, state
    state.pop("less_since", None)
    return target - 1, state
