"""Who calls."""

from __future__ import annotations

from typing import NamedTuple

from app.access.roles import Role
from app.lifecycle.audit import Actor, Deed
from app.lifecycle.tenants import DEFAULT_TENANT

OPEN = "(open)"
"""The name of whoever calls where there are no keys; no key can be called so."""
EVERYTHING = frozenset(Role)


class Caller(NamedTuple):
    """Who calls: the name of its key, the tenant whose jobs it sees, and from where."""

    name: str
    tenant_id: int = DEFAULT_TENANT
    roles: frozenset[Role] = EVERYTHING
    """All that it may do."""
    key_id: int | None = None
    address: str = ""
    request_id: str = ""

    @property
    def is_anybody(self) -> bool:
        """Whether no key was asked for, since there is none."""
        return self.name == OPEN and self.key_id is None

    @property
    def runs_the_platform(self) -> bool:
        """Whether, as an admin, it is one of the platform and not of one tenant alone."""
        return self.tenant_id == DEFAULT_TENANT

    @property
    def actor(self) -> Actor:
        """Who it is, for the audit log."""
        return Actor(self.name, self.tenant_id, self.key_id, self.address, self.request_id)

    def doing(self, action: str) -> Deed:
        """What it does, for the audit log."""
        return Deed(self.actor, action)
