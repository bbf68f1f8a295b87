"""``TenantServices``: everything about tenants in one router: keys, quotas, usage, metrics, log.

Created by ``open_router_state``: created -> start -> requests -> close. Who reads what:

    router.http              authenticate, open_account
    router.tenants.quotas    what other routers served, from the book
    the fair queue           ``book``: what other routers served; it adds ``service``
"""

from __future__ import annotations

import asyncio

import redis.asyncio as redis
from prometheus_client import CollectorRegistry

from router.tenants.accounts import AccountServices, RequestAccount
from router.tenants.key_store import KeyStore
from router.tenants.quotas import TenantQuotas
from router.tenants.tenant import KeyScope, Tenant
from router.tenants.tenant_metrics import TenantMetrics
from router.tenants.usage import UsageBook
from router.tenants.usage_exchange import UsageExchange, usage_leases
from router.tenants.usage_log import UsageLog


class TenantServices:
    """The tenants of one router.

    ``api_keys``: path of the file of keys; None: no key is required. ``usage_log``: path of the
    log; None: none is written. ``labels``: model and role of the metrics, ``instance``: the
    router's id. Raises StartupError for files that cannot be used.
    """

    def __init__(
        self,
        api_keys: str | None,
        usage_log: str | None,
        registry: CollectorRegistry,
        labels: tuple[str, str],
        instance: str,
    ) -> None:
        self.keys = KeyStore(api_keys)
        self.book = UsageBook()
        self.quotas = TenantQuotas()
        self.metrics = TenantMetrics(registry, labels, instance)
        self._log = None if usage_log is None else UsageLog(usage_log)
        self._instance = instance
        self._services = AccountServices(self.quotas, self.book, self.metrics, self._log)
        self._exchange: UsageExchange | None = None
        self.book.listen(self.quotas.on_others)
        self.keys.on_change = self._use_tenants
        self._use_tenants()

    def authenticate(self, authorization: str | None, scope: KeyScope | None = None) -> Tenant:
        """See ``KeyStore.authenticate``."""
        return self.keys.authenticate(authorization, scope)

    def open_account(self, tenant: Tenant) -> RequestAccount:
        """Return the account of a request that has come."""
        return RequestAccount(self._services, tenant)

    def show_metrics(self) -> None:
        """Set the gauges to their values now."""
        self.metrics.show_running(self.quotas.running())
        self.metrics.show_keys(valid=self.keys.valid)
        if self._log is not None:
            self.metrics.show_dropped(self._log.dropped)

    def start(self, client: redis.Redis | None, cluster: str) -> None:
        """Watch the file of keys, and exchange usage with other routers.

        ``client`` is None where there is no Redis.
        """
        self.keys.start()
        if self._log is not None:
            self._log.start()
        if client is not None:
            self._exchange = UsageExchange(
                usage_leases(client, cluster),
                self._instance,
                self.book,
                self.quotas,
                lambda name: name in self.keys.tenants,  # the file may change
            )
            self._exchange.start()

    async def close(self) -> None:
        """Stop the background work and write the rest of the log."""
        if self._exchange is not None:
            await self._exchange.close()
        await asyncio.to_thread(self._close_files)

    def _close_files(self) -> None:
        self.keys.close()
        if self._log is not None:
            self._log.close()

    def _use_tenants(self) -> None:
        tenants = self.keys.tenants
        self.quotas.set_tenants(tenants.values())
        self.metrics.retain(tenants)
        self.book.retain(tenants)
