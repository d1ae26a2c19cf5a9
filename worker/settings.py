"""What a worker is told by its environment: `WorkerSettings`, read once at the entry point."""

from __future__ import annotations

import hashlib
import ipaddress
import json
import re
import socket
import sys
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit, urlunsplit

from pydantic import Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from oncue.addresses import Network
from oncue.protocol import DELIVERY_LEASE_SECONDS, call_token
from oncue.webhooks import check_signing_secret
from worker.deliver import DeliveryLimits

NAME_SHAPE = re.compile(r"[A-Za-z0-9._-]{1,63}")
LogLevel = Literal["debug", "info", "warning", "error"]

LEASE_MARGIN_SECONDS = 20
"""What a lease on a delivery must outlast a try by: three beats and the report of the try."""
REDIS_SCHEMES = ("redis", "rediss", "unix")


class SettingsError(Exception):
    """The settings cannot be used; the message is one sentence for the person who set them."""


class WorkerSettings(BaseSettings):
    """Everything a worker can be told, from `ONCUE_*` variables or `.env`."""

    model_config = SettingsConfigDict(
        env_prefix="ONCUE_",
        env_file=".env",
        env_ignore_empty=True,
        extra="ignore",
        frozen=True,
        populate_by_name=True,
        hide_input_in_errors=True,
    )

    host: str = Field(
        "127.0.0.1", validation_alias="ONCUE_WORKER_HOST", description="address to listen on"
    )
    port: int = Field(
        8081, ge=0, le=65535, validation_alias="ONCUE_WORKER_PORT", description="port to listen on"
    )
    handlers: Annotated[tuple[str, ...], NoDecode] = Field(
        (), description="modules with @handler functions, a comma list"
    )
    builtin_handlers: bool = Field(True, description="whether echo, sleep, fail, http are offered")
    redis_url: str = Field(
        "redis://127.0.0.1:6379/0", description="redis://, rediss:// or unix:// of one server"
    )
    redis_prefix: str = Field(
        "oncue",
        min_length=1,
        max_length=64,
        description="first part of every Redis key; the dispatchers' own",
    )
    dispatcher_url: Annotated[tuple[str, ...], NoDecode] = Field(
        ("http://127.0.0.1:8080",),
        description="dispatchers, a comma list; the next is tried when one fails",
    )
    advertise_url: str = Field(
        "",
        max_length=512,
        description="its own address as dispatchers reach it; unset: http://host:port",
    )
    worker_name: str = Field("", description="its name; unset: host name and port")
    worker_capacity: int = Field(32, ge=0, le=10_000, description="runs at once")
    worker_weight: float = Field(
        1.0, ge=1e-6, le=1000, description="its share of the load relative to others"
    )
    worker_labels: Annotated[dict[str, str], NoDecode] = Field(
        default_factory=dict,
        description="name=value,...: what `worker.NAME` labels of jobs ask for",
    )
    internal_token: Annotated[tuple[SecretStr, ...], NoDecode] = Field(
        (), description="shared with dispatchers; a comma list: the first is sent, all are accepted"
    )
    worker_key: SecretStr | None = Field(
        None,
        description="ocw_...: the key of this worker's group, sent in place of the internal token",
    )
    webhook_secret: SecretStr | None = Field(
        None,
        description="whsec_...: signs callbacks; of a comma list each does, while they are "
        "rotated; unset: this worker delivers none",
    )
    callback_timeout_seconds: float = Field(
        15.0, gt=0, description="one try of a callback; at most 40, which its lease outlasts"
    )
    callback_host_concurrency: int = Field(
        16, ge=1, le=256, description="callbacks to one host:port at once"
    )
    callback_breaker_failures: int = Field(
        5, ge=1, le=1000, description="tries in a row without an answer, then a host has a pause"
    )
    callback_breaker_seconds: float = Field(
        5.0, ge=0.1, le=300, description="the first pause; it doubles, up to 12 times this"
    )
    egress_allow: Annotated[tuple[Network, ...], NoDecode] = Field(
        (), description="networks that callbacks and `http` may reach besides public ones"
    )
    grace_seconds: float = Field(
        30.0, ge=1, le=3600, description="a SIGTERM ends the process within this"
    )
    log_level: LogLevel = Field("info", description="debug, info, warning or error")
    log_json: bool | None = Field(None, description="unset: JSON unless the output is a terminal")
    exit_with_stdin: bool = Field(
        False, description="end when standard input closes; `oncue up` sets it"
    )

    @field_validator("handlers", "dispatcher_url", "internal_token", "egress_allow", mode="before")
    @classmethod
    def _split_list(cls, value: Any) -> Any:
        return _split(value) if isinstance(value, str) else value

    @field_validator("worker_labels", mode="before")
    @classmethod
    def _split_labels(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        pairs = [pair.partition("=") for pair in _split(value)]
        if any(not name or not equals for name, equals, _ in pairs):
            raise ValueError("labels are written as name=value,name=value")
        return {name.strip(): label.strip() for name, _, label in pairs}

    @field_validator("dispatcher_url")
    @classmethod
    def _check_dispatchers(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        if not urls:
            raise ValueError("at least one dispatcher address is needed")
        return tuple(_check_http_url(url) for url in urls)

    @field_validator("advertise_url")
    @classmethod
    def _check_advertised(cls, url: str) -> str:
        return _check_http_url(url) if url else url

    @field_validator("redis_url")
    @classmethod
    def _check_redis(cls, url: str) -> str:
        scheme = urlsplit(url).scheme
        if "sentinel" in scheme or "cluster" in scheme:
            raise ValueError(
                "Redis Sentinel and Cluster are not supported, use one redis:// address"
            )
        if scheme not in REDIS_SCHEMES:
            raise ValueError("the address begins with redis://, rediss:// or unix://")
        return url

    @field_validator("worker_name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        if name and not NAME_SHAPE.fullmatch(name):
            raise ValueError("a worker name has 1 to 63 letters, digits, dots, dashes, underscores")
        return name

    @field_validator("webhook_secret")
    @classmethod
    def _check_secret(cls, secret: SecretStr | None) -> SecretStr | None:
        if secret is not None:
            parts = _split(secret.get_secret_value())
            if not 1 <= len(parts) <= 2:
                raise ValueError("one secret, or two while they are rotated")
            for part in parts:
                check_signing_secret(part)
        return secret

    @field_validator("callback_timeout_seconds")
    @classmethod
    def _check_timeout(cls, seconds: float) -> float:
        longest = DELIVERY_LEASE_SECONDS - LEASE_MARGIN_SECONDS
        if seconds > longest:
            raise ValueError(
                f"at most {longest}: the lease on a delivery is {DELIVERY_LEASE_SECONDS} s, and "
                "must outlast a try and its report"
            )
        return seconds

    @model_validator(mode="after")
    def _refuse_open_worker(self) -> WorkerSettings:
        if not (self.internal_token or self.worker_key) and not is_loopback(self.host):
            raise ValueError(
                "ONCUE_INTERNAL_TOKEN must be set (or ONCUE_WORKER_KEY) when the worker listens on "
                f"{self.host}, which is not a loopback address"
            )
        return self

    @property
    def sent_token(self) -> str | None:
        """What this worker sends to dispatchers: the key of its group, else the internal token."""
        if self.worker_key is not None:
            return self.worker_key.get_secret_value()
        return self.internal_token[0].get_secret_value() if self.internal_token else None

    @property
    def accepted_tokens(self) -> tuple[str, ...]:
        """What dispatchers may send to it: an internal token, or what its own key vouches for."""
        tokens = tuple(one.get_secret_value() for one in self.internal_token)
        if self.worker_key is None:
            return tokens
        digest = hashlib.sha256(self.worker_key.get_secret_value().encode()).hexdigest()
        return (*tokens, call_token(digest))

    @property
    def delivers(self) -> bool:
        """True when this worker can sign callbacks."""
        return self.webhook_secret is not None

    @property
    def webhook_secrets(self) -> list[str]:
        """What signs callbacks, in its order."""
        return [] if self.webhook_secret is None else _split(self.webhook_secret.get_secret_value())

    @property
    def delivery_limits(self) -> DeliveryLimits:
        """How receivers of callbacks are treated."""
        return DeliveryLimits(
            try_seconds=self.callback_timeout_seconds,
            most_per_host=self.callback_host_concurrency,
            breaker_failures=self.callback_breaker_failures,
            breaker_seconds=self.callback_breaker_seconds,
        )

    @property
    def url(self) -> str:
        """The worker's address as dispatchers reach it."""
        if self.advertise_url:
            return self.advertise_url.rstrip("/")
        everywhere = is_ip(self.host) and ipaddress.ip_address(self.host).is_unspecified
        host = socket.gethostname() if everywhere else self.host
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    @property
    def name(self) -> str:
        """The worker's name: as set, else host name and port."""
        if self.worker_name:
            return self.worker_name
        host = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())
        return f"{host[:57]}-{self.port}"


def read_settings(**given: Any) -> WorkerSettings:
    """Read the environment and `.env`; `given` wins over both.

    Raises:
        SettingsError: with one sentence that names the variable and never its value.
    """
    try:
        return WorkerSettings(**given)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        reason = first["msg"].removeprefix("Value error, ")
        if not first["loc"]:
            raise SettingsError(reason) from None
        raise SettingsError(f"{_variable(str(first['loc'][0]))} is not usable: {reason}") from None


def list_settings() -> list[dict[str, str]]:
    """Every setting with its variable, its value here and what it means; secrets are not shown.

    Raises:
        SettingsError: they cannot be used.
    """
    settings = read_settings()
    return [
        {
            "variable": _variable(str(field.validation_alias or name)),
            "value": _shown(getattr(settings, name)),
            "description": field.description or "",
        }
        for name, field in WorkerSettings.model_fields.items()
    ]


def is_ip(host: str) -> bool:
    """Tell whether `host` is an address and not a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Tell whether only this machine can reach what listens on `host`."""
    if not is_ip(host):
        return host == "localhost"
    return ipaddress.ip_address(host).is_loopback


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _shown(value: Any) -> str:
    match value:
        case None:
            return ""
        case SecretStr():
            return "(set)" if value.get_secret_value() else ""
        case tuple():
            return ",".join(dict.fromkeys(_shown(one) for one in value))
        case dict():
            return ",".join(f"{name}={label}" for name, label in value.items())
    return _without_password(str(value))


def _without_password(text: str) -> str:
    """Show an address without what may be secret in it: user, password and query."""
    if "://" not in text:
        return text
    parts = urlsplit(text)
    host = f"***@{parts.netloc.rpartition('@')[2]}" if "@" in parts.netloc else parts.netloc
    return urlunsplit((parts.scheme, host, parts.path, "***" if parts.query else "", ""))


def _variable(location: str) -> str:
    return location if location.startswith("ONCUE_") else f"ONCUE_{location.upper()}"


def _check_http_url(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("an address begins with http:// or https:// and names a host")
    if parts.username or parts.password:
        raise ValueError("an address holds no user or password")
    if set(url) & set("?#@\\") or not url.isprintable() or " " in url:
        raise ValueError("an address ends with its path: it has no query, fragment or space")
    if parts.port == 0:
        raise ValueError("an address has a port other than 0")
    return url.rstrip("/")


if __name__ == "__main__":
    try:
        json.dump(list_settings(), sys.stdout)
    except SettingsError as error:
        sys.exit(str(error))
