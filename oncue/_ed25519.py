"""Asymmetric signatures of Standard Webhooks (`v1a`): they need the `cryptography` package."""

from __future__ import annotations

from functools import lru_cache

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey


def sign(seed: bytes, signed: bytes) -> bytes:
    """Return the signature of `signed` by the key that a seed of 32 bytes makes."""
    return _private(seed).sign(signed)


def fits(public: bytes, signature: bytes, signed: bytes) -> bool:
    """Tell whether the holder of the private key has signed this."""
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, signed)
    except InvalidSignature:
        return False
    return True


def public_key(seed: bytes) -> bytes:
    """Return the 32 bytes that verify what the seed signs."""
    return Ed25519PrivateKey.from_private_bytes(seed).public_key().public_bytes_raw()


@lru_cache(maxsize=128)
def _private(seed: bytes) -> Ed25519PrivateKey:
    """Make the key of a seed, which takes longer than to sign with it."""
    return Ed25519PrivateKey.from_private_bytes(seed)
