"""The worker service: takes runs, runs handlers, reports, delivers callbacks."""
