"""Shares: requests a second with bursts, requests at a time, each caller by itself."""

import pytest

from deploy.http.quotas import QuotaError, Quotas, TokenBucket


class Clock:
    """Time that stands still until it is set."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class TestTokenBucket:
    def test_a_burst_then_the_rate(self) -> None:
        """As many as the burst go at once, and then one for each interval of the rate."""
        bucket = TokenBucket(2.0, 3, 10.0)
        assert [bucket.take(10.0) for _ in range(4)] == [0, 0, 0, 0.5]
        assert bucket.take(10.25) == 0.25
        assert bucket.take(10.5) == 0
        assert bucket.take(10.5) == 0.5

    def test_a_pause_gives_no_more_than_the_burst(self) -> None:
        """However long nothing came."""
        bucket = TokenBucket(2.0, 3, 0.0)
        assert [bucket.take(1e6) for _ in range(4)] == [0, 0, 0, 0.5]


class TestQuotas:
    def test_requests_at_a_time(self) -> None:
        """One too many is refused with the limit's name until another has left; other callers don't count."""
        quotas = Quotas(2, None, None)
        quotas.enter("anna")
        quotas.enter("anna")
        with pytest.raises(QuotaError, match=r"'anna' has 2 .* at most 2 .*access.max_concurrent_per_key") as caught:
            quotas.enter("anna")
        assert caught.value.retry_after_s == 1
        quotas.enter("bert")
        quotas.leave("anna")
        quotas.enter("anna")
        with pytest.raises(QuotaError):
            quotas.enter("anna")

    def test_requests_a_second(self) -> None:
        """Over the rate the error says when to come back; a refused one takes nothing, others don't count."""
        clock = Clock()
        quotas = Quotas(None, 0.5, None, clock=clock)
        quotas.enter("anna")
        for _ in range(3):
            with pytest.raises(
                QuotaError, match=r"'anna' asks more than 0.5 .*access.requests_per_s_per_key"
            ) as caught:
                quotas.enter("anna")
            assert caught.value.retry_after_s == 2
        quotas.enter("bert")
        clock.now = 2.0
        quotas.enter("anna")

    def test_the_burst_is_the_requests_of_a_second(self) -> None:
        """Unless it is given."""
        clock = Clock()
        for burst, passing in ((None, 3), (5, 5)):
            quotas = Quotas(None, 2.5, burst, clock=clock)
            for _ in range(passing):
                quotas.enter("anna")
            with pytest.raises(QuotaError):
                quotas.enter("anna")

    def test_who_is_at_its_most_takes_nothing_from_its_rate(self) -> None:
        """A request that is refused for those in progress leaves the bucket as it is."""
        quotas = Quotas(1, 1.0, 2, clock=Clock())
        quotas.enter("anna")
        with pytest.raises(QuotaError, match="in progress"):
            quotas.enter("anna")
        quotas.leave("anna")
        quotas.enter("anna")
