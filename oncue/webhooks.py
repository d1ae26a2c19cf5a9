"""Signing and checking of callbacks by Standard Webhooks 1.0 (symmetric `v1` signatures).

Source: the Standard Webhooks specification, "Signature scheme": HMAC-SHA256 over
`{webhook-id}.{webhook-timestamp}.{body}` with the base64-decoded secret behind `whsec_`.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import time
from collections.abc import Mapping

SECRET_PREFIX = "whsec_"  # noqa: S105 - the public prefix of secrets
TOLERANCE_SECONDS = 300


class WebhookVerificationError(ValueError):
    """The headers do not prove that the body came from the holder of the secret, just now."""


def decode_secret(secret: str) -> bytes:
    """Return the key behind a `whsec_...` secret.

    Raises:
        ValueError: it is not base64 of 16 to 128 bytes (the message never holds the secret).
    """
    try:
        key = base64.b64decode(secret.removeprefix(SECRET_PREFIX), validate=True)
    except (binascii.Error, ValueError):
        raise ValueError("a webhook secret is 'whsec_' and base64 text") from None
    if not 16 <= len(key) <= 128:
        raise ValueError("a webhook secret holds 16 to 128 bytes")
    return key


def sign_webhook(secret: str, webhook_id: str, timestamp: int, body: bytes) -> dict[str, str]:
    """Return the three headers that sign `body`; `timestamp` is in whole epoch seconds."""
    signed = f"{webhook_id}.{timestamp}.".encode() + body
    digest = hmac.new(decode_secret(secret), signed, hashlib.sha256).digest()
    return {
        "webhook-id": webhook_id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": f"v1,{base64.b64encode(digest).decode()}",
    }


def verify_webhook(
    secret: str, headers: Mapping[str, str], body: bytes, *, now: float | None = None
) -> None:
    """Return only if one of the signatures in `headers` fits `body` and is at most 5 minutes off.

    Raises:
        WebhookVerificationError: a header is missing or malformed, the time is off, or no
            signature fits.
    """
    lowered = {name.lower(): value for name, value in headers.items()}
    try:
        webhook_id = lowered["webhook-id"]
        timestamp = int(lowered["webhook-timestamp"])
        signatures = lowered["webhook-signature"].split()
    except (KeyError, ValueError):
        raise WebhookVerificationError("a webhook header is missing or malformed") from None
    if abs((time.time() if now is None else now) - timestamp) > TOLERANCE_SECONDS:
        raise WebhookVerificationError("the webhook timestamp is more than 5 minutes off")
    expected = sign_webhook(secret, webhook_id, timestamp, body)["webhook-signature"]
    if not any(hmac.compare_digest(expected, given) for given in signatures):
        raise WebhookVerificationError("no webhook signature fits")
