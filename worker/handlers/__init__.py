"""The handlers that every worker offers."""
