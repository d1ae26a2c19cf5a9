"""Commands of admins: keys, tenants, audit."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from app.client import show
from app.client.flags import duration_of, moment_or_none
from app.client.talk import (
    ApiKey,
    AsJson,
    Limit,
    Url,
    commands,
    has_more,
    talking,
)

if TYPE_CHECKING:
    from oncue import ApiKey as Key
    from oncue import AuditEntry, LimitChanges, NewApiKey, Tenant

keys = typer.Typer(
    help="API keys: make, list, rotate and revoke them (role admin).",
    epilog=show.examples("oncue keys create billing --role submit", "oncue keys list"),
)
tenants = typer.Typer(
    help="Tenants: make, list and change them (role admin).",
    epilog=show.examples("oncue tenants create billing", "oncue tenants list"),
)

KeyId = Annotated[int, typer.Argument(help="The key's id.", min=1, show_default=False)]
TenantId = Annotated[int, typer.Argument(help="The tenant's id.", min=0, show_default=False)]
OfTenant = Annotated[int | None, typer.Option("--tenant", help="A tenant's id.", min=0)]


@keys.command(
    name="create",
    epilog=show.examples(
        "oncue keys create billing --role submit,read",
        "oncue keys create ops --role operate --expires 2030-01-31T00:00:00Z",
        "oncue keys create fleet --worker-group gpu",
    ),
)
def create_key(
    name: Annotated[
        str | None, typer.Argument(help="Whose it is; or --name.", show_default=False)
    ] = None,
    name_flag: Annotated[str | None, typer.Option("--name", help="Whose it is.")] = None,
    role: Annotated[
        list[str] | None,
        typer.Option(
            help="submit, read, operate or admin, a comma list; may be repeated. submit,read."
        ),
    ] = None,
    tenant: OfTenant = None,
    worker_group: Annotated[
        str | None, typer.Option(help="Make a key for the workers of this group.")
    ] = None,
    expires: Annotated[str | None, typer.Option(help="It works until then, RFC 3339.")] = None,
    as_json: AsJson = False,
    url: Url = None,
    api_key: ApiKey = None,
) -> None:
    """Make a key; it is shown once."""
    given = [one for one in (name, name_flag) if one is not None]
    if len(given) != 1:
        raise typer.BadParameter("give its name once: NAME, or --name NAME")
    options: dict[str, Any] = {
        "roles": [word.strip() for one in role or [] for word in one.split(",")] or None,
        "tenant_id": tenant,
        "worker_group": worker_group,
        "expires_at": moment_or_none("--expires", expires),
    }
    with talking(url, api_key) as client:
        show_new_key(client.create_key(given[0], **options), as_json=as_json)


@keys.command(name="list", epilog=show.examples("oncue keys list", "oncue keys list --prefix ock_"))
def list_keys(
    prefix: Annotated[str | None, typer.Option(help="How the key begins.")] = None,
    tenant: OfTenant = None,
    limit: Limit = 50,
    as_json: AsJson = False,
    url: Url = None,
    api_key: ApiKey = None,
) -> None:
    """List keys, newest first; never their secrets."""
    with talking(url, api_key) as client:
        found = client.keys(prefix=prefix, tenant_id=tenant, page_size=min(limit, 200))
        shown = [one for one, _ in zip(found, range(limit), strict=False)]
        more = has_more(found, shown, limit)
    if as_json:
        show.show_json_list(shown)
        return
    show.print_table(
        show.out(),
        ("KEY", "PREFIX", "NAME", "TENANT", "MAY", "STATE", "LAST USED", "EXPIRES"),
        [_key_row(one) for one in shown],
    )
    show.say_more(len(shown), more=more)


@keys.command(
    name="rotate", epilog=show.examples("oncue keys rotate 3", "oncue keys rotate 3 --overlap 1h")
)
def rotate_key(
    key_id: KeyId,
    overlap: Annotated[
        str | None, typer.Option(help="How long the secret before works on; 1d.")
    ] = None,
    as_json: AsJson = False,
    url: Url = None,
    api_key: ApiKey = None,
) -> None:
    """Give a key a new secret, which is shown once; the one before works on for a while."""
    seconds = duration_of("--overlap", overlap)
    with talking(url, api_key) as client:
        rotated = client.rotate_key(
            key_id, overlap_seconds=None if seconds is None else round(seconds)
        )
        show_new_key(rotated, as_json=as_json)


@keys.command(name="revoke", epilog=show.examples("oncue keys revoke 3"))
def revoke_key(
    key_id: KeyId, as_json: AsJson = False, url: Url = None, api_key: ApiKey = None
) -> None:
    """End a key for good."""
    with talking(url, api_key) as client:
        revoked = client.revoke_key(key_id)
    show.show_json(revoked) if as_json else show.print_grid(_key_fields(revoked))


@tenants.command(name="create", epilog=show.examples("oncue tenants create billing"))
def create_tenant(
    name: Annotated[str, typer.Argument(help="Its name.", show_default=False)],
    as_json: AsJson = False,
    url: Url = None,
    api_key: ApiKey = None,
) -> None:
    """Make a tenant; then make a key for it."""
    with talking(url, api_key) as client:
        _show_tenant(client.create_tenant(name), as_json=as_json)


@tenants.command(name="list", epilog=show.examples("oncue tenants list"))
def list_tenants(as_json: AsJson = False, url: Url = None, api_key: ApiKey = None) -> None:
    """List tenants, by id."""
    with talking(url, api_key) as client:
        found = list(client.tenants())
    if as_json:
        show.show_json_list(found)
        return
    rows = [
        (str(one.tenant_id), one.name, _tenant_state(one), show.when(one.created_at))
        for one in found
    ]
    show.print_table(show.out(), ("TENANT", "NAME", "STATE", "CREATED"), rows)


@tenants.command(name="rename", epilog=show.examples("oncue tenants rename 1 invoices"))
def rename_tenant(
    tenant_id: TenantId,
    name: Annotated[str, typer.Argument(help="Its new name.", show_default=False)],
    as_json: AsJson = False,
    url: Url = None,
    api_key: ApiKey = None,
) -> None:
    """Give a tenant another name."""
    with talking(url, api_key) as client:
        _show_tenant(client.change_tenant(tenant_id, name=name), as_json=as_json)


@tenants.command(name="disable", epilog=show.examples("oncue tenants disable 1"))
def disable_tenant(
    tenant_id: TenantId, as_json: AsJson = False, url: Url = None, api_key: ApiKey = None
) -> None:
    """Refuse the callers of a tenant; its jobs and schedules go on."""
    with talking(url, api_key) as client:
        _show_tenant(client.change_tenant(tenant_id, disabled=True), as_json=as_json)


@tenants.command(name="enable", epilog=show.examples("oncue tenants enable 1"))
def enable_tenant(
    tenant_id: TenantId, as_json: AsJson = False, url: Url = None, api_key: ApiKey = None
) -> None:
    """Let the callers of a tenant in again."""
    with talking(url, api_key) as client:
        _show_tenant(client.change_tenant(tenant_id, disabled=False), as_json=as_json)


def _limit(value: str, flag: str, number: type[int] | type[float]) -> Any:
    try:
        return None if value == "none" else number(value)
    except ValueError:
        raise typer.BadParameter(f"{flag}: give a number, or none") from None


@tenants.command(
    name="limit",
    epilog=show.examples(
        "oncue tenants limit 1 --weight 3",
        "oncue tenants limit 1 --submissions 50 --waiting 10000",
        "oncue tenants limit 1 --running 20 --no-borrow",
        "oncue tenants limit 1 --stored 1000000000 --running none",
    ),
)
def limit_tenant(
    tenant_id: TenantId,
    weight: Annotated[
        float | None, typer.Option(help="Its share beside others' weights; 1 by default.")
    ] = None,
    submissions: Annotated[str | None, typer.Option(help="New jobs a second, or none.")] = None,
    waiting: Annotated[
        str | None, typer.Option(help="New jobs are refused while so many wait, or none.")
    ] = None,
    running: Annotated[
        str | None, typer.Option(help="So many runs at once are its own, or none.")
    ] = None,
    stored: Annotated[
        str | None,
        typer.Option(help="New jobs are refused beyond so many bytes that are kept, or none."),
    ] = None,
    borrow: Annotated[
        bool | None,
        typer.Option(
            "--borrow/--no-borrow",
            help="Whether it may have more runs while no other tenant wants the slots.",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
    url: Url = None,
    api_key: ApiKey = None,
) -> None:
    """Limit what a tenant may use; what is left out stays as it is."""
    limits: LimitChanges = {}
    if weight is not None:
        limits["weight"] = weight
    if submissions is not None:
        limits["submissions_per_second"] = _limit(submissions, "--submissions", float)
    if waiting is not None:
        limits["waiting_jobs"] = _limit(waiting, "--waiting", int)
    if running is not None:
        limits["running_jobs"] = _limit(running, "--running", int)
    if stored is not None:
        limits["stored_bytes"] = _limit(stored, "--stored", int)
    if borrow is not None:
        limits["may_borrow"] = borrow
    if not limits:
        raise typer.BadParameter("give what is to change")
    with talking(url, api_key) as client:
        _show_tenant(client.change_tenant(tenant_id, limits=limits), as_json=as_json)


@commands.command(
    epilog=show.examples(
        "oncue audit", "oncue audit --target job:17", "oncue audit --action job.cancel --json"
    )
)
def audit(
    actor: Annotated[str | None, typer.Option(help="The name of a key.")] = None,
    action: Annotated[str | None, typer.Option(help="As job.cancel or key.create.")] = None,
    target: Annotated[str | None, typer.Option(help="As job:17.")] = None,
    since: Annotated[str | None, typer.Option(help="Then or later, RFC 3339.")] = None,
    until: Annotated[str | None, typer.Option(help="Before that, RFC 3339.")] = None,
    tenant: OfTenant = None,
    limit: Limit = 50,
    as_json: AsJson = False,
    url: Url = None,
    api_key: ApiKey = None,
) -> None:
    """List who changed what, newest first (role admin)."""
    narrowed: dict[str, Any] = {
        "actor": actor,
        "action": action,
        "target": target,
        "since": moment_or_none("--since", since),
        "until": moment_or_none("--until", until),
        "tenant_id": tenant,
    }
    with talking(url, api_key) as client:
        found = client.audit(page_size=min(limit, 200), **narrowed)
        shown = [one for one, _ in zip(found, range(limit), strict=False)]
        more = has_more(found, shown, limit)
    if as_json:
        show.show_json_list(shown)
        return
    show.print_table(
        show.out(),
        ("AT", "ACTOR", "ACTION", "TARGET", "CHANGE", "FROM"),
        [_audit_row(one) for one in shown],
    )
    show.say_more(len(shown), more=more)


def show_new_key(made: NewApiKey, *, as_json: bool) -> None:
    """Print a key with its secret, for the only time."""
    # The whole key stands first: its prefix begins like one, and is none.
    if as_json:
        told = {"key": made.key} | made.model_dump(mode="json", by_alias=True)
        print(json.dumps(told, indent=2))
        return
    show.print_grid([("secret", made.key), *_key_fields(made)])
    print("Keep it now: it is not shown again.")


def _key_fields(key: Key) -> list[tuple[str, str | None]]:
    return [
        ("key", str(key.key_id)),
        ("prefix", key.prefix),
        ("name", key.name),
        ("tenant", None if key.worker_group else str(key.tenant_id)),
        ("may", _may(key)),
        ("state", key.state),
        ("old works", show.when(key.old_works_until) or None),
        ("expires", show.when(key.expires_at) or None),
        ("revoked", show.when(key.revoked_at) or None),
    ]


def _key_row(key: Key) -> tuple[str, ...]:
    return (
        str(key.key_id),
        key.prefix,
        key.name,
        "" if key.worker_group else str(key.tenant_id),
        _may(key),
        key.state,
        show.when(key.last_used_at),
        show.when(key.expires_at),
    )


def _may(key: Key) -> str:
    return f"work as {key.worker_group}" if key.worker_group else " ".join(key.roles)


def _show_tenant(tenant: Tenant, *, as_json: bool) -> None:
    if as_json:
        show.show_json(tenant)
        return
    limits = tenant.limits
    running = None if limits.running_jobs is None else str(limits.running_jobs)
    if running is not None and limits.may_borrow:
        running += ", and what others leave"
    show.print_grid(
        [
            ("tenant", str(tenant.tenant_id)),
            ("name", tenant.name),
            ("state", _tenant_state(tenant)),
            ("weight", None if limits.weight == 1 else f"{limits.weight:g}"),
            ("submits", _most(limits.submissions_per_second, " a second")),
            ("waiting", _most(limits.waiting_jobs, "")),
            ("running", running),
            ("stored", None if limits.stored_bytes is None else f"{limits.stored_bytes} bytes"),
        ]
    )


def _most(limit: float | None, unit: str) -> str | None:
    return None if limit is None else f"{limit:g}{unit}"


def _tenant_state(tenant: Tenant) -> str:
    return "DISABLED" if tenant.disabled else "ENABLED"


def _audit_row(entry: AuditEntry) -> tuple[str, ...]:
    before, after = entry.before or {}, entry.after or {}
    changes = []
    for name in sorted(before.keys() | after.keys()):
        old = f"{_plain(before[name])} -> " if name in before else ""
        changes.append(f"{name}: {old}{_plain(after.get(name))}")
    return (
        show.when(entry.at),
        entry.actor,
        entry.action,
        entry.target,
        "; ".join(changes),
        entry.address,
    )


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
