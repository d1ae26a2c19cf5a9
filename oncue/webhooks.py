"""Signing and checking of callbacks by Standard Webhooks 1.0.

Source: the Standard Webhooks specification, "Signature scheme": over
`{webhook-id}.{webhook-timestamp}.{body}`, either HMAC-SHA256 with the base64-decoded secret behind
`whsec_` (`v1`), or ed25519 with the private key behind `whsk_`, checked by `whpk_` (`v1a`).
Several signatures, separated by spaces, stand beside each other while secrets are rotated.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import time
from collections.abc import Mapping, Sequence
from typing import Any

SECRET_PREFIX = "whsec_"  # noqa: S105 - the public prefix of secrets
PRIVATE_PREFIX = "whsk_"
PUBLIC_PREFIX = "whpk_"
TOLERANCE_SECONDS = 300


class WebhookVerificationError(ValueError):
    """The headers do not prove that the body came from the holder of the secret, just now."""


def decode_secret(secret: str) -> bytes:
    """Return the key behind a `whsec_...` secret.

    Raises:
        ValueError: it is not base64 of 16 to 128 bytes (the message never holds the secret).
    """
    key = _decoded(secret.removeprefix(SECRET_PREFIX), "a webhook secret is 'whsec_' and base64")
    if not 16 <= len(key) <= 128:
        raise ValueError("a webhook secret holds 16 to 128 bytes")
    return key


def decode_private(secret: str) -> bytes:
    """Return the seed (32 bytes) of a `whsk_...` key; some tools put the public key behind it.

    Raises:
        ValueError: it is not base64 of 32 or 64 bytes (the message never holds the key).
    """
    key = _decoded(secret.removeprefix(PRIVATE_PREFIX), "a private key is 'whsk_' and base64")
    if len(key) not in (32, 64):
        raise ValueError("a private ed25519 key holds 32 or 64 bytes")
    return key[:32]


def check_signing_secret(secret: str) -> None:
    """Return only if callbacks can be signed with `secret`.

    Raises:
        ValueError: it is neither `whsec_` nor `whsk_` with a usable key behind it.
    """
    if secret.startswith(PRIVATE_PREFIX):
        decode_private(secret)
    else:
        decode_secret(secret)


def public_key_of(secret: str) -> str:
    """Return the `whpk_...` that checks what a `whsk_...` signs.

    Raises:
        ValueError: it is no private key.
        ImportError: the `cryptography` package is not installed.
    """
    public = _ed25519().public_key(decode_private(secret))
    return PUBLIC_PREFIX + base64.b64encode(public).decode()


def sign_webhook(
    secret: str | Sequence[str], webhook_id: str, timestamp: int, body: bytes
) -> dict[str, str]:
    """Return the three headers that sign `body`, once with each secret, in their order.

    `timestamp` is in whole epoch seconds.
    """
    signed = f"{webhook_id}.{timestamp}.".encode() + body
    secrets = [secret] if isinstance(secret, str) else secret
    return {
        "webhook-id": webhook_id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": " ".join(_signature(one, signed) for one in secrets),
    }


def verify_webhook(
    secret: str | Sequence[str],
    headers: Mapping[str, str],
    body: bytes,
    *,
    now: float | None = None,
) -> None:
    """Return only if one of the signatures in `headers` fits `body` and is at most 5 minutes off.

    `secret` is a `whsec_...`, a public key `whpk_...` (this needs the `cryptography` package), or
    several of them, of which one must fit.

    Raises:
        WebhookVerificationError: a header is missing or malformed, the time is off, or no
            signature fits.
    """
    lowered = {name.lower(): value for name, value in headers.items()}
    try:
        webhook_id = lowered["webhook-id"]
        timestamp = _seconds(lowered["webhook-timestamp"])
        signatures = lowered["webhook-signature"].split()
    except (KeyError, ValueError):
        raise WebhookVerificationError("a webhook header is missing or malformed") from None
    if abs((time.time() if now is None else now) - timestamp) > TOLERANCE_SECONDS:
        raise WebhookVerificationError("the webhook timestamp is more than 5 minutes off")
    signed = f"{webhook_id}.{timestamp}.".encode() + body
    secrets = [secret] if isinstance(secret, str) else secret
    if not any(_fits(one, given, signed) for one in secrets for given in signatures):
        raise WebhookVerificationError("no webhook signature fits")


def _seconds(text: str) -> int:
    # Longer digits are no time, and too much for the arithmetic of floats.
    if not (text.isascii() and text.isdigit() and len(text) <= 12):
        raise ValueError("no Unix time")
    return int(text)


def _signature(secret: str, signed: bytes) -> str:
    if secret.startswith(PRIVATE_PREFIX):
        signature = _ed25519().sign(decode_private(secret), signed)
        return f"v1a,{base64.b64encode(signature).decode()}"
    digest = hmac.new(decode_secret(secret), signed, hashlib.sha256).digest()
    return f"v1,{base64.b64encode(digest).decode()}"


def _fits(secret: str, given: str, signed: bytes) -> bool:
    if not secret.startswith(PUBLIC_PREFIX):
        return hmac.compare_digest(_signature(secret, signed).encode(), given.encode())
    version, _, signature = given.partition(",")
    public = _decoded(secret.removeprefix(PUBLIC_PREFIX), "a public key is 'whpk_' and base64")
    if version != "v1a" or len(public) != 32:
        return False
    try:
        fits: bool = _ed25519().fits(public, base64.b64decode(signature, validate=True), signed)
    except (binascii.Error, ValueError):
        return False
    return fits


def _decoded(text: str, sentence: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise ValueError(f"{sentence} text") from None


def _ed25519() -> Any:
    from oncue import _ed25519  # noqa: PLC0415 - its package is not a dependency of the client

    return _ed25519
