"""Secrets at rest: sealed with the keys of `ONCUE_SECRET_KEYS`, so that a dump tells none of them.

Fernet (AES-128-CBC with HMAC-SHA256). The first key seals, all of them open: a new one is put in
front, and an old one leaves once nothing that it has sealed is left.
"""

from __future__ import annotations

from typing import Final

from cryptography.fernet import Fernet, InvalidToken, MultiFernet

HOW_TO: Final = (
    "set ONCUE_SECRET_KEYS of all dispatchers to a key, which "
    "`python -c 'from cryptography.fernet import Fernet; print(Fernet.generate_key().decode())'` "
    "makes"
)


class BadSecretKeys(ValueError):
    """`ONCUE_SECRET_KEYS` holds something else than keys; the message shows none of them."""


class NoSecretKeys(Exception):
    """Nothing can be sealed: there is no key."""


class CannotOpen(Exception):
    """What is sealed was not sealed with one of the keys."""


class Sealer:
    """Seals and opens texts with the keys of a comma list; without keys it does neither."""

    def __init__(self, keys: str) -> None:
        given = [key.strip() for key in keys.split(",") if key.strip()]
        try:
            self._box = MultiFernet([Fernet(key) for key in given]) if given else None
        except ValueError:
            raise BadSecretKeys(
                "ONCUE_SECRET_KEYS is a comma list of keys, each 32 bytes in URL-safe base64"
            ) from None

    @property
    def has_keys(self) -> bool:
        """Whether anything can be sealed."""
        return self._box is not None

    def seal(self, clear: str) -> str:
        """Return `clear` sealed, as ASCII text.

        Raises:
            NoSecretKeys: there is no key.
        """
        if self._box is None:
            raise NoSecretKeys
        return self._box.encrypt(clear.encode()).decode()

    def open(self, sealed: str) -> str:
        """Return what was sealed.

        Raises:
            CannotOpen: its key is not among these.
        """
        if self._box is None:
            raise CannotOpen
        try:
            return self._box.decrypt(sealed.encode()).decode()
        except InvalidToken:
            raise CannotOpen from None


def draw_key() -> str:
    """Draw a new key."""
    return Fernet.generate_key().decode()
