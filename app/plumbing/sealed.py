"""Secrets at rest: sealed with the keys of `ONCUE_SECRET_KEYS`, so that a dump tells none of them.

Fernet (AES-128-CBC with HMAC-SHA256). The first key seals, all of them open: a new one is put in
front, and an old one leaves once nothing that it has sealed is left.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from typing import Final

from cryptography.fernet import Fernet, InvalidToken, MultiFernet

HOW_TO: Final = (
    "set ONCUE_SECRET_KEYS of all dispatchers to a key, which "
    "`python -c 'from cryptography.fernet import Fernet; print(Fernet.generate_key().decode())'` "
    "makes"
)


BODY_OPENS: Final = ' {"sealed":"'
"""How a sealed body begins: JSON still, and unlike any other, which has no space in front."""
MASK: Final = "********"


def is_sealed(body: str | None) -> bool:
    """Tell whether a stored body (params, a result, a callback) is sealed."""
    return body is not None and body.startswith(BODY_OPENS)


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
        self._raw = [base64.urlsafe_b64decode(key) for key in given]
        self._digest_keys: dict[str, bytes] = {}
        for raw in self._raw:
            derived = _derive(raw, "oncue request digest")
            self._digest_keys[hashlib.sha256(derived).hexdigest()[:6]] = derived

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

    def seal_body(self, clear: str) -> str:
        """Return a body (JSON text) sealed, as JSON text that `is_sealed` knows.

        Raises:
            NoSecretKeys: there is no key.
        """
        return f'{BODY_OPENS}{self.seal(clear)}"}}'

    def open_body(self, kept: str) -> str:
        """Return a stored body in clear, whether it is sealed or not.

        Raises:
            CannotOpen: its key is not among these.
        """
        return self.open(kept[len(BODY_OPENS) : -2]) if is_sealed(kept) else kept

    def result_key(self, execution_id: str) -> str:
        """Return the key by which a worker seals the result of this execution, and no other.

        It is derived: the same in every send, and kept nowhere.

        Raises:
            NoSecretKeys: there is no key to derive it from.
        """
        if not self._raw:
            raise NoSecretKeys
        return _result_key(self._raw[0], execution_id)

    def open_result(self, execution_id: str, sealed: str) -> str:
        """Return what a worker sealed with the `result_key` of this execution.

        Raises:
            CannotOpen: that key was derived from none of these.
        """
        for raw in self._raw:
            try:
                return Fernet(_result_key(raw, execution_id)).decrypt(sealed.encode()).decode()
            except (InvalidToken, UnicodeError):
                continue
        raise CannotOpen

    def keyed_digest(self, value: str) -> str:
        """Return `KEY.DIGEST` of a value that could be guessed from a plain hash of it."""
        key_id, derived = next(iter(self._digest_keys.items()), ("", b""))
        return f"{key_id}.{_mac(derived, value) if derived else ''}"

    def may_be(self, keyed: str, value: str) -> bool:
        """Tell whether a `keyed_digest` is of this value; True too if its key is gone."""
        key_id, _, digest = keyed.partition(".")
        derived = self._digest_keys.get(key_id)
        return derived is None or hmac.compare_digest(_mac(derived, value), digest)


def _derive(key: bytes, purpose: str) -> bytes:
    return hmac.new(key, purpose.encode(), hashlib.sha256).digest()


def _result_key(key: bytes, execution_id: str) -> str:
    return base64.urlsafe_b64encode(_derive(key, f"oncue result {execution_id}")).decode()


def _mac(key: bytes, value: str) -> str:
    return hmac.new(key, value.encode(), hashlib.sha256).hexdigest()[:16]


def draw_key() -> str:
    """Draw a new key."""
    return Fernet.generate_key().decode()
