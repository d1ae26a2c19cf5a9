"""Oncue: jobs, on cue. What handler authors and callers import."""

from oncue.handlers import Context, Fail, HandlerNameTaken, Retry, handler
from oncue.webhooks import WebhookVerificationError, sign_webhook, verify_webhook

__all__ = [
    "Context",
    "Fail",
    "HandlerNameTaken",
    "Retry",
    "WebhookVerificationError",
    "handler",
    "sign_webhook",
    "verify_webhook",
]
__version__ = "0.1.0"
