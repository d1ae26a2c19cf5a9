"""The dispatcher's settings: one frozen object, built at the entry point and passed on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, SecretStr, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

BalancePolicy = Literal["least_load", "round_robin", "random", "rendezvous"]

TERMINAL_WORDS = frozenset({"SUCCEEDED", "FAILED", "CANCELLED"})
LOOPBACK_HOSTS = frozenset({"localhost", "::1"})
REDIS_SCHEMES = ("redis://", "rediss://", "unix://")
DATABASE_SCHEMES = ("sqlite+aiosqlite:", "mysql+aiomysql:", "mysql+asyncmy:")


def is_loopback(host: str) -> bool:
    """Tell whether a listening address is reachable from this machine alone."""
    return host in LOOPBACK_HOSTS or host.startswith("127.")


class Settings(BaseSettings):
    """What a dispatcher can be told by `ONCUE_*` variables or `.env`; a flag of `oncue` wins."""

    model_config = SettingsConfigDict(
        env_prefix="ONCUE_",
        env_file=".env",
        env_ignore_empty=True,
        extra="ignore",
        frozen=True,
        hide_input_in_errors=True,
    )

    database_url: str = Field(
        "sqlite+aiosqlite:///.oncue/oncue.db",
        description=(
            "mysql+aiomysql://user:password@host/name, mysql+asyncmy://... for somewhat less "
            "processor time, or sqlite+aiosqlite:///PATH"
        ),
    )
    database_seconds: float = Field(
        10.0,
        ge=3,
        le=3600,
        description="a MySQL or MariaDB that does not answer a statement within this is away: 503",
    )
    redis_url: str = Field(
        "redis://127.0.0.1:6379/0", description="redis://, rediss:// or unix:// of one server"
    )
    redis_prefix: str = Field(
        "oncue", pattern=r"^[A-Za-z0-9_.-]{1,64}$", description="first part of every Redis key"
    )
    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(8080, ge=0, le=65535, description="port to listen on")
    processes: int = Field(
        1, ge=1, le=64, description="`oncue dispatcher` runs so many processes behind the port"
    )
    process_ports: int = Field(
        0,
        ge=0,
        le=65_472,
        description="of several processes each also listens alone, from this port on; 0: none does",
    )
    no_dispatch: bool = Field(False, description="true: serve the API only")
    api_keys: SecretStr = Field(
        SecretStr(""),
        description="name:key,... for callers, with every right in tenant 0; without these and "
        "without keys in the database the API is open, on loopback only",
    )
    allow_open: bool = Field(
        False, description="true: serve without keys, also beyond this machine"
    )
    most_failed_keys: int = Field(
        20, ge=1, description="wrong keys from one address in ONCUE_FAILED_KEYS_SECONDS; then 429"
    )
    failed_keys_seconds: float = Field(
        60.0, ge=1, le=3600, description="how long wrong keys of an address are counted"
    )
    internal_token: SecretStr = Field(
        SecretStr(""),
        description="shared with workers; a comma list: the first is sent, all are accepted",
    )
    secret_keys: SecretStr = Field(
        SecretStr(""),
        description="seal secrets at rest; a comma list of Fernet keys: the first seals, all open",
    )
    group_workers_deliver: bool = Field(
        True,
        description="workers with a group's key may deliver callbacks, of all tenants",
    )
    balance: BalancePolicy = Field(
        "least_load",
        description="how a worker is chosen: least_load, round_robin, random, rendezvous",
    )
    dispatch_partitions: int = Field(
        1, ge=1, le=64, description="over so many partitions new jobs are spread, each with a lock"
    )
    lock_seconds: float = Field(6.0, ge=1, le=60, description="life of the dispatch lock")
    claim_batch: int = Field(200, ge=1, le=500, description="most tasks claimed in a transaction")
    priority_ageing_seconds: float = Field(
        60.0,
        ge=0,
        le=86_400,
        description="what is due for so long has every tenth turn, whatever its priority; 0: off",
    )
    submit_batch: int = Field(
        200, ge=1, le=1000, description="most jobs in one group commit; a batch is one"
    )
    submit_gather_ms: float = Field(
        10.0,
        ge=0,
        le=1000,
        description="for so long a commit that 16 or more callers shared lets the next one wait "
        "for as many, or 64 jobs; 0: off",
    )
    submit_backlog: int = Field(
        5000, ge=1, description="most submissions in memory; above it the door answers 503"
    )
    submit_wait_ms: float = Field(
        500.0,
        ge=10,
        le=60_000,
        description="a submission that would wait longer for its answer is refused, 503",
    )
    submit_mib: int = Field(
        64, ge=1, le=16_384, description="most MiB of submissions in memory; above it 503"
    )
    loop_lag_ms: float = Field(
        50.0,
        ge=1,
        le=60_000,
        description="while the event loop is later than this, few submissions at once are let in",
    )
    most_requests: int = Field(
        10_000, ge=1, description="most requests of callers at once; above it 503"
    )
    default_timeout_seconds: float = Field(
        3600.0, gt=0, le=604_800, description="for jobs without timeoutMs"
    )
    overdue_grace_seconds: float = Field(
        30.0, ge=0, description="how long after its timeout a silent run is asked to stop"
    )
    stall_seconds: float = Field(
        300.0, ge=15, description="a worker that accepts but never answers is dead after this"
    )
    misfire_grace_seconds: float = Field(
        10.0,
        ge=0,
        le=300,
        description="with a fire that is later than this, those that are due were missed",
    )
    min_interval_ms: int = Field(100, ge=1, description="shortest intervalMs of a schedule")
    retention_days: float = Field(30.0, gt=0, description="finished jobs are kept this long")
    audit_retention_days: float = Field(
        365.0, gt=0, description="entries of the audit log are kept this long"
    )
    retention: Annotated[dict[str, float], NoDecode] = Field(
        {},
        description="days for single states, as SUCCEEDED=7,FAILED=90; a tenant's own go first",
    )
    retention_most_days: float = Field(
        3650.0, gt=0, le=36_500, description="most days that a tenant may choose"
    )
    retention_export: Path | None = Field(
        None, description="directory in which every job is kept as NDJSON before it is deleted"
    )
    bulk_rate: float = Field(
        200.0, ge=0.1, le=10_000, description="jobs a second of a bulk operation that asks for none"
    )
    bulk_max_rate: float = Field(
        1000.0, ge=0.1, le=10_000, description="most jobs a second that one may ask for"
    )
    long_poll_seconds: float = Field(300.0, ge=1, le=3600, description="most that ?wait= may ask")
    most_streams: int = Field(
        200, ge=0, description="most event streams at once (logs, job events); above it 429"
    )
    callback_schedule_seconds: Annotated[tuple[float, ...], NoDecode] = Field(
        (0, 5, 15, 60, 300, 1800, 7200, 18000, 36000, 50400, 72000, 86400),
        description="pauses before each try of a callback (comma list)",
    )
    grace_seconds: float = Field(30.0, ge=1, description="a SIGTERM ends the process within this")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="debug, info, warning or error"
    )
    log_json: bool | None = Field(None, description="unset: JSON unless the output is a terminal")
    home: Path = Field(Path(".oncue"), description="state of `oncue up`")

    @field_validator("callback_schedule_seconds", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        return tuple(value.split(",")) if isinstance(value, str) else value

    @field_validator("retention", mode="before")
    @classmethod
    def _read_retention(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        pairs = [part.partition("=") for part in value.split(",") if part.strip()]
        if len({name.strip().upper() for name, _, _ in pairs}) < len(pairs):
            raise ValueError("name each state once")
        return {name.strip().upper(): days.strip().removesuffix("d") for name, _, days in pairs}

    @field_validator("retention")
    @classmethod
    def _sane_retention(cls, value: dict[str, float]) -> dict[str, float]:
        if value.keys() - TERMINAL_WORDS or any(not 0 < days <= 36_500 for days in value.values()):
            raise ValueError("SUCCEEDED, FAILED or CANCELLED = days, more than 0, up to 36500")
        return value

    @field_validator("redis_url")
    @classmethod
    def _one_redis(cls, value: str) -> str:
        if not value.startswith(REDIS_SCHEMES):
            raise ValueError(
                "use redis://, rediss:// or unix:// of a single server; "
                "Sentinel and Cluster addresses are not supported"
            )
        return value

    @field_validator("database_url")
    @classmethod
    def _known_database(cls, value: str) -> str:
        if not value.startswith(DATABASE_SCHEMES):
            raise ValueError(
                "use mysql+aiomysql://..., mysql+asyncmy://... or sqlite+aiosqlite:///PATH"
            )
        return value

    @field_validator("callback_schedule_seconds")
    @classmethod
    def _sane_schedule(cls, value: tuple[float, ...]) -> tuple[float, ...]:
        if not 1 <= len(value) <= 50 or any(not 0 <= pause <= 604_800 for pause in value):
            raise ValueError("1 to 50 pauses of 0 to 604800 seconds")
        return value

    def why_too_open(self, *, caller_keys: bool = False, worker_keys: bool = False) -> str | None:
        """Say what must be set before the API may listen beyond this machine, if anything.

        `caller_keys` and `worker_keys` tell whether the database has keys of the kind.
        """
        if is_loopback(self.host):
            return None
        if not (self.api_keys.get_secret_value() or caller_keys or self.allow_open):
            return (
                f"listening on {self.host} needs a key: make one with `oncue keys bootstrap`, or "
                "set ONCUE_API_KEYS (name:key,...); without keys the API is open, which is "
                "allowed on a loopback address, or with ONCUE_ALLOW_OPEN=true"
            )
        if not (self.internal_token.get_secret_value() or worker_keys):
            return (
                f"listening on {self.host} needs ONCUE_INTERNAL_TOKEN: "
                "without it anybody could pose as a worker"
            )
        return None
