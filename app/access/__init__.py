"""Who calls: API keys of callers, the token of workers."""
