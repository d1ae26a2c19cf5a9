CREATE TABLE alembic_version (
    version_num VARCHAR(32) NOT NULL, 
    CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);

-- Running upgrade  -> 0001

CREATE TABLE callback_delivery (
    id BIGINT NOT NULL AUTO_INCREMENT, 
    delivery_id VARCHAR(36) NOT NULL, 
    tenant_id INTEGER NOT NULL DEFAULT '0', 
    job_id BIGINT NOT NULL, 
    execution_id VARCHAR(36), 
    event_type VARCHAR(32) NOT NULL, 
    url VARCHAR(2048) NOT NULL, 
    body MEDIUMTEXT NOT NULL, 
    status SMALLINT NOT NULL, 
    tries INTEGER NOT NULL COMMENT 'begun; the last one may be under way', 
    owner_worker_id VARCHAR(128), 
    next_try_at BIGINT NOT NULL COMMENT 'while owned: the lease''s end', 
    last_status_code INTEGER, 
    last_error VARCHAR(2000), 
    last_latency_ms INTEGER, 
    created_at BIGINT NOT NULL, 
    ended_at BIGINT, 
    CONSTRAINT pk_callback_delivery PRIMARY KEY (id), 
    CONSTRAINT uq_callback_delivery_delivery_id UNIQUE (delivery_id)
)CHARSET=utf8mb4 ENGINE=InnoDB COLLATE utf8mb4_bin;

CREATE INDEX ix_callback_delivery_due ON callback_delivery (status, next_try_at, id);

CREATE INDEX ix_callback_delivery_job_id ON callback_delivery (job_id);

CREATE TABLE dispatch_term (
    partition_no SMALLINT NOT NULL, 
    term BIGINT NOT NULL, 
    holder VARCHAR(128) NOT NULL, 
    since BIGINT NOT NULL, 
    CONSTRAINT pk_dispatch_term PRIMARY KEY (partition_no)
)CHARSET=utf8mb4 ENGINE=InnoDB COLLATE utf8mb4_bin;

CREATE TABLE job_info (
    id BIGINT NOT NULL AUTO_INCREMENT, 
    tenant_id INTEGER NOT NULL DEFAULT '0', 
    client_request_id VARCHAR(128), 
    request_digest VARCHAR(1024), 
    submit_token VARCHAR(32), 
    parent_id BIGINT, 
    root_id BIGINT, 
    nominal_time BIGINT, 
    shard_index INTEGER NOT NULL DEFAULT '0', 
    shard_total INTEGER NOT NULL DEFAULT '1', 
    child_key VARCHAR(128) NOT NULL DEFAULT '', 
    kind SMALLINT NOT NULL, 
    job_name VARCHAR(128) NOT NULL, 
    job_handler VARCHAR(128) NOT NULL, 
    queue_id BIGINT NOT NULL, 
    partition_no SMALLINT NOT NULL DEFAULT '0', 
    status SMALLINT NOT NULL, 
    priority SMALLINT NOT NULL, 
    next_trigger_time BIGINT, 
    trigger_ts BIGINT NOT NULL DEFAULT '0', 
    owner_worker_id VARCHAR(128), 
    execution_id VARCHAR(36), 
    stopping_execution_id VARCHAR(36), 
    claim_token VARCHAR(32), 
    attempt INTEGER NOT NULL DEFAULT '0', 
    returned INTEGER NOT NULL DEFAULT '0', 
    max_retry INTEGER NOT NULL, 
    retry_interval_ms BIGINT NOT NULL, 
    retry_backoff VARCHAR(16) NOT NULL, 
    timeout_ms BIGINT, 
    callback_url VARCHAR(2048), 
    params TEXT, 
    params_in_payload BOOL NOT NULL DEFAULT '0', 
    error_code VARCHAR(64), 
    error_message VARCHAR(2000), 
    cron_expr VARCHAR(128), 
    cron_dialect VARCHAR(16), 
    timezone VARCHAR(64), 
    interval_ms BIGINT, 
    interval_mode VARCHAR(16), 
    dst_gap VARCHAR(16), 
    dst_fold VARCHAR(16), 
    misfire_policy VARCHAR(16), 
    catch_up_ms BIGINT, 
    overlap_policy VARCHAR(16), 
    jitter_ms BIGINT, 
    max_fires BIGINT, 
    fires BIGINT NOT NULL DEFAULT '0', 
    start_at BIGINT, 
    end_at BIGINT, 
    version INTEGER NOT NULL DEFAULT '0', 
    revision INTEGER NOT NULL DEFAULT '0', 
    created_at BIGINT NOT NULL, 
    updated_at BIGINT NOT NULL, 
    finished_at BIGINT, 
    CONSTRAINT pk_job_info PRIMARY KEY (id), 
    CONSTRAINT uq_job_info_parent_id_nominal_time_shard_index_child_key UNIQUE (parent_id, nominal_time, shard_index, child_key), 
    CONSTRAINT uq_job_info_tenant_id_client_request_id UNIQUE (tenant_id, client_request_id)
)CHARSET=utf8mb4 ENGINE=InnoDB COLLATE utf8mb4_bin;

CREATE INDEX ix_job_info_claim ON job_info (status, queue_id, priority, next_trigger_time, id);

CREATE TABLE job_label (
    job_id BIGINT NOT NULL, 
    name VARCHAR(64) NOT NULL, 
    value VARCHAR(128) NOT NULL, 
    CONSTRAINT pk_job_label PRIMARY KEY (job_id, name)
)CHARSET=utf8mb4 ENGINE=InnoDB COLLATE utf8mb4_bin;

CREATE INDEX ix_job_label_name_value_job_id ON job_label (name, value, job_id);

CREATE TABLE job_log (
    id BIGINT NOT NULL AUTO_INCREMENT, 
    execution_id VARCHAR(36) NOT NULL, 
    job_id BIGINT NOT NULL, 
    attempt INTEGER NOT NULL, 
    trigger_ts BIGINT NOT NULL, 
    worker_id VARCHAR(128) NOT NULL, 
    term BIGINT NOT NULL, 
    status SMALLINT NOT NULL, 
    claimed_at BIGINT NOT NULL, 
    accepted_at BIGINT, 
    started_at BIGINT, 
    finished_at BIGINT, 
    error_code VARCHAR(64), 
    error_message VARCHAR(2000), 
    reason VARCHAR(255) COMMENT 'why the platform, not the handler, ended it', 
    result TEXT, 
    result_in_payload BOOL NOT NULL DEFAULT '0', 
    log_pointer VARCHAR(255), 
    stale_at BIGINT COMMENT 'a late report came, and changed nothing', 
    stale_status VARCHAR(16), 
    CONSTRAINT pk_job_log PRIMARY KEY (id), 
    CONSTRAINT uq_job_log_execution_id UNIQUE (execution_id)
)CHARSET=utf8mb4 ENGINE=InnoDB COLLATE utf8mb4_bin;

CREATE INDEX ix_job_log_job_id_id ON job_log (job_id, id);

CREATE TABLE job_payload (
    job_id BIGINT NOT NULL, 
    slot VARCHAR(36) NOT NULL COMMENT '''params'', or an execution id', 
    body MEDIUMTEXT NOT NULL, 
    CONSTRAINT pk_job_payload PRIMARY KEY (job_id, slot)
)CHARSET=utf8mb4 ENGINE=InnoDB COLLATE utf8mb4_bin;

CREATE TABLE queue (
    id BIGINT NOT NULL AUTO_INCREMENT, 
    tenant_id INTEGER NOT NULL DEFAULT '0', 
    job_handler VARCHAR(128) NOT NULL, 
    requirement VARCHAR(255) NOT NULL DEFAULT '', 
    partition_no SMALLINT NOT NULL DEFAULT '0', 
    CONSTRAINT pk_queue PRIMARY KEY (id), 
    CONSTRAINT uq_queue_job_handler_requirement_tenant_id_partition_no UNIQUE (job_handler, requirement, tenant_id, partition_no)
)CHARSET=utf8mb4 ENGINE=InnoDB COLLATE utf8mb4_bin;

CREATE TABLE schedule_skip (
    id BIGINT NOT NULL AUTO_INCREMENT, 
    schedule_id BIGINT NOT NULL, 
    from_time BIGINT NOT NULL, 
    to_time BIGINT NOT NULL, 
    count BIGINT NOT NULL, 
    reason VARCHAR(32) NOT NULL, 
    CONSTRAINT pk_schedule_skip PRIMARY KEY (id), 
    CONSTRAINT uq_schedule_skip_schedule_id_from_time UNIQUE (schedule_id, from_time)
)CHARSET=utf8mb4 ENGINE=InnoDB COLLATE utf8mb4_bin;

CREATE TABLE schema_revision (
    id SMALLINT NOT NULL, 
    revision INTEGER NOT NULL, 
    oldest_code INTEGER NOT NULL COMMENT 'lowest code revision that works', 
    CONSTRAINT pk_schema_revision PRIMARY KEY (id)
)CHARSET=utf8mb4 ENGINE=InnoDB COLLATE utf8mb4_bin;

CREATE TABLE worker_node (
    id VARCHAR(128) NOT NULL COMMENT 'name#bootId', 
    name VARCHAR(64) NOT NULL, 
    boot_id VARCHAR(64) NOT NULL, 
    url VARCHAR(512) NOT NULL, 
    version VARCHAR(64) NOT NULL, 
    state VARCHAR(16) NOT NULL, 
    handlers MEDIUMTEXT NOT NULL, 
    labels TEXT NOT NULL, 
    capacity INTEGER NOT NULL, 
    weight FLOAT NOT NULL, 
    delivers BOOL NOT NULL, 
    load_seq BIGINT NOT NULL, 
    active INTEGER NOT NULL, 
    queued INTEGER NOT NULL, 
    avg_cost_ms FLOAT NOT NULL, 
    cpu_idle_percent FLOAT NOT NULL, 
    held MEDIUMTEXT NOT NULL, 
    beats BIGINT NOT NULL, 
    first_heartbeat BIGINT NOT NULL, 
    last_heartbeat BIGINT NOT NULL, 
    CONSTRAINT pk_worker_node PRIMARY KEY (id)
)CHARSET=utf8mb4 ENGINE=InnoDB COLLATE utf8mb4_bin;

CREATE TABLE stopping_execution (
    execution_id VARCHAR(36) NOT NULL, 
    job_id BIGINT NOT NULL, 
    trigger_ts BIGINT NOT NULL, 
    worker_id VARCHAR(128) NOT NULL, 
    CONSTRAINT pk_stopping_execution PRIMARY KEY (execution_id)
)CHARSET=utf8mb4 ENGINE=InnoDB COLLATE utf8mb4_bin;

INSERT INTO dispatch_term (partition_no, term, holder, since) VALUES (0, 0, '', 0);

INSERT INTO schema_revision (id, revision, oldest_code) VALUES (1, 1, 1);

INSERT INTO alembic_version (version_num) VALUES ('0001');

-- Running upgrade 0001 -> 0002

ALTER TABLE job_log ADD COLUMN progress DOUBLE;

ALTER TABLE job_log ADD COLUMN progress_text VARCHAR(200);

ALTER TABLE job_log ADD COLUMN progress_at BIGINT;

CREATE TABLE execution_log (
    log_id BIGINT NOT NULL COMMENT 'job_log.id', 
    next_seq BIGINT NOT NULL, 
    head_bytes INTEGER NOT NULL, 
    tail_bytes INTEGER NOT NULL, 
    tail_first_seq BIGINT COMMENT 'NULL until the head is full', 
    dropped_lines BIGINT NOT NULL COMMENT 'that slid out of the tail', 
    dropped_bytes BIGINT NOT NULL, 
    complete BOOL NOT NULL COMMENT 'no more lines will come', 
    CONSTRAINT pk_execution_log PRIMARY KEY (log_id)
)CHARSET=utf8mb4 ENGINE=InnoDB COLLATE utf8mb4_bin;

CREATE TABLE log_chunk (
    log_id BIGINT NOT NULL, 
    first_seq BIGINT NOT NULL, 
    line_count INTEGER NOT NULL, 
    byte_count INTEGER NOT NULL, 
    dropped_lines BIGINT NOT NULL COMMENT 'that its markers stand for', 
    dropped_bytes BIGINT NOT NULL, 
    body MEDIUMTEXT NOT NULL COMMENT 'JSON: [[seq, time, level, source, ...], ...]', 
    CONSTRAINT pk_log_chunk PRIMARY KEY (log_id, first_seq)
)CHARSET=utf8mb4 ENGINE=InnoDB COLLATE utf8mb4_bin;

UPDATE schema_revision SET revision = 2 WHERE id = 1;

UPDATE alembic_version SET version_num='0002' WHERE alembic_version.version_num = '0001';

-- Running upgrade 0002 -> 0003

CREATE TABLE handler_schema (
    digest VARCHAR(64) NOT NULL COMMENT 'SHA-256 of the body', 
    body MEDIUMTEXT NOT NULL, 
    seen_at BIGINT NOT NULL, 
    CONSTRAINT pk_handler_schema PRIMARY KEY (digest)
)CHARSET=utf8mb4 ENGINE=InnoDB COLLATE utf8mb4_bin;

UPDATE schema_revision SET revision = 3, oldest_code = 1 WHERE id = 1;

UPDATE alembic_version SET version_num='0003' WHERE alembic_version.version_num = '0002';

-- Running upgrade 0003 -> 0004

CREATE TABLE bulk_operation (
    id BIGINT NOT NULL AUTO_INCREMENT, 
    operation_id VARCHAR(36) NOT NULL, 
    tenant_id INTEGER NOT NULL, 
    client_request_id VARCHAR(128), 
    request_digest VARCHAR(1024) NOT NULL, 
    action VARCHAR(16) NOT NULL, 
    filter TEXT NOT NULL COMMENT 'JSON, as the caller sent it', 
    rate FLOAT NOT NULL COMMENT 'most changes a second', 
    status SMALLINT NOT NULL, 
    until_id BIGINT NOT NULL COMMENT 'later jobs are not touched', 
    after_id BIGINT NOT NULL COMMENT 'the last job that had its turn', 
    after_finished BIGINT NOT NULL COMMENT 'when that had finished', 
    resume_at BIGINT NOT NULL COMMENT 'the rate allows no change before', 
    matched BIGINT NOT NULL, 
    matched_is_minimum BOOL NOT NULL, 
    changed BIGINT NOT NULL DEFAULT '0', 
    refused TEXT NOT NULL COMMENT 'JSON: how many by code', 
    error_code VARCHAR(64), 
    error_message VARCHAR(2000), 
    created_at BIGINT NOT NULL, 
    updated_at BIGINT NOT NULL, 
    started_at BIGINT, 
    finished_at BIGINT, 
    CONSTRAINT pk_bulk_operation PRIMARY KEY (id), 
    CONSTRAINT uq_bulk_operation_operation_id UNIQUE (operation_id), 
    CONSTRAINT uq_bulk_operation_tenant_id_client_request_id UNIQUE (tenant_id, client_request_id)
)CHARSET=utf8mb4 ENGINE=InnoDB COLLATE utf8mb4_bin;

CREATE INDEX ix_bulk_operation_status_id ON bulk_operation (status, id);

CREATE INDEX ix_bulk_operation_tenant_id_id ON bulk_operation (tenant_id, id);

CREATE INDEX ix_job_info_finished ON job_info (tenant_id, finished_at, id);

UPDATE schema_revision SET revision = 4 WHERE id = 1;

UPDATE alembic_version SET version_num='0004' WHERE alembic_version.version_num = '0003';

-- Running upgrade 0004 -> 0005

ALTER TABLE job_info ADD COLUMN expires_at BIGINT COMMENT 'fails unless an attempt has begun by then';

CREATE TABLE job_expiry (
    look_at BIGINT NOT NULL, 
    job_id BIGINT NOT NULL, 
    CONSTRAINT pk_job_expiry PRIMARY KEY (look_at, job_id)
)CHARSET=utf8mb4 ENGINE=InnoDB COLLATE utf8mb4_bin;

UPDATE schema_revision SET revision = 5 WHERE id = 1;

UPDATE alembic_version SET version_num='0005' WHERE alembic_version.version_num = '0004';

-- Running upgrade 0005 -> 0006

ALTER TABLE job_info ADD COLUMN child_queue_id BIGINT COMMENT 'the queue of what a schedule spawns';

ALTER TABLE job_info ADD COLUMN anchor_at BIGINT COMMENT 'from when a fixed rate is counted';

ALTER TABLE job_info ADD COLUMN misfire_cap INTEGER;

ALTER TABLE job_info ADD COLUMN misfire_spacing_ms BIGINT;

ALTER TABLE job_info ADD COLUMN skip_from BIGINT COMMENT 'the ledger row that the last fire lies in';

ALTER TABLE job_info ADD COLUMN skip_reason VARCHAR(32);

CREATE TABLE schedule_live (
    schedule_id BIGINT NOT NULL, 
    child_id BIGINT NOT NULL, 
    waits SMALLINT NOT NULL COMMENT '1 while BLOCKED', 
    backfill_id BIGINT NOT NULL COMMENT '0 for its own fires', 
    CONSTRAINT pk_schedule_live PRIMARY KEY (schedule_id, child_id)
)CHARSET=utf8mb4 ENGINE=InnoDB COLLATE utf8mb4_bin;

CREATE INDEX ix_schedule_live_waits ON schedule_live (waits, schedule_id);

CREATE TABLE schedule_backfill (
    id BIGINT NOT NULL AUTO_INCREMENT, 
    schedule_id BIGINT NOT NULL, 
    token VARCHAR(32) NOT NULL, 
    status SMALLINT NOT NULL COMMENT '0 open, 1 done, 2 stopped', 
    cursor_time BIGINT NOT NULL COMMENT 'done up to here', 
    from_time BIGINT NOT NULL, 
    to_time BIGINT NOT NULL, 
    max_concurrent INTEGER NOT NULL, 
    spawned BIGINT NOT NULL, 
    created_at BIGINT NOT NULL, 
    ended_at BIGINT, 
    CONSTRAINT pk_schedule_backfill PRIMARY KEY (id), 
    CONSTRAINT uq_schedule_backfill_token UNIQUE (token)
)CHARSET=utf8mb4 ENGINE=InnoDB COLLATE utf8mb4_bin;

CREATE INDEX ix_schedule_backfill_open ON schedule_backfill (status, id);

CREATE INDEX ix_schedule_backfill_of ON schedule_backfill (schedule_id, id);

UPDATE schema_revision SET revision = 6 WHERE id = 1;

UPDATE alembic_version SET version_num='0006' WHERE alembic_version.version_num = '0005';

-- Running upgrade 0006 -> 0007

CREATE TABLE tenant (
    id INTEGER NOT NULL, 
    name VARCHAR(64) NOT NULL, 
    token VARCHAR(32) NOT NULL, 
    created_at BIGINT NOT NULL, 
    disabled_at BIGINT, 
    CONSTRAINT pk_tenant PRIMARY KEY (id), 
    CONSTRAINT uq_tenant_name UNIQUE (name)
)CHARSET=utf8mb4 ENGINE=InnoDB COLLATE utf8mb4_bin;

CREATE TABLE api_key (
    id BIGINT NOT NULL AUTO_INCREMENT, 
    prefix VARCHAR(16) NOT NULL COMMENT 'shown and searched', 
    kind VARCHAR(8) NOT NULL COMMENT 'caller, worker', 
    tenant_id INTEGER NOT NULL, 
    name VARCHAR(64) NOT NULL, 
    roles VARCHAR(64) NOT NULL COMMENT 'a comma list', 
    worker_group VARCHAR(64), 
    digest VARCHAR(64) NOT NULL COMMENT 'SHA-256', 
    old_digest VARCHAR(64), 
    old_until BIGINT COMMENT 'the old one works so long', 
    created_at BIGINT NOT NULL, 
    created_by VARCHAR(128) NOT NULL, 
    rotated_at BIGINT, 
    expires_at BIGINT, 
    revoked_at BIGINT, 
    last_used_at BIGINT, 
    CONSTRAINT pk_api_key PRIMARY KEY (id), 
    CONSTRAINT uq_api_key_prefix UNIQUE (prefix)
)CHARSET=utf8mb4 ENGINE=InnoDB COLLATE utf8mb4_bin;

CREATE INDEX ix_api_key_tenant_id_id ON api_key (tenant_id, id);

CREATE INDEX ix_api_key_kind ON api_key (kind);

CREATE TABLE audit_log (
    id BIGINT NOT NULL AUTO_INCREMENT, 
    at BIGINT NOT NULL, 
    tenant_id INTEGER NOT NULL COMMENT 'whose thing was changed', 
    actor VARCHAR(128) NOT NULL COMMENT 'the key''s name', 
    actor_key_id BIGINT, 
    actor_tenant_id INTEGER NOT NULL, 
    action VARCHAR(64) NOT NULL, 
    target VARCHAR(160) NOT NULL COMMENT 'kind:id', 
    old_values TEXT COMMENT 'JSON, of what changed', 
    new_values TEXT COMMENT 'JSON, of what changed', 
    address VARCHAR(64) NOT NULL, 
    request_id VARCHAR(128) NOT NULL, 
    CONSTRAINT pk_audit_log PRIMARY KEY (id)
)CHARSET=utf8mb4 ENGINE=InnoDB COLLATE utf8mb4_bin;

CREATE INDEX ix_audit_log_at_id ON audit_log (at, id);

CREATE INDEX ix_audit_log_tenant_id_at_id ON audit_log (tenant_id, at, id);

CREATE INDEX ix_audit_log_target_at_id ON audit_log (target, at, id);

ALTER TABLE worker_node ADD COLUMN worker_group VARCHAR(64) COMMENT 'of the key by which it beats; NULL: the internal token';

ALTER TABLE worker_node ADD COLUMN key_digest VARCHAR(64) COMMENT 'of the key it beats with';

INSERT INTO tenant (id, name, token, created_at, disabled_at) VALUES (0, 'default', '', 0, NULL);

UPDATE schema_revision SET revision = 7 WHERE id = 1;

UPDATE alembic_version SET version_num='0007' WHERE alembic_version.version_num = '0006';

-- Running upgrade 0007 -> 0008

ALTER TABLE job_info ADD COLUMN callback_events VARCHAR(64) COMMENT 'a comma list; NULL: how it ends';

ALTER TABLE job_info ADD COLUMN callback_headers TEXT COMMENT 'JSON; secret values are sealed';

ALTER TABLE callback_delivery ADD COLUMN host VARCHAR(255) NOT NULL COMMENT 'host:port' DEFAULT '';

ALTER TABLE callback_delivery ADD COLUMN headers TEXT COMMENT 'as the job had them then';

ALTER TABLE callback_delivery ADD COLUMN owed_since BIGINT NOT NULL COMMENT 'its end, or when it was last sent again; 0: created_at' DEFAULT '0';

ALTER TABLE worker_node ADD COLUMN egress_allow TEXT COMMENT 'JSON; NULL: it does not say so';

CREATE INDEX ix_callback_delivery_host ON callback_delivery (status, host, next_try_at, id);

DROP INDEX ix_callback_delivery_due ON callback_delivery;

CREATE TABLE callback_try (
    job_id BIGINT NOT NULL, 
    delivery_key BIGINT NOT NULL, 
    try_number INTEGER NOT NULL, 
    tried_at BIGINT NOT NULL, 
    worker_id VARCHAR(128) NOT NULL, 
    delivered BOOL NOT NULL, 
    status_code INTEGER, 
    latency_ms INTEGER NOT NULL, 
    error VARCHAR(2000), 
    answer TEXT COMMENT 'its first 2 KiB', 
    CONSTRAINT pk_callback_try PRIMARY KEY (job_id, delivery_key, try_number)
)CHARSET=utf8mb4 ENGINE=InnoDB COLLATE utf8mb4_bin;

CREATE TABLE webhook_secret (
    id BIGINT NOT NULL AUTO_INCREMENT, 
    tenant_id INTEGER NOT NULL, 
    sealed TEXT NOT NULL COMMENT 'empty: the one that workers are set to', 
    shown VARCHAR(128) NOT NULL COMMENT 'masked, or public', 
    created_at BIGINT NOT NULL, 
    expires_at BIGINT COMMENT 'of one that was rotated', 
    CONSTRAINT pk_webhook_secret PRIMARY KEY (id)
)CHARSET=utf8mb4 ENGINE=InnoDB COLLATE utf8mb4_bin;

CREATE INDEX ix_webhook_secret_tenant_id ON webhook_secret (tenant_id);

CREATE TABLE egress_allow (
    tenant_id INTEGER NOT NULL, 
    networks TEXT NOT NULL COMMENT 'JSON', 
    updated_at BIGINT NOT NULL, 
    CONSTRAINT pk_egress_allow PRIMARY KEY (tenant_id)
)CHARSET=utf8mb4 ENGINE=InnoDB COLLATE utf8mb4_bin;

UPDATE schema_revision SET revision = 8 WHERE id = 1;

UPDATE alembic_version SET version_num='0008' WHERE alembic_version.version_num = '0007';

-- Running upgrade 0008 -> 0009

ALTER TABLE job_info ADD COLUMN concurrency_key VARCHAR(128);

ALTER TABLE job_info ADD COLUMN concurrency_limit INTEGER;

ALTER TABLE job_info ADD COLUMN rate_key VARCHAR(128);

ALTER TABLE job_info ADD COLUMN rate_per_second DOUBLE;

ALTER TABLE job_info ADD COLUMN rate_due BIGINT COMMENT 'the time that its rate key gave it';

CREATE TABLE tenant_limits (
    tenant_id INTEGER NOT NULL, 
    weight DOUBLE NOT NULL DEFAULT '1', 
    submissions_per_second DOUBLE, 
    waiting_jobs INTEGER, 
    running_jobs INTEGER, 
    may_borrow BOOL NOT NULL COMMENT 'more runs than running_jobs, while nobody else wants the slots' DEFAULT '1', 
    CONSTRAINT pk_tenant_limits PRIMARY KEY (tenant_id)
)CHARSET=utf8mb4 ENGINE=InnoDB COLLATE utf8mb4_bin;

CREATE TABLE limit_key (
    tenant_id INTEGER NOT NULL, 
    kind SMALLINT NOT NULL, 
    name VARCHAR(128) NOT NULL, 
    next_at BIGINT NOT NULL COMMENT 'microseconds, of a rate', 
    CONSTRAINT pk_limit_key PRIMARY KEY (tenant_id, kind, name)
)CHARSET=utf8mb4 ENGINE=InnoDB COLLATE utf8mb4_bin;

CREATE TABLE concurrency_slot (
    tenant_id INTEGER NOT NULL, 
    name VARCHAR(128) NOT NULL, 
    waits SMALLINT NOT NULL COMMENT '1 while BLOCKED', 
    turn SMALLINT NOT NULL COMMENT '9 less the priority', 
    due BIGINT NOT NULL, 
    job_id BIGINT NOT NULL, 
    CONSTRAINT pk_concurrency_slot PRIMARY KEY (tenant_id, name, waits, turn, due, job_id)
)CHARSET=utf8mb4 ENGINE=InnoDB COLLATE utf8mb4_bin;

UPDATE schema_revision SET revision = 9 WHERE id = 1;

UPDATE alembic_version SET version_num='0009' WHERE alembic_version.version_num = '0008';

-- Running upgrade 0009 -> 0010

CREATE TABLE retention_policy (
    tenant_id INTEGER NOT NULL, 
    status SMALLINT NOT NULL, 
    keep_ms BIGINT NOT NULL, 
    CONSTRAINT pk_retention_policy PRIMARY KEY (tenant_id, status)
)CHARSET=utf8mb4 ENGINE=InnoDB COLLATE utf8mb4_bin;

CREATE INDEX ix_queue_tenant_id_id ON queue (tenant_id, id);

UPDATE schema_revision SET revision = 10 WHERE id = 1;

UPDATE alembic_version SET version_num='0010' WHERE alembic_version.version_num = '0009';

-- Running upgrade 0010 -> 0011

ALTER TABLE job_info ADD COLUMN secret SMALLINT NOT NULL COMMENT '1 params, 2 result' DEFAULT '0';

UPDATE schema_revision SET revision = 11 WHERE id = 1;

UPDATE alembic_version SET version_num='0011' WHERE alembic_version.version_num = '0010';

-- Running upgrade 0011 -> 0012

ALTER TABLE tenant_limits ADD COLUMN stored_bytes BIGINT;

ALTER TABLE job_payload ADD COLUMN byte_count INTEGER COMMENT 'of the body; NULL: by older code, which did not tell';

CREATE TABLE tenant_stored (
    tenant_id INTEGER NOT NULL, 
    bytes BIGINT NOT NULL, 
    counted_from BIGINT NOT NULL COMMENT 'when the count began', 
    CONSTRAINT pk_tenant_stored PRIMARY KEY (tenant_id)
)CHARSET=utf8mb4 ENGINE=InnoDB COLLATE utf8mb4_bin;

ALTER TABLE limit_key ADD COLUMN begins_at BIGINT NOT NULL COMMENT 'microseconds: when the begun runs would all have had their time' DEFAULT '0';

UPDATE schema_revision SET revision = 12 WHERE id = 1;

UPDATE alembic_version SET version_num='0012' WHERE alembic_version.version_num = '0011';

-- Running upgrade 0012 -> 0013

ALTER TABLE job_info MODIFY request_digest VARCHAR(2048) NULL;

ALTER TABLE bulk_operation MODIFY rate DOUBLE NOT NULL COMMENT 'most changes a second';

UPDATE schema_revision SET revision = 13 WHERE id = 1;

UPDATE alembic_version SET version_num='0013' WHERE alembic_version.version_num = '0012';

-- Running upgrade 0013 -> 0014

ALTER TABLE callback_delivery ADD COLUMN success_try INTEGER COMMENT 'the first success, not in callback_try then';

ALTER TABLE callback_delivery ADD COLUMN success_at BIGINT;

ALTER TABLE callback_delivery ADD COLUMN success_worker_id VARCHAR(128);

ALTER TABLE callback_delivery ADD COLUMN success_status_code INTEGER;

ALTER TABLE callback_delivery ADD COLUMN success_latency_ms INTEGER;

ALTER TABLE callback_delivery ADD COLUMN success_answer TEXT COMMENT 'its first 2 KiB';

UPDATE schema_revision SET revision = 14 WHERE id = 1;

UPDATE alembic_version SET version_num='0014' WHERE alembic_version.version_num = '0013';

