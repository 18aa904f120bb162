"""The webhook's signature: what the shop and the receiver have agreed on."""

import hashlib
import hmac

KEY_HEADER = "Idempotency-Key"
SIGNATURE_HEADER = "X-Shop-Signature"


def sign(secret: str, key: str, body: bytes) -> str:
    """The idempotency key is signed too: nobody can make a known body look new, or a new one look like a repeat."""
    return "sha256=" + hmac.new(secret.encode(), f"{key}.".encode() + body, hashlib.sha256).hexdigest()


def is_signed(secret: str, key: str, body: bytes, signature: str) -> bool:
    """Compared in constant time, so that an answer's delay tells nothing about the right signature."""
    return hmac.compare_digest(sign(secret, key, body).encode(), signature.encode("utf-8", "replace"))
