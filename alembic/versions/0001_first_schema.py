"""The first schema: jobs, queues, executions, workers, callbacks, the term of the dispatch lock."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import mysql

revision = "0001"
down_revision = None


def _only_on_sqlite(condition: str, name: str) -> sa.CheckConstraint:
    """MySQL's columns have their length, and its length() counts bytes."""
    return sa.CheckConstraint(condition, name=op.f(name)).ddl_if(dialect="sqlite")


def upgrade() -> None:
    op.create_table(
        "callback_delivery",
        sa.Column(
            "id",
            sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
            autoincrement=True,
            nullable=False,
        ),
        sa.Column("delivery_id", sa.String(length=36), nullable=False),
        sa.Column("tenant_id", sa.Integer(), server_default="0", nullable=False),
        sa.Column("job_id", sa.BigInteger(), nullable=False),
        sa.Column("execution_id", sa.String(length=36), nullable=True),
        sa.Column("event_type", sa.String(length=32), nullable=False),
        sa.Column("url", sa.String(length=2048), nullable=False),
        sa.Column(
            "body",
            sa.Text()
            .with_variant(mysql.MEDIUMTEXT(), "mariadb")
            .with_variant(mysql.MEDIUMTEXT(), "mysql"),
            nullable=False,
        ),
        sa.Column("status", sa.SmallInteger(), nullable=False),
        sa.Column(
            "tries", sa.Integer(), nullable=False, comment="begun; the last one may be under way"
        ),
        sa.Column("owner_worker_id", sa.String(length=128), nullable=True),
        sa.Column(
            "next_try_at", sa.BigInteger(), nullable=False, comment="while owned: the lease's end"
        ),
        sa.Column("last_status_code", sa.Integer(), nullable=True),
        sa.Column("last_error", sa.String(length=2000), nullable=True),
        sa.Column("last_latency_ms", sa.Integer(), nullable=True),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("ended_at", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_callback_delivery")),
        sa.UniqueConstraint("delivery_id", name=op.f("uq_callback_delivery_delivery_id")),
        mysql_charset="utf8mb4",
        mysql_collate="utf8mb4_bin",
        mysql_engine="InnoDB",
        sqlite_autoincrement=True,
    )
    op.create_index(
        "ix_callback_delivery_due",
        "callback_delivery",
        ["status", "next_try_at", "id"],
        unique=False,
    )
    op.create_index("ix_callback_delivery_job_id", "callback_delivery", ["job_id"], unique=False)
    op.create_table(
        "dispatch_term",
        sa.Column("partition_no", sa.SmallInteger(), autoincrement=False, nullable=False),
        sa.Column("term", sa.BigInteger(), nullable=False),
        sa.Column("holder", sa.String(length=128), nullable=False),
        sa.Column("since", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("partition_no", name=op.f("pk_dispatch_term")),
        mysql_charset="utf8mb4",
        mysql_collate="utf8mb4_bin",
        mysql_engine="InnoDB",
        sqlite_autoincrement=False,
    )
    op.create_table(
        "job_info",
        sa.Column(
            "id",
            sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
            autoincrement=True,
            nullable=False,
        ),
        sa.Column("tenant_id", sa.Integer(), server_default="0", nullable=False),
        sa.Column("client_request_id", sa.String(length=128), nullable=True),
        sa.Column("request_digest", sa.String(length=1024), nullable=True),
        sa.Column("submit_token", sa.String(length=32), nullable=True),
        sa.Column("parent_id", sa.BigInteger(), nullable=True),
        sa.Column("root_id", sa.BigInteger(), nullable=True),
        sa.Column("nominal_time", sa.BigInteger(), nullable=True),
        sa.Column("shard_index", sa.Integer(), server_default="0", nullable=False),
        sa.Column("shard_total", sa.Integer(), server_default="1", nullable=False),
        sa.Column("child_key", sa.String(length=128), server_default="", nullable=False),
        sa.Column("kind", sa.SmallInteger(), nullable=False),
        sa.Column("job_name", sa.String(length=128), nullable=False),
        sa.Column("job_handler", sa.String(length=128), nullable=False),
        sa.Column("queue_id", sa.BigInteger(), nullable=False),
        sa.Column("partition_no", sa.SmallInteger(), server_default="0", nullable=False),
        sa.Column("status", sa.SmallInteger(), nullable=False),
        sa.Column("priority", sa.SmallInteger(), nullable=False),
        sa.Column("next_trigger_time", sa.BigInteger(), nullable=True),
        sa.Column("trigger_ts", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("owner_worker_id", sa.String(length=128), nullable=True),
        sa.Column("execution_id", sa.String(length=36), nullable=True),
        sa.Column("stopping_execution_id", sa.String(length=36), nullable=True),
        sa.Column("claim_token", sa.String(length=32), nullable=True),
        sa.Column("attempt", sa.Integer(), server_default="0", nullable=False),
        sa.Column("returned", sa.Integer(), server_default="0", nullable=False),
        sa.Column("max_retry", sa.Integer(), nullable=False),
        sa.Column("retry_interval_ms", sa.BigInteger(), nullable=False),
        sa.Column("retry_backoff", sa.String(length=16), nullable=False),
        sa.Column("timeout_ms", sa.BigInteger(), nullable=True),
        sa.Column("callback_url", sa.String(length=2048), nullable=True),
        sa.Column("params", sa.Text(), nullable=True),
        sa.Column("params_in_payload", sa.Boolean(), server_default="0", nullable=False),
        sa.Column("error_code", sa.String(length=64), nullable=True),
        sa.Column("error_message", sa.String(length=2000), nullable=True),
        sa.Column("cron_expr", sa.String(length=128), nullable=True),
        sa.Column("cron_dialect", sa.String(length=16), nullable=True),
        sa.Column("timezone", sa.String(length=64), nullable=True),
        sa.Column("interval_ms", sa.BigInteger(), nullable=True),
        sa.Column("interval_mode", sa.String(length=16), nullable=True),
        sa.Column("dst_gap", sa.String(length=16), nullable=True),
        sa.Column("dst_fold", sa.String(length=16), nullable=True),
        sa.Column("misfire_policy", sa.String(length=16), nullable=True),
        sa.Column("catch_up_ms", sa.BigInteger(), nullable=True),
        sa.Column("overlap_policy", sa.String(length=16), nullable=True),
        sa.Column("jitter_ms", sa.BigInteger(), nullable=True),
        sa.Column("max_fires", sa.BigInteger(), nullable=True),
        sa.Column("fires", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("start_at", sa.BigInteger(), nullable=True),
        sa.Column("end_at", sa.BigInteger(), nullable=True),
        sa.Column("version", sa.Integer(), server_default="0", nullable=False),
        sa.Column("revision", sa.Integer(), server_default="0", nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("updated_at", sa.BigInteger(), nullable=False),
        sa.Column("finished_at", sa.BigInteger(), nullable=True),
        _only_on_sqlite("length(client_request_id) <= 128", "ck_job_info_client_request_id_length"),
        _only_on_sqlite("length(job_handler) <= 128", "ck_job_info_job_handler_length"),
        _only_on_sqlite("length(job_name) <= 128", "ck_job_info_job_name_length"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_job_info")),
        sa.UniqueConstraint(
            "parent_id",
            "nominal_time",
            "shard_index",
            "child_key",
            name=op.f("uq_job_info_parent_id_nominal_time_shard_index_child_key"),
        ),
        sa.UniqueConstraint(
            "tenant_id", "client_request_id", name=op.f("uq_job_info_tenant_id_client_request_id")
        ),
        mysql_charset="utf8mb4",
        mysql_collate="utf8mb4_bin",
        mysql_engine="InnoDB",
        sqlite_autoincrement=True,
    )
    op.create_index(
        "ix_job_info_claim",
        "job_info",
        ["status", "queue_id", "priority", "next_trigger_time", "id"],
        unique=False,
    )
    op.create_table(
        "job_label",
        sa.Column("job_id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("value", sa.String(length=128), nullable=False),
        sa.PrimaryKeyConstraint("job_id", "name", name=op.f("pk_job_label")),
        mysql_charset="utf8mb4",
        mysql_collate="utf8mb4_bin",
        mysql_engine="InnoDB",
        sqlite_autoincrement=False,
    )
    op.create_index(
        "ix_job_label_name_value_job_id", "job_label", ["name", "value", "job_id"], unique=False
    )
    op.create_table(
        "job_log",
        sa.Column(
            "id",
            sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
            autoincrement=True,
            nullable=False,
        ),
        sa.Column("execution_id", sa.String(length=36), nullable=False),
        sa.Column("job_id", sa.BigInteger(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("trigger_ts", sa.BigInteger(), nullable=False),
        sa.Column("worker_id", sa.String(length=128), nullable=False),
        sa.Column("term", sa.BigInteger(), nullable=False),
        sa.Column("status", sa.SmallInteger(), nullable=False),
        sa.Column("claimed_at", sa.BigInteger(), nullable=False),
        sa.Column("accepted_at", sa.BigInteger(), nullable=True),
        sa.Column("started_at", sa.BigInteger(), nullable=True),
        sa.Column("finished_at", sa.BigInteger(), nullable=True),
        sa.Column("error_code", sa.String(length=64), nullable=True),
        sa.Column("error_message", sa.String(length=2000), nullable=True),
        sa.Column(
            "reason",
            sa.String(length=255),
            nullable=True,
            comment="why the platform, not the handler, ended it",
        ),
        sa.Column("result", sa.Text(), nullable=True),
        sa.Column("result_in_payload", sa.Boolean(), server_default="0", nullable=False),
        sa.Column("log_pointer", sa.String(length=255), nullable=True),
        sa.Column(
            "stale_at",
            sa.BigInteger(),
            nullable=True,
            comment="a late report came, and changed nothing",
        ),
        sa.Column("stale_status", sa.String(length=16), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_job_log")),
        sa.UniqueConstraint("execution_id", name=op.f("uq_job_log_execution_id")),
        mysql_charset="utf8mb4",
        mysql_collate="utf8mb4_bin",
        mysql_engine="InnoDB",
        sqlite_autoincrement=True,
    )
    op.create_index("ix_job_log_job_id_id", "job_log", ["job_id", "id"], unique=False)
    op.create_table(
        "job_payload",
        sa.Column("job_id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column(
            "slot", sa.String(length=36), nullable=False, comment="'params', or an execution id"
        ),
        sa.Column(
            "body",
            sa.Text()
            .with_variant(mysql.MEDIUMTEXT(), "mariadb")
            .with_variant(mysql.MEDIUMTEXT(), "mysql"),
            nullable=False,
        ),
        sa.PrimaryKeyConstraint("job_id", "slot", name=op.f("pk_job_payload")),
        mysql_charset="utf8mb4",
        mysql_collate="utf8mb4_bin",
        mysql_engine="InnoDB",
        sqlite_autoincrement=False,
    )
    op.create_table(
        "queue",
        sa.Column(
            "id",
            sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
            autoincrement=True,
            nullable=False,
        ),
        sa.Column("tenant_id", sa.Integer(), server_default="0", nullable=False),
        sa.Column("job_handler", sa.String(length=128), nullable=False),
        sa.Column("requirement", sa.String(length=255), server_default="", nullable=False),
        sa.Column("partition_no", sa.SmallInteger(), server_default="0", nullable=False),
        _only_on_sqlite("length(job_handler) <= 128", "ck_queue_job_handler_length"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_queue")),
        sa.UniqueConstraint(
            "job_handler",
            "requirement",
            "tenant_id",
            "partition_no",
            name=op.f("uq_queue_job_handler_requirement_tenant_id_partition_no"),
        ),
        mysql_charset="utf8mb4",
        mysql_collate="utf8mb4_bin",
        mysql_engine="InnoDB",
        sqlite_autoincrement=True,
    )
    op.create_table(
        "schedule_skip",
        sa.Column(
            "id",
            sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
            autoincrement=True,
            nullable=False,
        ),
        sa.Column("schedule_id", sa.BigInteger(), nullable=False),
        sa.Column("from_time", sa.BigInteger(), nullable=False),
        sa.Column("to_time", sa.BigInteger(), nullable=False),
        sa.Column("count", sa.BigInteger(), nullable=False),
        sa.Column("reason", sa.String(length=32), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_schedule_skip")),
        sa.UniqueConstraint(
            "schedule_id", "from_time", name=op.f("uq_schedule_skip_schedule_id_from_time")
        ),
        mysql_charset="utf8mb4",
        mysql_collate="utf8mb4_bin",
        mysql_engine="InnoDB",
        sqlite_autoincrement=True,
    )
    op.create_table(
        "schema_revision",
        sa.Column("id", sa.SmallInteger(), autoincrement=False, nullable=False),
        sa.Column("revision", sa.Integer(), nullable=False),
        sa.Column(
            "oldest_code", sa.Integer(), nullable=False, comment="lowest code revision that works"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_schema_revision")),
        mysql_charset="utf8mb4",
        mysql_collate="utf8mb4_bin",
        mysql_engine="InnoDB",
        sqlite_autoincrement=False,
    )
    op.create_table(
        "worker_node",
        sa.Column("id", sa.String(length=128), nullable=False, comment="name#bootId"),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("boot_id", sa.String(length=64), nullable=False),
        sa.Column("url", sa.String(length=512), nullable=False),
        sa.Column("version", sa.String(length=64), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column(
            "handlers",
            sa.Text()
            .with_variant(mysql.MEDIUMTEXT(), "mariadb")
            .with_variant(mysql.MEDIUMTEXT(), "mysql"),
            nullable=False,
        ),
        sa.Column("labels", sa.Text(), nullable=False),
        sa.Column("capacity", sa.Integer(), nullable=False),
        sa.Column("weight", sa.Float(), nullable=False),
        sa.Column("delivers", sa.Boolean(), nullable=False),
        sa.Column("load_seq", sa.BigInteger(), nullable=False),
        sa.Column("active", sa.Integer(), nullable=False),
        sa.Column("queued", sa.Integer(), nullable=False),
        sa.Column("avg_cost_ms", sa.Float(), nullable=False),
        sa.Column("cpu_idle_percent", sa.Float(), nullable=False),
        sa.Column(
            "held",
            sa.Text()
            .with_variant(mysql.MEDIUMTEXT(), "mariadb")
            .with_variant(mysql.MEDIUMTEXT(), "mysql"),
            nullable=False,
        ),
        sa.Column("beats", sa.BigInteger(), nullable=False),
        sa.Column("first_heartbeat", sa.BigInteger(), nullable=False),
        sa.Column("last_heartbeat", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_worker_node")),
        mysql_charset="utf8mb4",
        mysql_collate="utf8mb4_bin",
        mysql_engine="InnoDB",
        sqlite_autoincrement=False,
    )
    op.create_table(
        "stopping_execution",
        sa.Column("execution_id", sa.String(length=36), nullable=False),
        sa.Column("job_id", sa.BigInteger(), nullable=False),
        sa.Column("trigger_ts", sa.BigInteger(), nullable=False),
        sa.Column("worker_id", sa.String(length=128), nullable=False),
        sa.PrimaryKeyConstraint("execution_id", name=op.f("pk_stopping_execution")),
        mysql_charset="utf8mb4",
        mysql_collate="utf8mb4_bin",
        mysql_engine="InnoDB",
        sqlite_autoincrement=False,
    )
    op.execute("INSERT INTO dispatch_term (partition_no, term, holder, since) VALUES (0, 0, '', 0)")
    op.execute("INSERT INTO schema_revision (id, revision, oldest_code) VALUES (1, 1, 1)")


def downgrade() -> None:
    raise NotImplementedError("restore a backup: a downgrade would lose jobs")
