"""The outbox of callbacks: what is owed, to whom it is handed, what came of it."""
