"""Commands about callbacks as a whole: what signs them, and which networks they may reach."""

from __future__ import annotations

import sys
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from app.client import show
from app.client.talk import BAD_USAGE, ApiKey, AsJson, Url, commands, end, talking

if TYPE_CHECKING:
    from oncue import EgressAllow, WebhookSecrets
    from oncue.submission import SecretKind


class Kind(StrEnum):
    """What a drawn secret is."""

    symmetric = "symmetric"
    ed25519 = "ed25519"


@commands.command(
    name="webhook-secret",
    epilog=show.examples(
        "oncue webhook-secret",
        "oncue webhook-secret --rotate --overlap 86400",
        "oncue webhook-secret --set --from-stdin",
    ),
)
def webhook_secret(
    set_: Annotated[bool, typer.Option("--set", help="Let a new one alone sign.")] = False,
    rotate: Annotated[
        bool, typer.Option("--rotate", help="Let a new one sign beside the one before.")
    ] = False,
    forget: Annotated[
        bool, typer.Option("--forget", help="Let the operator's secret sign again.")
    ] = False,
    kind: Annotated[Kind | None, typer.Option(help="Of the one to draw.")] = None,
    from_stdin: Annotated[
        bool, typer.Option("--from-stdin", help="Read the new one; it is drawn else.")
    ] = False,
    overlap: Annotated[
        int | None, typer.Option(help="Seconds that the one before still signs.", min=0)
    ] = None,
    as_json: AsJson = False,
    url: Url = None,
    api_key: ApiKey = None,
) -> None:
    """Show what signs callbacks, masked; or set it, rotate it, or give it up."""
    if set_ + rotate + forget > 1:
        end(BAD_USAGE, "give one of --set, --rotate and --forget")
    if not (set_ or rotate) and (kind is not None or from_stdin):
        end(BAD_USAGE, "--kind and --from-stdin are for --set and --rotate")
    if overlap is not None and not rotate:
        end(BAD_USAGE, "--overlap is for --rotate")
    secret = sys.stdin.read().strip() if from_stdin else None
    drawn: SecretKind | None = (
        None if kind is None else ("ed25519" if kind is Kind.ed25519 else "symmetric")
    )
    with talking(url, api_key) as client:
        if set_:
            found = client.set_webhook_secret(secret, kind=drawn)
        elif rotate:
            found = client.rotate_webhook_secret(secret, kind=drawn, overlap_seconds=overlap)
        elif forget:
            found = client.forget_webhook_secret()
        else:
            found = client.webhook_secret()
        show.show_json(found) if as_json else _show_secrets(found)


@commands.command(
    name="egress-allow",
    epilog=show.examples(
        "oncue egress-allow",
        "oncue egress-allow --network 10.1.0.0/16 --network 10.2.0.0/16",
        "oncue egress-allow --public-only",
    ),
)
def egress_allow(
    network: Annotated[
        list[str] | None, typer.Option(help="One that may be reached; may be repeated.")
    ] = None,
    public_only: Annotated[
        bool, typer.Option("--public-only", help="None but public addresses.")
    ] = False,
    forget: Annotated[
        bool, typer.Option("--forget", help="All that the workers allow, as without a list.")
    ] = False,
    as_json: AsJson = False,
    url: Url = None,
    api_key: ApiKey = None,
) -> None:
    """Show which networks callbacks may reach besides public addresses, or narrow them."""
    if bool(network) + public_only + forget > 1:
        end(BAD_USAGE, "give --network, --public-only or --forget")
    with talking(url, api_key) as client:
        if network or public_only or forget:
            found = client.set_egress_allow(None if forget else network or [])
        else:
            found = client.egress_allow()
        show.show_json(found) if as_json else _show_networks(found)


def _show_secrets(found: WebhookSecrets) -> None:
    if not found.items:
        print("the operator's secret signs, alone")
        return
    rows = [
        (one.kind, one.secret or one.public_key or one.masked or "", show.when(one.expires_at))
        for one in found.items
    ]
    show.print_table(show.out(), ("KIND", "SECRET OR PUBLIC KEY", "SIGNS UNTIL"), rows)


def _show_networks(found: EgressAllow) -> None:
    if found.networks is None:
        print("all that the workers allow")
    else:
        print("\n".join(["public addresses", *found.networks]))
