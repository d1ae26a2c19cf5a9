"""The promise to callers: submit a job, look at it, wait for its end."""
