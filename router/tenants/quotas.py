"""``TenantQuotas``: requests and tokens per minute and concurrency of each tenant, in all routers.

    head    check_rates: 429 while a bucket is empty; else one request is taken
    prompt  check_concurrency: 429; take_prompt: 429 while in debt, else its tokens are taken
    start   enter
    end     leave; take_tokens: what was generated, or back what no worker has computed

Tokens are taken when they are known, and may leave a debt, which time pays off; in debt nothing is
accepted. OpenAI takes the prompt and ``max_tokens`` at the arrival. That refuses requests for
tokens that most of them never generate, so clients would have to guess short. Here the average over
minutes is exact, and how far one burst may exceed it is bounded by the concurrency. A request that
is refused for the cluster's load counts as a request, as at OpenAI, but its tokens come back.

Other routers' use is taken from the same buckets when they report it
(``router.tenants.usage_exchange``), half a second late. Until then a tenant may use more, and is in
debt for it afterwards. Called by ``router.tenants.accounts``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from router.common.errors import ApiError, invalid, rate_limited
from router.tenants.rate_bucket import RateBucket
from router.tenants.tenant import Tenant, TenantLimits
from router.tenants.usage import TenantUsage

_CONCURRENCY_RETRY_S = 1.0

Headers = dict[str, str]


class _TenantQuota:
    """Buckets and counts of one tenant."""

    def __init__(self) -> None:
        self.limits = TenantLimits()
        self.requests: RateBucket | None = None
        self.tokens: RateBucket | None = None
        self.running = 0  # choices in this router
        self.running_elsewhere = 0  # as other routers report

    def follow(self, limits: TenantLimits, now: float) -> None:
        """Take over limits that the file of API keys has changed."""
        if limits != self.limits:
            self.limits = limits
            self.requests = _bucket(self.requests, limits.requests_per_minute, now)
            self.tokens = _bucket(self.tokens, limits.tokens_per_minute, now)


class TenantQuotas:
    """The quotas of one router. ``clock`` is in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._quotas: dict[str, _TenantQuota] = {}

    def check_rates(self, tenant: Tenant) -> None:
        """Take one request. Raises ApiError (429) where a rate is exhausted."""
        now, quota = self._clock(), self._quota(tenant)
        if quota.requests is not None and quota.requests.level(now) < 1:
            raise _exhausted("requests", quota.requests, 1, now)
        _check_debt(quota, now)
        if quota.requests is not None:
            quota.requests.take(1, now)

    def take_prompt(self, tenant: Tenant, tokens: int) -> None:
        """Take the prompts' tokens.

        Raises ApiError: 429 while the tenant is in debt, 400 for more than a minute's tokens.
        """
        now, quota = self._clock(), self._quota(tenant)
        _check_debt(quota, now)
        if quota.tokens is None:
            return
        if tokens > quota.tokens.limit:  # its debt would lock the tenant out for long
            raise invalid(
                f"the prompt has {tokens} tokens, more than the {quota.tokens.limit} that this"
                " API key allows per minute"
            )
        quota.tokens.take(tokens, now)

    def take_tokens(self, tenant: Tenant, tokens: int) -> None:
        """Take tokens that were used; below 0: give them back."""
        # A request that ends may have begun with limits that the file does not have any more.
        quota = self._quotas.get(tenant.name)
        if quota is not None and quota.tokens is not None:
            quota.tokens.take(tokens, self._clock())

    def check_concurrency(self, tenant: Tenant, choices: int) -> None:
        """Raises ApiError where ``choices`` more would exceed the limit: 429, or 400 if always.

        What others report is late by up to a second: so is the limit over several routers.
        """
        quota, limit = self._quota(tenant), tenant.limits.concurrency
        running = quota.running + quota.running_elsewhere
        if limit is None or running + choices <= limit:
            return
        if choices > limit:
            raise invalid(
                f"{choices} choices at once are more than the {limit} that this API key allows"
            )
        raise rate_limited(
            f"limit of concurrent requests reached: {running} choices are running, at most"
            f" {limit} are allowed, and {choices} more arrived",
            _CONCURRENCY_RETRY_S,
        )

    def enter(self, tenant: Tenant, choices: int) -> None:
        """Count choices in; ``leave`` counts them out. Raises as ``check_concurrency`` does."""
        self.check_concurrency(tenant, choices)
        self._quota(tenant).running += choices

    def leave(self, tenant: Tenant, choices: int) -> None:
        if choices:
            self._quotas[tenant.name].running -= choices

    def running(self) -> dict[str, int]:
        """Return the choices in this router by tenant, of those that have any."""
        return {name: quota.running for name, quota in self._quotas.items() if quota.running}

    def on_others(self, tenant: str, usage: TenantUsage) -> None:
        """Take what other routers have served, see ``UsageBook.listen``."""
        now, quota = self._clock(), self._quotas.get(tenant)
        if quota is None:
            return  # it has no limits
        if quota.requests is not None:
            quota.requests.take_reported(usage.requests, now)
        if quota.tokens is not None:
            quota.tokens.take_reported(usage.prompt_tokens + usage.output_tokens, now)

    def set_running_elsewhere(self, running: dict[str, int]) -> None:
        """Set the choices in other routers, by tenant."""
        for name, quota in self._quotas.items():
            quota.running_elsewhere = running.get(name, 0)

    def headers(self, tenant: Tenant) -> Headers:
        """Return OpenAI's ``x-ratelimit-*`` headers, as far as the tenant has limits.

        https://platform.openai.com/docs/guides/rate-limits. ``reset`` is the time until the bucket
        is full.
        """
        now, quota, headers = self._clock(), self._quota(tenant), Headers()
        for name, bucket in (("requests", quota.requests), ("tokens", quota.tokens)):
            if bucket is not None:
                headers[f"x-ratelimit-limit-{name}"] = str(bucket.limit)
                headers[f"x-ratelimit-remaining-{name}"] = str(max(0, int(bucket.level(now))))
                headers[f"x-ratelimit-reset-{name}"] = format_reset(
                    bucket.wait_s(bucket.limit, now)
                )
        return headers

    def set_tenants(self, tenants: Iterable[Tenant]) -> None:
        """Know the tenants of the file of API keys, and forget others that have no requests."""
        known = {tenant.name: tenant for tenant in tenants}
        for name in [name for name in self._quotas if name not in known]:
            if not self._quotas[name].running:
                del self._quotas[name]
        for tenant in known.values():
            if any(limit is not None for limit in tenant.limits):
                self._quota(tenant)  # counts what other routers report from now on

    def _quota(self, tenant: Tenant) -> _TenantQuota:
        quota = self._quotas.get(tenant.name)
        if quota is None:
            quota = self._quotas[tenant.name] = _TenantQuota()
        quota.follow(tenant.limits, self._clock())
        return quota


def format_reset(seconds: float) -> str:
    """Return a duration as OpenAI writes it: ``120ms``, ``1.5s``, ``6m0s``, ``1h0m30s``."""
    milliseconds = round(1000 * seconds)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    if milliseconds < 60_000:
        return f"{milliseconds / 1000:g}s"
    minutes, left = divmod(-(-milliseconds // 1000), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes}m{left}s" if hours else f"{minutes}m{left}s"


def _bucket(bucket: RateBucket | None, limit: int | None, now: float) -> RateBucket | None:
    if limit is None:
        return None
    if bucket is None:
        return RateBucket(limit, now)
    bucket.change_limit(limit, now)
    return bucket


def _check_debt(quota: _TenantQuota, now: float) -> None:
    if quota.tokens is not None and quota.tokens.level(now) < 1:
        raise _exhausted("tokens", quota.tokens, 1, now)


def _exhausted(what: str, bucket: RateBucket, needed: float, now: float) -> ApiError:
    wait_s = bucket.wait_s(needed, now)
    return rate_limited(
        f"rate limit reached: {bucket.limit} {what} per minute are allowed with this API key; try"
        f" again in {format_reset(wait_s)}",
        wait_s,
    )
