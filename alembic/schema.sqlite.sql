CREATE TABLE alembic_version (
	version_num VARCHAR(32) NOT NULL, 
	CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);
CREATE TABLE api_key (
	id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	prefix VARCHAR(16) NOT NULL, 
	kind VARCHAR(8) NOT NULL, 
	tenant_id INTEGER NOT NULL, 
	name VARCHAR(64) NOT NULL, 
	roles VARCHAR(64) NOT NULL, 
	worker_group VARCHAR(64), 
	digest VARCHAR(64) NOT NULL, 
	old_digest VARCHAR(64), 
	old_until BIGINT, 
	created_at BIGINT NOT NULL, 
	created_by VARCHAR(128) NOT NULL, 
	rotated_at BIGINT, 
	expires_at BIGINT, 
	revoked_at BIGINT, 
	last_used_at BIGINT, 
	CONSTRAINT uq_api_key_prefix UNIQUE (prefix)
);
CREATE TABLE audit_log (
	id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	at BIGINT NOT NULL, 
	tenant_id INTEGER NOT NULL, 
	actor VARCHAR(128) NOT NULL, 
	actor_key_id BIGINT, 
	actor_tenant_id INTEGER NOT NULL, 
	action VARCHAR(64) NOT NULL, 
	target VARCHAR(160) NOT NULL, 
	old_values TEXT, 
	new_values TEXT, 
	address VARCHAR(64) NOT NULL, 
	request_id VARCHAR(128) NOT NULL
);
CREATE TABLE bulk_operation (
	id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	operation_id VARCHAR(36) NOT NULL, 
	tenant_id INTEGER NOT NULL, 
	client_request_id VARCHAR(128), 
	request_digest VARCHAR(1024) NOT NULL, 
	action VARCHAR(16) NOT NULL, 
	filter TEXT NOT NULL, 
	rate FLOAT NOT NULL, 
	status SMALLINT NOT NULL, 
	until_id BIGINT NOT NULL, 
	after_id BIGINT NOT NULL, 
	after_finished BIGINT NOT NULL, 
	resume_at BIGINT NOT NULL, 
	matched BIGINT NOT NULL, 
	matched_is_minimum BOOLEAN NOT NULL, 
	changed BIGINT DEFAULT '0' NOT NULL, 
	refused TEXT NOT NULL, 
	error_code VARCHAR(64), 
	error_message VARCHAR(2000), 
	created_at BIGINT NOT NULL, 
	updated_at BIGINT NOT NULL, 
	started_at BIGINT, 
	finished_at BIGINT, 
	CONSTRAINT ck_bulk_operation_client_request_id_length CHECK (length(client_request_id) <= 128), 
	CONSTRAINT uq_bulk_operation_operation_id UNIQUE (operation_id), 
	CONSTRAINT uq_bulk_operation_tenant_id_client_request_id UNIQUE (tenant_id, client_request_id)
);
CREATE TABLE callback_delivery (
	id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	delivery_id VARCHAR(36) NOT NULL, 
	tenant_id INTEGER DEFAULT '0' NOT NULL, 
	job_id BIGINT NOT NULL, 
	execution_id VARCHAR(36), 
	event_type VARCHAR(32) NOT NULL, 
	url VARCHAR(2048) NOT NULL, 
	body TEXT NOT NULL, 
	status SMALLINT NOT NULL, 
	tries INTEGER NOT NULL, 
	owner_worker_id VARCHAR(128), 
	next_try_at BIGINT NOT NULL, 
	last_status_code INTEGER, 
	last_error VARCHAR(2000), 
	last_latency_ms INTEGER, 
	created_at BIGINT NOT NULL, 
	ended_at BIGINT, host VARCHAR(255) DEFAULT '' NOT NULL, headers TEXT, owed_since BIGINT DEFAULT '0' NOT NULL, success_try INTEGER, success_at BIGINT, success_worker_id VARCHAR(128), success_status_code INTEGER, success_latency_ms INTEGER, success_answer TEXT, 
	CONSTRAINT uq_callback_delivery_delivery_id UNIQUE (delivery_id)
);
CREATE TABLE callback_try (
	job_id BIGINT NOT NULL, 
	delivery_key BIGINT NOT NULL, 
	try_number INTEGER NOT NULL, 
	tried_at BIGINT NOT NULL, 
	worker_id VARCHAR(128) NOT NULL, 
	delivered BOOLEAN NOT NULL, 
	status_code INTEGER, 
	latency_ms INTEGER NOT NULL, 
	error VARCHAR(2000), 
	answer TEXT, 
	CONSTRAINT pk_callback_try PRIMARY KEY (job_id, delivery_key, try_number)
);
CREATE TABLE concurrency_slot (
	tenant_id INTEGER NOT NULL, 
	name VARCHAR(128) NOT NULL, 
	waits SMALLINT NOT NULL, 
	turn SMALLINT NOT NULL, 
	due BIGINT NOT NULL, 
	job_id BIGINT NOT NULL, 
	CONSTRAINT pk_concurrency_slot PRIMARY KEY (tenant_id, name, waits, turn, due, job_id)
);
CREATE TABLE dispatch_term (
	partition_no SMALLINT NOT NULL, 
	term BIGINT NOT NULL, 
	holder VARCHAR(128) NOT NULL, 
	since BIGINT NOT NULL, 
	CONSTRAINT pk_dispatch_term PRIMARY KEY (partition_no)
);
CREATE TABLE egress_allow (
	tenant_id INTEGER NOT NULL, 
	networks TEXT NOT NULL, 
	updated_at BIGINT NOT NULL, 
	CONSTRAINT pk_egress_allow PRIMARY KEY (tenant_id)
);
CREATE TABLE execution_log (
	log_id BIGINT NOT NULL, 
	next_seq BIGINT NOT NULL, 
	head_bytes INTEGER NOT NULL, 
	tail_bytes INTEGER NOT NULL, 
	tail_first_seq BIGINT, 
	dropped_lines BIGINT NOT NULL, 
	dropped_bytes BIGINT NOT NULL, 
	complete BOOLEAN NOT NULL, 
	CONSTRAINT pk_execution_log PRIMARY KEY (log_id)
);
CREATE TABLE handler_schema (
	digest VARCHAR(64) NOT NULL, 
	body TEXT NOT NULL, 
	seen_at BIGINT NOT NULL, 
	CONSTRAINT pk_handler_schema PRIMARY KEY (digest)
);
CREATE TABLE job_expiry (
	look_at BIGINT NOT NULL, 
	job_id BIGINT NOT NULL, 
	CONSTRAINT pk_job_expiry PRIMARY KEY (look_at, job_id)
);
CREATE TABLE job_info (
	id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	tenant_id INTEGER DEFAULT '0' NOT NULL, 
	client_request_id VARCHAR(128), 
	request_digest VARCHAR(1024), 
	submit_token VARCHAR(32), 
	parent_id BIGINT, 
	root_id BIGINT, 
	nominal_time BIGINT, 
	shard_index INTEGER DEFAULT '0' NOT NULL, 
	shard_total INTEGER DEFAULT '1' NOT NULL, 
	child_key VARCHAR(128) DEFAULT '' NOT NULL, 
	kind SMALLINT NOT NULL, 
	job_name VARCHAR(128) NOT NULL, 
	job_handler VARCHAR(128) NOT NULL, 
	queue_id BIGINT NOT NULL, 
	partition_no SMALLINT DEFAULT '0' NOT NULL, 
	status SMALLINT NOT NULL, 
	priority SMALLINT NOT NULL, 
	next_trigger_time BIGINT, 
	trigger_ts BIGINT DEFAULT '0' NOT NULL, 
	owner_worker_id VARCHAR(128), 
	execution_id VARCHAR(36), 
	stopping_execution_id VARCHAR(36), 
	claim_token VARCHAR(32), 
	attempt INTEGER DEFAULT '0' NOT NULL, 
	returned INTEGER DEFAULT '0' NOT NULL, 
	max_retry INTEGER NOT NULL, 
	retry_interval_ms BIGINT NOT NULL, 
	retry_backoff VARCHAR(16) NOT NULL, 
	timeout_ms BIGINT, 
	callback_url VARCHAR(2048), 
	params TEXT, 
	params_in_payload BOOLEAN DEFAULT '0' NOT NULL, 
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
	fires BIGINT DEFAULT '0' NOT NULL, 
	start_at BIGINT, 
	end_at BIGINT, 
	version INTEGER DEFAULT '0' NOT NULL, 
	revision INTEGER DEFAULT '0' NOT NULL, 
	created_at BIGINT NOT NULL, 
	updated_at BIGINT NOT NULL, 
	finished_at BIGINT, expires_at BIGINT, child_queue_id BIGINT, anchor_at BIGINT, misfire_cap INTEGER, misfire_spacing_ms BIGINT, skip_from BIGINT, skip_reason VARCHAR(32), callback_events VARCHAR(64), callback_headers TEXT, concurrency_key VARCHAR(128), concurrency_limit INTEGER, rate_key VARCHAR(128), rate_per_second DOUBLE, rate_due BIGINT, secret SMALLINT DEFAULT '0' NOT NULL, 
	CONSTRAINT ck_job_info_client_request_id_length CHECK (length(client_request_id) <= 128), 
	CONSTRAINT ck_job_info_job_handler_length CHECK (length(job_handler) <= 128), 
	CONSTRAINT ck_job_info_job_name_length CHECK (length(job_name) <= 128), 
	CONSTRAINT uq_job_info_parent_id_nominal_time_shard_index_child_key UNIQUE (parent_id, nominal_time, shard_index, child_key), 
	CONSTRAINT uq_job_info_tenant_id_client_request_id UNIQUE (tenant_id, client_request_id)
);
CREATE TABLE job_label (
	job_id BIGINT NOT NULL, 
	name VARCHAR(64) NOT NULL, 
	value VARCHAR(128) NOT NULL, 
	CONSTRAINT pk_job_label PRIMARY KEY (job_id, name)
);
CREATE TABLE job_log (
	id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
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
	reason VARCHAR(255), 
	result TEXT, 
	result_in_payload BOOLEAN DEFAULT '0' NOT NULL, 
	log_pointer VARCHAR(255), 
	stale_at BIGINT, 
	stale_status VARCHAR(16), progress DOUBLE, progress_text VARCHAR(200), progress_at BIGINT, 
	CONSTRAINT uq_job_log_execution_id UNIQUE (execution_id)
);
CREATE TABLE job_payload (
	job_id BIGINT NOT NULL, 
	slot VARCHAR(36) NOT NULL, 
	body TEXT NOT NULL, byte_count INTEGER, 
	CONSTRAINT pk_job_payload PRIMARY KEY (job_id, slot)
);
CREATE TABLE limit_key (
	tenant_id INTEGER NOT NULL, 
	kind SMALLINT NOT NULL, 
	name VARCHAR(128) NOT NULL, 
	next_at BIGINT NOT NULL, begins_at BIGINT DEFAULT '0' NOT NULL, 
	CONSTRAINT pk_limit_key PRIMARY KEY (tenant_id, kind, name)
);
CREATE TABLE log_chunk (
	log_id BIGINT NOT NULL, 
	first_seq BIGINT NOT NULL, 
	line_count INTEGER NOT NULL, 
	byte_count INTEGER NOT NULL, 
	dropped_lines BIGINT NOT NULL, 
	dropped_bytes BIGINT NOT NULL, 
	body TEXT NOT NULL, 
	CONSTRAINT pk_log_chunk PRIMARY KEY (log_id, first_seq)
);
CREATE TABLE queue (
	id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	tenant_id INTEGER DEFAULT '0' NOT NULL, 
	job_handler VARCHAR(128) NOT NULL, 
	requirement VARCHAR(255) DEFAULT '' NOT NULL, 
	partition_no SMALLINT DEFAULT '0' NOT NULL, 
	CONSTRAINT ck_queue_job_handler_length CHECK (length(job_handler) <= 128), 
	CONSTRAINT uq_queue_job_handler_requirement_tenant_id_partition_no UNIQUE (job_handler, requirement, tenant_id, partition_no)
);
CREATE TABLE retention_policy (
	tenant_id INTEGER NOT NULL, 
	status SMALLINT NOT NULL, 
	keep_ms BIGINT NOT NULL, 
	CONSTRAINT pk_retention_policy PRIMARY KEY (tenant_id, status)
);
CREATE TABLE schedule_backfill (
	id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	schedule_id BIGINT NOT NULL, 
	token VARCHAR(32) NOT NULL, 
	status SMALLINT NOT NULL, 
	cursor_time BIGINT NOT NULL, 
	from_time BIGINT NOT NULL, 
	to_time BIGINT NOT NULL, 
	max_concurrent INTEGER NOT NULL, 
	spawned BIGINT NOT NULL, 
	created_at BIGINT NOT NULL, 
	ended_at BIGINT, 
	CONSTRAINT uq_schedule_backfill_token UNIQUE (token)
);
CREATE TABLE schedule_live (
	schedule_id BIGINT NOT NULL, 
	child_id BIGINT NOT NULL, 
	waits SMALLINT NOT NULL, 
	backfill_id BIGINT NOT NULL, 
	CONSTRAINT pk_schedule_live PRIMARY KEY (schedule_id, child_id)
);
CREATE TABLE schedule_skip (
	id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	schedule_id BIGINT NOT NULL, 
	from_time BIGINT NOT NULL, 
	to_time BIGINT NOT NULL, 
	count BIGINT NOT NULL, 
	reason VARCHAR(32) NOT NULL, 
	CONSTRAINT uq_schedule_skip_schedule_id_from_time UNIQUE (schedule_id, from_time)
);
CREATE TABLE schema_revision (
	id SMALLINT NOT NULL, 
	revision INTEGER NOT NULL, 
	oldest_code INTEGER NOT NULL, 
	CONSTRAINT pk_schema_revision PRIMARY KEY (id)
);
CREATE TABLE sqlite_sequence(name,seq);
CREATE TABLE stopping_execution (
	execution_id VARCHAR(36) NOT NULL, 
	job_id BIGINT NOT NULL, 
	trigger_ts BIGINT NOT NULL, 
	worker_id VARCHAR(128) NOT NULL, 
	CONSTRAINT pk_stopping_execution PRIMARY KEY (execution_id)
);
CREATE TABLE tenant (
	id INTEGER NOT NULL, 
	name VARCHAR(64) NOT NULL, 
	token VARCHAR(32) NOT NULL, 
	created_at BIGINT NOT NULL, 
	disabled_at BIGINT, 
	CONSTRAINT pk_tenant PRIMARY KEY (id), 
	CONSTRAINT uq_tenant_name UNIQUE (name)
);
CREATE TABLE tenant_limits (
	tenant_id INTEGER NOT NULL, 
	weight DOUBLE DEFAULT '1' NOT NULL, 
	submissions_per_second DOUBLE, 
	waiting_jobs INTEGER, 
	running_jobs INTEGER, 
	may_borrow BOOLEAN DEFAULT '1' NOT NULL, stored_bytes BIGINT, 
	CONSTRAINT pk_tenant_limits PRIMARY KEY (tenant_id)
);
CREATE TABLE tenant_stored (
	tenant_id INTEGER NOT NULL, 
	bytes BIGINT NOT NULL, 
	counted_from BIGINT NOT NULL, 
	CONSTRAINT pk_tenant_stored PRIMARY KEY (tenant_id)
);
CREATE TABLE webhook_secret (
	id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	tenant_id INTEGER NOT NULL, 
	sealed TEXT NOT NULL, 
	shown VARCHAR(128) NOT NULL, 
	created_at BIGINT NOT NULL, 
	expires_at BIGINT
);
CREATE TABLE worker_node (
	id VARCHAR(128) NOT NULL, 
	name VARCHAR(64) NOT NULL, 
	boot_id VARCHAR(64) NOT NULL, 
	url VARCHAR(512) NOT NULL, 
	version VARCHAR(64) NOT NULL, 
	state VARCHAR(16) NOT NULL, 
	handlers TEXT NOT NULL, 
	labels TEXT NOT NULL, 
	capacity INTEGER NOT NULL, 
	weight FLOAT NOT NULL, 
	delivers BOOLEAN NOT NULL, 
	load_seq BIGINT NOT NULL, 
	active INTEGER NOT NULL, 
	queued INTEGER NOT NULL, 
	avg_cost_ms FLOAT NOT NULL, 
	cpu_idle_percent FLOAT NOT NULL, 
	held TEXT NOT NULL, 
	beats BIGINT NOT NULL, 
	first_heartbeat BIGINT NOT NULL, 
	last_heartbeat BIGINT NOT NULL, worker_group VARCHAR(64), key_digest VARCHAR(64), egress_allow TEXT, 
	CONSTRAINT pk_worker_node PRIMARY KEY (id)
);
CREATE INDEX ix_api_key_kind ON api_key (kind);
CREATE INDEX ix_api_key_tenant_id_id ON api_key (tenant_id, id);
CREATE INDEX ix_audit_log_at_id ON audit_log (at, id);
CREATE INDEX ix_audit_log_target_at_id ON audit_log (target, at, id);
CREATE INDEX ix_audit_log_tenant_id_at_id ON audit_log (tenant_id, at, id);
CREATE INDEX ix_bulk_operation_status_id ON bulk_operation (status, id);
CREATE INDEX ix_bulk_operation_tenant_id_id ON bulk_operation (tenant_id, id);
CREATE INDEX ix_callback_delivery_host ON callback_delivery (status, host, next_try_at, id);
CREATE INDEX ix_callback_delivery_job_id ON callback_delivery (job_id);
CREATE INDEX ix_job_info_claim ON job_info (status, queue_id, priority, next_trigger_time, id);
CREATE INDEX ix_job_info_finished ON job_info (tenant_id, finished_at, id) WHERE finished_at IS NOT NULL;
CREATE INDEX ix_job_label_name_value_job_id ON job_label (name, value, job_id);
CREATE INDEX ix_job_log_job_id_id ON job_log (job_id, id);
CREATE INDEX ix_queue_tenant_id_id ON queue (tenant_id, id);
CREATE INDEX ix_schedule_backfill_of ON schedule_backfill (schedule_id, id);
CREATE INDEX ix_schedule_backfill_open ON schedule_backfill (status, id);
CREATE INDEX ix_schedule_live_waits ON schedule_live (waits, schedule_id);
CREATE INDEX ix_webhook_secret_tenant_id ON webhook_secret (tenant_id);
