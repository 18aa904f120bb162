"""The webhook's signature: what the shop and the receiver have agreed on."""

import hashlib
import hmac

JOB_HEADER = "X-Shop-Job"
SIGNATURE_HEADER = "X-Shop-Signature"


def sign(secret: str, job: str, body: bytes) -> str:
    """The job's id is signed too: nobody can make a known body look new, or a new one look like a repeat."""
    return "sha256=" + hmac.new(secret.encode(), f"{job}.".encode() + body, hashlib.sha256).hexdigest()


def is_signed(secret: str, job: str, body: bytes, signature: str) -> bool:
    """Compared in constant time, so that an answer's delay tells nothing about the right signature."""
    return hmac.compare_digest(sign(secret, job, body).encode(), signature.encode("utf-8", "replace"))
