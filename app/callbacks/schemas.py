"""What callers send and get of their webhook secrets, and of the networks that may be called."""

from __future__ import annotations

import ipaddress
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, ConfigDict, Field, SecretStr, model_validator

from app.edge.wire import Timestamp, Wire
from oncue.protocol import MAX_EGRESS_NETWORKS
from oncue.webhooks import check_signing_secret

WEEK_SECONDS = 7 * 24 * 3600
Kind = Literal["symmetric", "ed25519"]


def _usable(secret: SecretStr) -> SecretStr:
    text = secret.get_secret_value()
    if not text.startswith(("whsec_", "whsk_")):
        raise ValueError("a secret begins with whsec_, a private ed25519 key with whsk_")
    check_signing_secret(text)
    return secret


def _network(text: str) -> str:
    try:
        return str(ipaddress.ip_network(text))
    except ValueError:
        raise ValueError(
            "must be a network as 10.1.0.0/16 or fd00::/8, without bits behind its length"
        ) from None


class _Hidden(Wire):
    """Errors in it do not repeat what was sent, which may be a secret."""

    model_config = ConfigDict(hide_input_in_errors=True)


class SetWebhookSecret(_Hidden):
    """A secret of the caller's own, or the kind of one to draw."""

    secret: Annotated[SecretStr, AfterValidator(_usable)] | None = Field(
        None,
        max_length=256,
        description="`whsec_` and 16 to 128 bytes in base64, or `whsk_` and an ed25519 key.",
    )
    kind: Kind | None = Field(None, description="Of the one to draw; `symmetric` by default.")

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if self.secret is not None and self.kind is not None:
            raise ValueError("send secret or kind, not both")
        return self


class RotateWebhookSecret(SetWebhookSecret):
    """A new secret, and how long the one before signs beside it."""

    overlap_seconds: int = Field(
        24 * 3600, ge=0, le=WEEK_SECONDS, strict=True, description="A day by default."
    )


class WebhookSecret(_Hidden):
    """A secret that signs a tenant's callbacks."""

    kind: Literal["symmetric", "ed25519", "default"] = Field(
        description="`default`: the one that the operator has set for all."
    )
    masked: str | None
    public_key: str | None = Field(description="`whpk_...`: checks what an ed25519 key signs.")
    created_at: Timestamp
    expires_at: Timestamp | None = Field(description="It signs until then; null: no end is set.")
    secret: str | None = Field(description="Shown once: in the answer that set it.")


class WebhookSecretList(_Hidden):
    """What signs now, the newest first; empty: the operator's secret alone."""

    items: list[WebhookSecret]


class SetEgressAllow(_Hidden):
    """Networks that this tenant's callbacks may reach besides public addresses."""

    networks: list[Annotated[str, AfterValidator(_network)]] | None = Field(
        max_length=MAX_EGRESS_NETWORKS,
        description="Only what ONCUE_EGRESS_ALLOW of a worker has too counts there; empty: public "
        "addresses alone; null: no list of its own, so all that workers allow.",
    )


class EgressAllow(_Hidden):
    """The list as it is now."""

    networks: list[str] | None
