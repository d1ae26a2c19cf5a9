"""The tables, for SQLite and MySQL alike. Times are epoch milliseconds of the database's clock."""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Double,
    Float,
    Index,
    Integer,
    MetaData,
    SmallInteger,
    String,
    Table,
    Text,
    UniqueConstraint,
    text,
)
from sqlalchemy.dialects.mysql import MEDIUMTEXT

SCHEMA_REVISION: Final = 14
"""The revision of the schema that this code was written for."""
_DIGEST: Final = String(2048).with_variant(String(1024), "sqlite")
"""Longer than a digest with every field; SQLite, which bounds no text, was never told."""
INLINE_BYTES: Final = 1024
"""Params and results up to this length live in their row, longer ones in `job_payload`."""

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "pk": "pk_%(table_name)s",
    }
)
_Key = BigInteger().with_variant(Integer, "sqlite")
_Body = Text().with_variant(MEDIUMTEXT(), "mysql", "mariadb")
_OPTIONS: Final[dict[str, Any]] = {
    "mysql_engine": "InnoDB",
    "mysql_charset": "utf8mb4",
    "mysql_collate": "utf8mb4_bin",
    "sqlite_autoincrement": True,
}


def _key() -> Column[int]:
    return Column("id", _Key, primary_key=True, autoincrement=True)


def _at_most(column: str, length: int) -> CheckConstraint:
    """SQLite takes any length for a VARCHAR: the check makes it refuse what MySQL refuses."""
    # MySQL's length() counts bytes: there it would refuse what the column takes.
    check = CheckConstraint(f"length({column}) <= {length}", name=f"{column}_length")
    return check.ddl_if(dialect="sqlite")


job_info = Table(
    "job_info",
    metadata,
    _key(),
    Column("tenant_id", Integer, nullable=False, server_default="0"),
    Column("client_request_id", String(128)),
    Column("request_digest", _DIGEST),
    Column("submit_token", String(32)),
    Column("parent_id", BigInteger),
    Column("root_id", BigInteger),
    Column("nominal_time", BigInteger),
    Column("shard_index", Integer, nullable=False, server_default="0"),
    Column("shard_total", Integer, nullable=False, server_default="1"),
    Column("child_key", String(128), nullable=False, server_default=""),
    Column("kind", SmallInteger, nullable=False),
    Column("job_name", String(128), nullable=False),
    Column("job_handler", String(128), nullable=False),
    Column("queue_id", BigInteger, nullable=False),
    Column("partition_no", SmallInteger, nullable=False, server_default="0"),
    Column("status", SmallInteger, nullable=False),
    Column("priority", SmallInteger, nullable=False),
    Column("next_trigger_time", BigInteger),
    Column("trigger_ts", BigInteger, nullable=False, server_default="0"),
    Column("owner_worker_id", String(128)),
    Column("execution_id", String(36)),
    Column("stopping_execution_id", String(36)),
    Column("claim_token", String(32)),
    Column("attempt", Integer, nullable=False, server_default="0"),
    Column("returned", Integer, nullable=False, server_default="0"),
    Column("max_retry", Integer, nullable=False),
    Column("retry_interval_ms", BigInteger, nullable=False),
    Column("retry_backoff", String(16), nullable=False),
    Column("timeout_ms", BigInteger),
    Column("callback_url", String(2048)),
    Column("params", Text),
    Column("params_in_payload", Boolean, nullable=False, server_default="0"),
    Column("error_code", String(64)),
    Column("error_message", String(2000)),
    Column("cron_expr", String(128)),
    Column("cron_dialect", String(16)),
    Column("timezone", String(64)),
    Column("interval_ms", BigInteger),
    Column("interval_mode", String(16)),
    Column("dst_gap", String(16)),
    Column("dst_fold", String(16)),
    Column("misfire_policy", String(16)),
    Column("catch_up_ms", BigInteger),
    Column("overlap_policy", String(16)),
    Column("jitter_ms", BigInteger),
    Column("max_fires", BigInteger),
    Column("fires", BigInteger, nullable=False, server_default="0"),
    Column("start_at", BigInteger),
    Column("end_at", BigInteger),
    Column("version", Integer, nullable=False, server_default="0"),
    Column("revision", Integer, nullable=False, server_default="0"),
    Column("created_at", BigInteger, nullable=False),
    Column("updated_at", BigInteger, nullable=False),
    Column("finished_at", BigInteger),
    Column("expires_at", BigInteger, comment="fails unless an attempt has begun by then"),
    Column("child_queue_id", BigInteger, comment="the queue of what a schedule spawns"),
    Column("anchor_at", BigInteger, comment="from when a fixed rate is counted"),
    Column("misfire_cap", Integer),
    Column("misfire_spacing_ms", BigInteger),
    Column("skip_from", BigInteger, comment="the ledger row that the last fire lies in"),
    Column("skip_reason", String(32)),
    Column("callback_events", String(64), comment="a comma list; NULL: how it ends"),
    Column("callback_headers", Text, comment="JSON; secret values are sealed"),
    Column("concurrency_key", String(128)),
    Column("concurrency_limit", Integer),
    Column("rate_key", String(128)),
    Column("rate_per_second", Double),
    Column("rate_due", BigInteger, comment="the time that its rate key gave it"),
    Column(
        "secret", SmallInteger, nullable=False, server_default="0", comment="1 params, 2 result"
    ),
    UniqueConstraint("tenant_id", "client_request_id"),
    UniqueConstraint("parent_id", "nominal_time", "shard_index", "child_key"),
    Index("ix_job_info_claim", "status", "queue_id", "priority", "next_trigger_time", "id"),
    Index(
        "ix_job_info_finished",
        "tenant_id",
        "finished_at",
        "id",
        sqlite_where=text("finished_at IS NOT NULL"),
    ),
    _at_most("client_request_id", 128),
    _at_most("job_name", 128),
    _at_most("job_handler", 128),
    **_OPTIONS,
)

queue = Table(
    "queue",
    metadata,
    _key(),
    Column("tenant_id", Integer, nullable=False, server_default="0"),
    Column("job_handler", String(128), nullable=False),
    Column("requirement", String(255), nullable=False, server_default=""),
    Column("partition_no", SmallInteger, nullable=False, server_default="0"),
    UniqueConstraint("job_handler", "requirement", "tenant_id", "partition_no"),
    Index("ix_queue_tenant_id_id", "tenant_id", "id"),
    _at_most("job_handler", 128),
    **_OPTIONS,
)

job_payload = Table(
    "job_payload",
    metadata,
    Column("job_id", BigInteger, primary_key=True, autoincrement=False),
    Column("slot", String(36), primary_key=True, comment="'params', or an execution id"),
    Column("body", _Body, nullable=False),
    Column("byte_count", Integer, comment="of the body; NULL: by older code, which did not tell"),
    **{**_OPTIONS, "sqlite_autoincrement": False},
)

job_label = Table(
    "job_label",
    metadata,
    Column("job_id", BigInteger, primary_key=True, autoincrement=False),
    Column("name", String(64), primary_key=True),
    Column("value", String(128), nullable=False),
    Index("ix_job_label_name_value_job_id", "name", "value", "job_id"),
    **{**_OPTIONS, "sqlite_autoincrement": False},
)

job_log = Table(
    "job_log",
    metadata,
    _key(),
    Column("execution_id", String(36), nullable=False),
    Column("job_id", BigInteger, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("trigger_ts", BigInteger, nullable=False),
    Column("worker_id", String(128), nullable=False),
    Column("term", BigInteger, nullable=False),
    Column("status", SmallInteger, nullable=False),
    Column("claimed_at", BigInteger, nullable=False),
    Column("accepted_at", BigInteger),
    Column("started_at", BigInteger),
    Column("finished_at", BigInteger),
    Column("error_code", String(64)),
    Column("error_message", String(2000)),
    Column("reason", String(255), comment="why the platform, not the handler, ended it"),
    Column("result", Text),
    Column("result_in_payload", Boolean, nullable=False, server_default="0"),
    Column("log_pointer", String(255)),
    Column("stale_at", BigInteger, comment="a late report came, and changed nothing"),
    Column("stale_status", String(16)),
    Column("progress", Double),
    Column("progress_text", String(200)),
    Column("progress_at", BigInteger),
    UniqueConstraint("execution_id"),
    Index("ix_job_log_job_id_id", "job_id", "id"),
    **_OPTIONS,
)
BY_EXECUTION_ID: Final = {True: "", False: "FORCE INDEX (uq_job_log_execution_id) "}
"""The hint of a read of many executions, by whether it is SQLite: MySQL may walk a small table."""

execution_log = Table(
    "execution_log",
    metadata,
    Column("log_id", BigInteger, primary_key=True, autoincrement=False, comment="job_log.id"),
    Column("next_seq", BigInteger, nullable=False),
    Column("head_bytes", Integer, nullable=False),
    Column("tail_bytes", Integer, nullable=False),
    Column("tail_first_seq", BigInteger, comment="NULL until the head is full"),
    Column("dropped_lines", BigInteger, nullable=False, comment="that slid out of the tail"),
    Column("dropped_bytes", BigInteger, nullable=False),
    Column("complete", Boolean, nullable=False, comment="no more lines will come"),
    **{**_OPTIONS, "sqlite_autoincrement": False},
)

log_chunk = Table(
    "log_chunk",
    metadata,
    Column("log_id", BigInteger, primary_key=True, autoincrement=False),
    Column("first_seq", BigInteger, primary_key=True, autoincrement=False),
    Column("line_count", Integer, nullable=False),
    Column("byte_count", Integer, nullable=False),
    Column("dropped_lines", BigInteger, nullable=False, comment="that its markers stand for"),
    Column("dropped_bytes", BigInteger, nullable=False),
    Column("body", _Body, nullable=False, comment="JSON: [[seq, time, level, source, ...], ...]"),
    **{**_OPTIONS, "sqlite_autoincrement": False},
)

worker_node = Table(
    "worker_node",
    metadata,
    Column("id", String(128), primary_key=True, comment="name#bootId"),
    Column("name", String(64), nullable=False),
    Column("boot_id", String(64), nullable=False),
    Column("url", String(512), nullable=False),
    Column("version", String(64), nullable=False),
    Column("state", String(16), nullable=False),
    Column("handlers", _Body, nullable=False),
    Column("labels", Text, nullable=False),
    Column("capacity", Integer, nullable=False),
    Column("weight", Float, nullable=False),
    Column("delivers", Boolean, nullable=False),
    Column("load_seq", BigInteger, nullable=False),
    Column("active", Integer, nullable=False),
    Column("queued", Integer, nullable=False),
    Column("avg_cost_ms", Float, nullable=False),
    Column("cpu_idle_percent", Float, nullable=False),
    Column("held", _Body, nullable=False),
    Column("beats", BigInteger, nullable=False),
    Column("first_heartbeat", BigInteger, nullable=False),
    Column("last_heartbeat", BigInteger, nullable=False),
    Column(
        "worker_group",
        String(64),
        comment="of the key by which it beats; NULL: the internal token",
    ),
    Column("key_digest", String(64), comment="of the key it beats with"),
    Column("egress_allow", Text, comment="JSON; NULL: it does not say so"),
    **{**_OPTIONS, "sqlite_autoincrement": False},
)

handler_schema = Table(
    "handler_schema",
    metadata,
    Column("digest", String(64), primary_key=True, comment="SHA-256 of the body"),
    Column("body", _Body, nullable=False),
    Column("seen_at", BigInteger, nullable=False),
    **{**_OPTIONS, "sqlite_autoincrement": False},
)

callback_delivery = Table(
    "callback_delivery",
    metadata,
    _key(),
    Column("delivery_id", String(36), nullable=False),
    Column("tenant_id", Integer, nullable=False, server_default="0"),
    Column("job_id", BigInteger, nullable=False),
    Column("execution_id", String(36)),
    Column("event_type", String(32), nullable=False),
    Column("url", String(2048), nullable=False),
    Column("body", _Body, nullable=False),
    Column("status", SmallInteger, nullable=False),
    Column("tries", Integer, nullable=False, comment="begun; the last one may be under way"),
    Column("owner_worker_id", String(128)),
    Column("next_try_at", BigInteger, nullable=False, comment="while owned: the lease's end"),
    Column("last_status_code", Integer),
    Column("last_error", String(2000)),
    Column("last_latency_ms", Integer),
    Column("created_at", BigInteger, nullable=False),
    Column("ended_at", BigInteger),
    Column("host", String(255), nullable=False, server_default="", comment="host:port"),
    Column("headers", Text, comment="as the job had them then"),
    Column(
        "owed_since",
        BigInteger,
        nullable=False,
        server_default="0",
        comment="its end, or when it was last sent again; 0: created_at",
    ),
    Column("success_try", Integer, comment="the first success, not in callback_try then"),
    Column("success_at", BigInteger),
    Column("success_worker_id", String(128)),
    Column("success_status_code", Integer),
    Column("success_latency_ms", Integer),
    Column("success_answer", Text, comment="its first 2 KiB"),
    UniqueConstraint("delivery_id"),
    Index("ix_callback_delivery_host", "status", "host", "next_try_at", "id"),
    Index("ix_callback_delivery_job_id", "job_id"),
    **_OPTIONS,
)

callback_try = Table(
    "callback_try",
    metadata,
    Column("job_id", BigInteger, primary_key=True, autoincrement=False),
    Column("delivery_key", BigInteger, primary_key=True, autoincrement=False),
    Column("try_number", Integer, primary_key=True, autoincrement=False),
    Column("tried_at", BigInteger, nullable=False),
    Column("worker_id", String(128), nullable=False),
    Column("delivered", Boolean, nullable=False),
    Column("status_code", Integer),
    Column("latency_ms", Integer, nullable=False),
    Column("error", String(2000)),
    Column("answer", Text, comment="its first 2 KiB"),
    **{**_OPTIONS, "sqlite_autoincrement": False},
)
"""Each try of a callback, by `callback_delivery.id`, but the one that is kept there."""

webhook_secret = Table(
    "webhook_secret",
    metadata,
    _key(),
    Column("tenant_id", Integer, nullable=False),
    Column("sealed", Text, nullable=False, comment="empty: the one that workers are set to"),
    Column("shown", String(128), nullable=False, comment="masked, or public"),
    Column("created_at", BigInteger, nullable=False),
    Column("expires_at", BigInteger, comment="of one that was rotated"),
    Index("ix_webhook_secret_tenant_id", "tenant_id"),
    **_OPTIONS,
)

egress_allow = Table(
    "egress_allow",
    metadata,
    Column("tenant_id", Integer, primary_key=True, autoincrement=False),
    Column("networks", Text, nullable=False, comment="JSON"),
    Column("updated_at", BigInteger, nullable=False),
    **{**_OPTIONS, "sqlite_autoincrement": False},
)

stopping_execution = Table(
    "stopping_execution",
    metadata,
    Column("execution_id", String(36), primary_key=True),
    Column("job_id", BigInteger, nullable=False),
    Column("trigger_ts", BigInteger, nullable=False),
    Column("worker_id", String(128), nullable=False),
    **{**_OPTIONS, "sqlite_autoincrement": False},
)

bulk_operation = Table(
    "bulk_operation",
    metadata,
    _key(),
    Column("operation_id", String(36), nullable=False),
    Column("tenant_id", Integer, nullable=False),
    Column("client_request_id", String(128)),
    Column("request_digest", String(1024), nullable=False),
    Column("action", String(16), nullable=False),
    Column("filter", Text, nullable=False, comment="JSON, as the caller sent it"),
    Column(
        "rate",
        Double().with_variant(Float, "sqlite"),
        nullable=False,
        comment="most changes a second",
    ),
    Column("status", SmallInteger, nullable=False),
    Column("until_id", BigInteger, nullable=False, comment="later jobs are not touched"),
    Column("after_id", BigInteger, nullable=False, comment="the last job that had its turn"),
    Column("after_finished", BigInteger, nullable=False, comment="when that had finished"),
    Column("resume_at", BigInteger, nullable=False, comment="the rate allows no change before"),
    Column("matched", BigInteger, nullable=False),
    Column("matched_is_minimum", Boolean, nullable=False),
    Column("changed", BigInteger, nullable=False, server_default="0"),
    Column("refused", Text, nullable=False, comment="JSON: how many by code"),
    Column("error_code", String(64)),
    Column("error_message", String(2000)),
    Column("created_at", BigInteger, nullable=False),
    Column("updated_at", BigInteger, nullable=False),
    Column("started_at", BigInteger),
    Column("finished_at", BigInteger),
    UniqueConstraint("operation_id"),
    UniqueConstraint("tenant_id", "client_request_id"),
    Index("ix_bulk_operation_status_id", "status", "id"),
    Index("ix_bulk_operation_tenant_id_id", "tenant_id", "id"),
    _at_most("client_request_id", 128),
    **_OPTIONS,
)

job_expiry = Table(
    "job_expiry",
    metadata,
    Column("look_at", BigInteger, primary_key=True, autoincrement=False),
    Column("job_id", BigInteger, primary_key=True, autoincrement=False),
    **{**_OPTIONS, "sqlite_autoincrement": False},
)
"""When to look whether a job has expired: only jobs that can expire have a row."""

schedule_skip = Table(
    "schedule_skip",
    metadata,
    _key(),
    Column("schedule_id", BigInteger, nullable=False),
    Column("from_time", BigInteger, nullable=False),
    Column("to_time", BigInteger, nullable=False),
    Column("count", BigInteger, nullable=False),
    Column("reason", String(32), nullable=False),
    UniqueConstraint("schedule_id", "from_time"),
    **_OPTIONS,
)

schedule_live = Table(
    "schedule_live",
    metadata,
    Column("schedule_id", BigInteger, primary_key=True, autoincrement=False),
    Column("child_id", BigInteger, primary_key=True, autoincrement=False),
    Column("waits", SmallInteger, nullable=False, comment="1 while BLOCKED"),
    Column("backfill_id", BigInteger, nullable=False, comment="0 for its own fires"),
    Index("ix_schedule_live_waits", "waits", "schedule_id"),
    **{**_OPTIONS, "sqlite_autoincrement": False},
)
"""The children of a schedule that may not have ended; rows of those that have leave later."""

schedule_backfill = Table(
    "schedule_backfill",
    metadata,
    _key(),
    Column("schedule_id", BigInteger, nullable=False),
    Column("token", String(32), nullable=False),
    Column("status", SmallInteger, nullable=False, comment="0 open, 1 done, 2 stopped"),
    Column("cursor_time", BigInteger, nullable=False, comment="done up to here"),
    Column("from_time", BigInteger, nullable=False),
    Column("to_time", BigInteger, nullable=False),
    Column("max_concurrent", Integer, nullable=False),
    Column("spawned", BigInteger, nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Column("ended_at", BigInteger),
    UniqueConstraint("token"),
    Index("ix_schedule_backfill_open", "status", "id"),
    Index("ix_schedule_backfill_of", "schedule_id", "id"),
    **_OPTIONS,
)

tenant = Table(
    "tenant",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("name", String(64), nullable=False),
    Column("token", String(32), nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Column("disabled_at", BigInteger),
    UniqueConstraint("name"),
    **{**_OPTIONS, "sqlite_autoincrement": False},
)

tenant_limits = Table(
    "tenant_limits",
    metadata,
    Column("tenant_id", Integer, primary_key=True, autoincrement=False),
    Column("weight", Double, nullable=False, server_default="1"),
    Column("submissions_per_second", Double),
    Column("waiting_jobs", Integer),
    Column("running_jobs", Integer),
    Column(
        "may_borrow",
        Boolean,
        nullable=False,
        server_default="1",
        comment="more runs than running_jobs, while nobody else wants the slots",
    ),
    Column("stored_bytes", BigInteger),
    **{**_OPTIONS, "sqlite_autoincrement": False},
)
"""Only tenants with limits have a row, so that reading all limits is reading just those."""

tenant_stored = Table(
    "tenant_stored",
    metadata,
    Column("tenant_id", Integer, primary_key=True, autoincrement=False),
    Column("bytes", BigInteger, nullable=False),
    Column("counted_from", BigInteger, nullable=False, comment="when the count began"),
    **{**_OPTIONS, "sqlite_autoincrement": False},
)
"""What tenants with a quota of bytes have stored, as it was counted last."""

limit_key = Table(
    "limit_key",
    metadata,
    Column("tenant_id", Integer, primary_key=True, autoincrement=False),
    Column("kind", SmallInteger, primary_key=True, autoincrement=False),
    Column("name", String(128), primary_key=True),
    Column("next_at", BigInteger, nullable=False, comment="microseconds, of a rate"),
    Column(
        "begins_at",
        BigInteger,
        nullable=False,
        server_default="0",
        comment="microseconds: when the begun runs would all have had their time",
    ),
    **{**_OPTIONS, "sqlite_autoincrement": False},
)
"""A key of a tenant, locked by whoever counts or changes what it limits."""

concurrency_slot = Table(
    "concurrency_slot",
    metadata,
    Column("tenant_id", Integer, primary_key=True, autoincrement=False),
    Column("name", String(128), primary_key=True),
    Column("waits", SmallInteger, primary_key=True, comment="1 while BLOCKED"),
    Column("turn", SmallInteger, primary_key=True, comment="9 less the priority"),
    Column("due", BigInteger, primary_key=True),
    Column("job_id", BigInteger, primary_key=True, autoincrement=False),
    **{**_OPTIONS, "sqlite_autoincrement": False},
)
"""The jobs that hold a concurrency key, and those that wait for it in the order of their turns."""

api_key = Table(
    "api_key",
    metadata,
    _key(),
    Column("prefix", String(16), nullable=False, comment="shown and searched"),
    Column("kind", String(8), nullable=False, comment="caller, worker"),
    Column("tenant_id", Integer, nullable=False),
    Column("name", String(64), nullable=False),
    Column("roles", String(64), nullable=False, comment="a comma list"),
    Column("worker_group", String(64)),
    Column("digest", String(64), nullable=False, comment="SHA-256"),
    Column("old_digest", String(64)),
    Column("old_until", BigInteger, comment="the old one works so long"),
    Column("created_at", BigInteger, nullable=False),
    Column("created_by", String(128), nullable=False),
    Column("rotated_at", BigInteger),
    Column("expires_at", BigInteger),
    Column("revoked_at", BigInteger),
    Column("last_used_at", BigInteger),
    UniqueConstraint("prefix"),
    Index("ix_api_key_tenant_id_id", "tenant_id", "id"),
    Index("ix_api_key_kind", "kind"),
    **_OPTIONS,
)

audit_log = Table(
    "audit_log",
    metadata,
    _key(),
    Column("at", BigInteger, nullable=False),
    Column("tenant_id", Integer, nullable=False, comment="whose thing was changed"),
    Column("actor", String(128), nullable=False, comment="the key's name"),
    Column("actor_key_id", BigInteger),
    Column("actor_tenant_id", Integer, nullable=False),
    Column("action", String(64), nullable=False),
    Column("target", String(160), nullable=False, comment="kind:id"),
    Column("old_values", Text, comment="JSON, of what changed"),
    Column("new_values", Text, comment="JSON, of what changed"),
    Column("address", String(64), nullable=False),
    Column("request_id", String(128), nullable=False),
    Index("ix_audit_log_at_id", "at", "id"),
    Index("ix_audit_log_tenant_id_at_id", "tenant_id", "at", "id"),
    Index("ix_audit_log_target_at_id", "target", "at", "id"),
    **_OPTIONS,
)

retention_policy = Table(
    "retention_policy",
    metadata,
    Column("tenant_id", Integer, primary_key=True, autoincrement=False),
    Column("status", SmallInteger, primary_key=True, autoincrement=False),
    Column("keep_ms", BigInteger, nullable=False),
    **{**_OPTIONS, "sqlite_autoincrement": False},
)
"""Of a tenant that keeps its jobs of a status for another time than the settings say."""

dispatch_term = Table(
    "dispatch_term",
    metadata,
    Column("partition_no", SmallInteger, primary_key=True, autoincrement=False),
    Column("term", BigInteger, nullable=False),
    Column("holder", String(128), nullable=False),
    Column("since", BigInteger, nullable=False),
    **{**_OPTIONS, "sqlite_autoincrement": False},
)

schema_revision = Table(
    "schema_revision",
    metadata,
    Column("id", SmallInteger, primary_key=True, autoincrement=False),
    Column("revision", Integer, nullable=False),
    Column("oldest_code", Integer, nullable=False, comment="lowest code revision that works"),
    **{**_OPTIONS, "sqlite_autoincrement": False},
)
