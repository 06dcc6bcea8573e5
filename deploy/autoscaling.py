"""How many encoder replicas are wanted: enough for the tokens that wait, those in the ingresses' queues included.

Serve counts the requests that a handle has sent. Ours wait in the ingresses' batchers, out of its sight, so each batch
carries the tokens left behind it and the encoder reports them.
"""

import math
from typing import Any

from ray.serve.config import AutoscalingContext

TARGET_TOKENS_PER_REPLICA = 16_384.0


def tokens_waiting_policy(context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """(replicas wanted, policy state): one for each 16,384 tokens that are in work or wait.

    Ray Serve calls it; name it as `autoscaling_config.policy.policy_function`. Serve applies the bounds; this function
    scales up at once, and down by one replica at a time after `downscale_delay_s` of less need.
    """
    metrics = context.aggregated_metrics or {}
    in_hand = sum(metrics.get("tokens_in_hand", {}).values())
    # Every ingress tells every replica about its own queue: the largest report stands for all, not their sum.
    queued = max(metrics.get("tokens_queued", {}).values(), default=0.0)
    wanted = max(1, math.ceil((in_hand + queued) / TARGET_TOKENS_PER_REPLICA))
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
