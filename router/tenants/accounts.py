"""``RequestAccount``: counts one HTTP request against its tenant's limits, and into its usage.

    open --check_rates--> --take_prompt--> --enter--> --begin--> --close--> metrics, log
             |                  |                       |          |
             requests           prompt tokens: taken    in book    output tokens

``accept_request`` opens one for each request; ``GenerationResponse`` enters, begins and closes it.
What a request takes from the quotas it adds to the ``UsageBook`` as well, so that all routers count
it: prompts with the first text, because amounts in the book only grow, and a request that is
refused in the meantime gets its tokens back.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from router.common.errors import ApiError
from router.tenants.quotas import Headers, TenantQuotas
from router.tenants.tenant import Tenant
from router.tenants.tenant_metrics import TenantMetrics
from router.tenants.usage import TenantUsage, UsageBook
from router.tenants.usage_log import UsageLine, UsageLog


class AccountServices(NamedTuple):
    """Parts of one router that count what tenants use."""

    quotas: TenantQuotas
    book: UsageBook
    metrics: TenantMetrics
    log: UsageLog | None  # None: no log is configured


class ResponseEnd(NamedTuple):
    """What a response has brought when it ends."""

    id: str
    status: str  # ok, cancelled, or the HTTP status of its error
    prompt_tokens: int
    cached_tokens: int  # of the prompt, from a prefix cache
    output_tokens: int


class RequestAccount:
    """One HTTP request of a tenant, see the module's docstring."""

    def __init__(self, services: AccountServices, tenant: Tenant) -> None:
        self.tenant = tenant
        self._services = services
        self._entered = 0  # choices
        self._prompt_tokens = 0  # taken from the quota, and not in the book yet

    def check_rates(self) -> None:
        """Count the request. Raises ApiError (429) where the tenant has used its rates."""
        with self._counting_refusals():
            self._services.quotas.check_rates(self.tenant)
        self._services.book.add(self.tenant.name, TenantUsage(requests=1))

    def take_prompt(self, tokens: int, choices: int) -> None:
        """Count the tokens of the prompts.

        Raises ApiError (429) above the tenant's concurrency, and while it is in debt with tokens.
        """
        with self._counting_refusals():
            self._services.quotas.check_concurrency(self.tenant, choices)
            self._services.quotas.take_prompt(self.tenant, tokens)
        self._prompt_tokens = tokens

    def give_back_prompt(self) -> None:
        """Give back the tokens of prompts that no worker has computed."""
        self._services.quotas.take_tokens(self.tenant, -self._prompt_tokens)
        self._prompt_tokens = 0

    def enter(self, choices: int) -> None:
        """Count the choices as running. Raises ApiError (429) above the tenant's concurrency."""
        with self._counting_refusals():
            self._services.quotas.enter(self.tenant, choices)
        self._entered = choices

    def begin(self) -> None:
        """Add the prompts to the usage: the first text has come."""
        usage = TenantUsage(prompt_tokens=self._prompt_tokens)
        self._services.book.add(self.tenant.name, usage)
        self._prompt_tokens = 0

    def close(self, end: ResponseEnd) -> None:
        """Count what was generated, and write the log's line. Call once."""
        services, name = self._services, self.tenant.name
        services.quotas.leave(self.tenant, self._entered)
        if end.prompt_tokens:
            self.begin()
        self.give_back_prompt()
        services.quotas.take_tokens(self.tenant, end.output_tokens)
        services.book.add(name, TenantUsage(output_tokens=end.output_tokens))
        services.metrics.count_end(
            name, TenantUsage(1, end.prompt_tokens, end.output_tokens), end.cached_tokens
        )
        if services.log is not None:
            services.log.write(_usage_line(name, end))

    @contextmanager
    def _counting_refusals(self) -> Iterator[None]:
        try:
            yield
        except ApiError as error:
            if error.status == 429:
                self._services.metrics.count_refusal(self.tenant.name)
            raise

    def headers(self) -> Headers:
        """Return the ``x-ratelimit-*`` headers of the tenant's limits; without limits none."""
        return self._services.quotas.headers(self.tenant)


def _usage_line(tenant: str, end: ResponseEnd) -> UsageLine:
    return UsageLine(
        time=time.time(),
        tenant=tenant,
        request_id=end.id,
        status=end.status,
        prompt_tokens=end.prompt_tokens,
        cached_tokens=end.cached_tokens,
        output_tokens=end.output_tokens,
    )
