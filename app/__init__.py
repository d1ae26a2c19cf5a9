"""The dispatcher service: the API for callers, the dispatch loop, the outbox of callbacks."""
